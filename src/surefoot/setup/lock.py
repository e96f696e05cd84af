"""The exact packages of a plan: every pip call resolved in order, with versions and hashes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from surefoot.errors import UserError, WorkError
from surefoot.files import write_text
from surefoot.machine.snapshot import dist_name
from surefoot.setup.plan import Plan
from surefoot.setup.telling import telling

#: A line of a plan that calls pip: variables and interpreter, then what is installed.
PIP_LINE = re.compile(r"^(?P<head>(?:\w+=\S+\s+)*\S.*?\s-m pip) install\s+(?P<args>[^\n;&|]+)$", re.M)
#: Options with a value that a resolve needs as they stand.
_PASSED = ("--index-url", "-i", "--extra-index-url", "--find-links", "-f", "--no-binary", "--only-binary")
_FLAGS = ("--pre", "--no-deps", "--no-build-isolation")


@dataclass(frozen=True)
class PipCall:
    """One `pip install` of a plan.

    Attributes:
        step: id of its step.
        number: which of the step's calls it is, from 1.
        env: variables set in front of it.
        options: options that decide what is chosen.
        requirements: what is asked for.
    """

    step: str
    number: int
    env: dict[str, str]
    options: tuple[str, ...]
    requirements: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its lock file."""
        return f"{self.step}-{self.number}.txt"


@dataclass(frozen=True)
class Locked:
    """One file that pip would install.

    Attributes:
        name: the distribution's normalised name.
        version: its version, local tag included.
        url: where it comes from, without credentials; a folder for one that is built from a folder.
        sha256: of the file; empty where it is built from a folder, or where the index does not say.
        file: the file's name; empty where it is built from a folder.
    """

    name: str
    version: str
    url: str
    sha256: str
    file: str

    @property
    def lines(self) -> str:
        """Its entry in a requirements file."""
        return f"{self.name}=={self.version} \\\n    --hash=sha256:{self.sha256}\n"


def pip_calls(plan: Plan) -> tuple[PipCall, ...]:
    """List a plan's pip installs in order."""
    return tuple(
        _call(step.id, number, found)
        for step in plan.steps
        for number, found in enumerate(PIP_LINE.finditer("\n".join(step.commands)), start=1)
    )


def _call(step: str, number: int, found: re.Match[str]) -> PipCall:
    front = [word.partition("=") for word in shlex.split(found["head"]) if re.match(r"\w+=", word)]
    words, options, requirements = shlex.split(found["args"]), [], []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("-c", "--constraint", "--upgrade-strategy"):
            value = value if equals else words.pop(0)
        elif name in _PASSED:
            options += [name, value if equals else words.pop(0)]
        elif word in _FLAGS:
            options.append(word)
        elif not word.startswith("-"):
            requirements.append(word)
    return PipCall(step, number, {k: v for k, _, v in front}, tuple(options), tuple(requirements))


def python_of(plan: Plan) -> str:
    """The Python that a plan's environment gets, as `3.12`; empty where the plan does not make one."""
    makes = " ".join(line for step in plan.steps if step.id == "env" for line in step.commands)
    found = re.search(r"python[= ]?(3\.\d+)", makes)
    return found.group(1) if found else ""


def interpreter_for(plan: Plan) -> str:
    """Find an interpreter of the version that a plan's environment gets, since pip chooses files for one version.

    Args:
        plan: the plan.

    Returns:
        The running one where it fits, else the one on PATH.

    Raises:
        UserError: there is none here.
    """
    wanted = python_of(plan)
    if wanted in ("", f"{sys.version_info[0]}.{sys.version_info[1]}"):
        return sys.executable
    if (found := shutil.which(f"python{wanted}")) and _runs(found):
        return found
    hint = f"install it (uv python install {wanted}), so that python{wanted} is on PATH"
    raise UserError(f"the plan is for Python {wanted}, which is not here to choose packages with", hint=hint)


def _runs(python: str) -> bool:
    """Whether an interpreter starts: a version manager's stand-in is on PATH also for versions that it has not."""
    try:
        return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def resolve(plan: Plan, say: Callable[[str], None], python: str) -> tuple[tuple[PipCall, tuple[Locked, ...]], ...]:
    """Let pip choose every package of a plan, without installing any.

    Args:
        plan: the plan.
        say: told what is being done.
        python: the interpreter that they are for.

    Returns:
        Each pip call with the files that it would install, dependencies included; versions agree over all calls.

    Raises:
        WorkError: pip found no set, or an index cannot be reached.
    """
    found: list[tuple[PipCall, tuple[Locked, ...]]] = []
    seen: dict[str, Locked] = {}
    calls = pip_calls(plan)
    with tempfile.TemporaryDirectory() as scratch:
        pins = Path(scratch) / "pins.txt"
        for call in calls:
            say(f"resolving {call.step}: {' '.join(call.requirements)}")
            known = [f"{item.name}=={item.version}" for item in seen.values()]
            pins.write_text("\n".join(dict.fromkeys([*plan.constraints, *known])) + "\n", encoding="utf-8")
            options = list(call.options)
            if plan.index and not {"--index-url", "-i"} & set(options):
                options += ["--extra-index-url", plan.index]  # torch's own build is there alone
            report = Path(scratch) / "report.json"
            arguments = ["install", "--dry-run", "--ignore-installed", "--report", str(report), "-c", str(pins)]
            run_pip([*arguments, *options, *call.requirements], python, call.env, f"resolve the step {call.step}")
            items = tuple(seen.get(item.name) or item for item in read_report(report))
            seen |= {item.name: item for item in items}
            found.append((call, items))
    return tuple(found)


def read_report(path: Path) -> tuple[Locked, ...]:
    """Read what `pip install --report` wrote, sorted by name."""
    rows = json.loads(path.read_text(encoding="utf-8"))["install"]
    return tuple(sorted((_locked(row) for row in rows), key=lambda item: item.name))


def _locked(row: dict[str, Any]) -> Locked:
    info = row["download_info"]
    parts = urlsplit(info["url"])
    host = parts.netloc.rpartition("@")[2]
    url = urlunsplit((parts.scheme, host, parts.path, "", ""))
    name, version = dist_name(row["metadata"]["name"]), row["metadata"]["version"]
    if "archive_info" not in info:
        return Locked(name, version, url, "", "")
    hashes = info["archive_info"].get("hashes") or {}
    return Locked(name, version, url, hashes.get("sha256", ""), unquote(parts.path.rpartition("/")[2]))


def run_pip(arguments: Sequence[str], python: str, env: dict[str, str], what: str) -> None:
    """Run pip.

    Args:
        arguments: what follows `pip`.
        python: the interpreter that it works for; one without a pip of its own will do.
        env: variables besides those of this process.
        what: what it is for, for the error.

    Raises:
        WorkError: pip cannot be run or failed; its last lines are told.
    """
    other = [] if python == sys.executable else ["--python", python]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *other, "--no-input", "--disable-pip-version-check", *arguments],
            capture_output=True, text=True, env={**os.environ, **env}, check=False,
        )  # fmt: skip
    except OSError as error:
        raise WorkError(f"{sys.executable} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise _failure(done.stdout, done.stderr, what, "--no-build-isolation" in arguments)


def _failure(stdout: str, stderr: str, what: str, from_source: bool) -> WorkError:
    """Say what pip could not do, with its telling lines."""
    lines = telling(stderr)
    conflict = re.search(r"The conflict is caused by:\n((?:    .*\n)+)", stdout + stderr)
    if conflict:
        lines, hint = (
            tuple(line.strip() for line in conflict.group(1).splitlines()),
            "another index or another release has them",
        )
    elif "No module named pip" in stderr:
        hint = "add pip to it: python -m ensurepip"
    elif from_source:
        hint = "it is built from source, and even its description needs torch: run surefoot where the plan's is"
    else:
        hint = "is the index reachable, and does it have what is asked for?"
    return WorkError(f"pip could not {what}: " + "\n  ".join(lines), hint=hint)


def lock_text(items: Sequence[Locked], head: str) -> str:
    """Write a lock file: every package with its version and its hash."""
    return f"# {head}\n" + "".join(item.lines for item in items)


def write_lock(plan: Plan, path: Path, say: Callable[[str], None]) -> None:
    """Write one lock file for a whole plan, downloading as little as pip needs to choose.

    Args:
        plan: the plan.
        path: the file.
        say: told what is being done.

    Raises:
        UserError: no Python of the plan's version is here.
        WorkError: pip found no set, or an index gives no hashes.
    """
    items = {item.name: item for _, found in resolve(plan, say, interpreter_for(plan)) for item in found}
    bare = [item for item in items.values() if not item.sha256]
    if bare:
        what = "is built from a folder" if not bare[0].file else "has no hash on its index"
        raise WorkError(
            f"{bare[0].name} {what}", hint="surefoot setup bundle builds or fetches it and locks the result"
        )
    locked = [items[name] for name in sorted(items)]
    write_text(path, lock_text(locked, f"surefoot setup --lock: {plan.torch or 'torch'} from {plan.index or 'pip'}"))


def without_pip(plan: Plan) -> tuple[str, ...]:
    """Name the steps that fetch something that is no Python package, so that no bundle holds it."""
    pip = {call.step for call in pip_calls(plan)}
    return tuple(f"{s.id}: {'; '.join(s.downloads)}" for s in plan.steps if s.downloads and s.id not in pip)
