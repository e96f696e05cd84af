"""Everything that a plan's pip calls install, in one folder for a site without a network, verified by hash.

DIR/wheels/     the files
DIR/locks/      one requirements file with hashes for each pip call of the plan
DIR/lock.txt    all of them together
DIR/chosen.json the versions chosen, from the first attempt on; without it they are chosen anew
DIR/bundle.json what the bundle is for, and where each file came from; written last, so that its presence means whole
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from surefoot.errors import UserError, WorkError
from surefoot.files import explain_disk_errors, write_json, write_text
from surefoot.setup.lock import (
    PIP_LINE,
    Locked,
    PipCall,
    interpreter_for,
    lock_text,
    pip_calls,
    python_of,
    resolve,
    run_pip,
    without_pip,
)
from surefoot.setup.plan import Plan, Step, Wish

SCHEMA = "surefoot.bundle/1"
_FETCHING = ".fetching-"


def bundle(plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
    """Fetch everything that a plan's pip calls install.

    An interrupted bundle is resumed: what is there and has the right hash is kept, a damaged file is named and fetched
    again. The versions are those of the first attempt, as long as its locks are there.

    Args:
        plan: the plan.
        folder: where the bundle goes.
        say: told what is being done.

    Raises:
        WorkError: pip could not resolve or fetch something.
        UserError: the folder cannot be written, or no Python of the plan's version is here.
    """
    python = interpreter_for(plan)
    wheels = folder / "wheels"
    with explain_disk_errors(folder):
        wheels.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{_FETCHING}*"):  # of an attempt that was killed
        shutil.rmtree(old, ignore_errors=True)
    chosen = _resumed(plan, folder, say, python)
    done: dict[str, Locked] = {}
    for number, item in enumerate({i.name: i for _, items in chosen for i in items}.values(), start=1):
        call = next(c for c, items in chosen if any(i.name == item.name for i in items))
        say(f"{number}: {item.name} {item.version}")
        done[item.name] = _fetch(item, call, wheels, say, python)
    for call, items in chosen:
        head = f"step {call.step}: {' '.join(call.requirements)}"
        write_text(folder / "locks" / call.name, lock_text([done[i.name] for i in items], head))
    everything = [done[name] for name in sorted(done)]
    write_text(folder / "lock.txt", lock_text(everything, f"{plan.torch or 'torch'} and all that goes with it"))
    left = without_pip(plan)
    document = {
        "schema": SCHEMA, "torch": plan.torch, "index": plan.index, "targets": list(plan.targets),
        "made_with": _options(plan.wish),
        **_described(python), "packages": [asdict(item) for item in everything], "not_included": list(left),
    }  # fmt: skip
    write_json(folder / "bundle.json", document)
    size = sum((wheels / item.file).stat().st_size for item in everything) / 2**30
    say(f"{folder}: {len(everything)} packages, {size:.2f} GiB")
    for line in left:
        say(f"not included, since it is no Python package: {line}")


def _options(wish: Wish) -> str:
    """Write a wish as the options that it was given by."""
    usual, words = Wish(), []
    for field in fields(Wish):
        value = getattr(wish, field.name)
        if value != getattr(usual, field.name):
            words += ["--for" if field.name == "purposes" else f"--{field.name}"]
            words += ["+".join(value) if isinstance(value, tuple) else value]
    return shlex.join(words)


def _described(python: str) -> dict[str, str]:
    """Version and platform of an interpreter."""
    if python == sys.executable:
        return {"python": ".".join(platform.python_version_tuple()[:2]), "platform": sysconfig.get_platform()}
    code = "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_platform())"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return {"python": answer[0], "platform": answer[1]}


def _resumed(
    plan: Plan, folder: Path, say: Callable[[str], None], python: str
) -> tuple[tuple[PipCall, tuple[Locked, ...]], ...]:
    """Take up what an earlier attempt chose for the same pip calls, or choose."""
    path = folder / "chosen.json"
    asked = {"torch": plan.torch, "index": plan.index, "constraints": list(plan.constraints), **_described(python)}
    if path.is_file():
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            before = _chosen(old) if old["asked"] == asked else ()
        except (ValueError, KeyError, TypeError):
            say(f"{path} cannot be understood: choosing anew")
            before = ()
        if before and [call for call, _ in before] == list(pip_calls(plan)):
            say("resuming: versions as chosen before")
            return before
    (folder / "bundle.json").unlink(missing_ok=True)
    chosen = resolve(plan, say, python)
    rows = [{"call": asdict(call), "items": [asdict(item) for item in items]} for call, items in chosen]
    write_json(path, {"asked": asked, "chosen": rows})
    return chosen


def _chosen(document: dict[str, Any]) -> tuple[tuple[PipCall, tuple[Locked, ...]], ...]:
    return tuple((_call(row["call"]), tuple(Locked(**item) for item in row["items"])) for row in document["chosen"])


def _call(row: dict[str, Any]) -> PipCall:
    return PipCall(row["step"], row["number"], row["env"], tuple(row["options"]), tuple(row["requirements"]))


def _fetch(item: Locked, call: PipCall, wheels: Path, say: Callable[[str], None], python: str) -> Locked:
    """Bring one file into the folder, unless it is there and whole."""
    if item.file and (wheels / item.file).is_file():
        actual = sha256_of(wheels / item.file)
        if item.sha256 == actual:
            return item
        say(f"{item.file} is damaged or another build: fetched again")
        (wheels / item.file).unlink()
    with tempfile.TemporaryDirectory(dir=wheels.parent, prefix=_FETCHING) as scratch:
        # Not whole before it is renamed into its place: a killed fetch leaves nothing under the right name.
        if item.file:
            mark = f"#sha256={item.sha256}" if item.sha256 else ""
            options = [flag for flag in call.options if flag == "--no-build-isolation"]
            arguments = ["download", "--no-deps", "-d", scratch, *options, f"{item.name} @ {item.url}{mark}"]
        else:
            arguments = ["wheel", "--no-deps", "-w", scratch, unquote(urlsplit(item.url).path)]
        run_pip(arguments, python, call.env, f"fetch {item.name} {item.version}")
        file = next(path for path in Path(scratch).iterdir() if path.is_file())
        found = replace(item, file=file.name, sha256=sha256_of(file))
        if item.sha256 and found.sha256 != item.sha256:
            raise WorkError(f"{file.name} is not what its index promised: sha256 {found.sha256[:12]}… came")
        with explain_disk_errors(wheels):
            file.replace(wheels / file.name)
    return found


def sha256_of(path: Path) -> str:
    """Hash a file, a piece at a time."""
    state = hashlib.sha256()
    with path.open("rb") as handle:
        while piece := handle.read(1 << 20):
            state.update(piece)
    return state.hexdigest()


# ---- at the site ----
def read_bundle(folder: Path) -> dict[str, Any]:
    """Read a bundle's description.

    Args:
        folder: the bundle.

    Returns:
        Its `bundle.json`.

    Raises:
        UserError: it is no bundle, or one that was never finished.
    """
    try:
        found = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        unfinished = (folder / "chosen.json").is_file()
        hint = (
            "it was not finished: run surefoot setup bundle again" if unfinished else "surefoot setup bundle makes one"
        )
        raise UserError(f"{folder} holds no whole bundle", hint=hint, key="--offline") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/bundle.json cannot be read: {error}", key="--offline") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise UserError(f"{folder}/bundle.json has not the schema {SCHEMA}", hint="make it anew", key="--offline")
    return found


def problems(folder: Path) -> list[str]:
    """Check every file of a bundle.

    Args:
        folder: the bundle.

    Returns:
        One sentence for each file that is missing or damaged; empty when the bundle is whole.
    """
    wrong = []
    for row in read_bundle(folder)["packages"]:
        path = folder / "wheels" / row["file"]
        if not path.is_file():
            wrong.append(f"{path.name} is missing")
        elif (actual := sha256_of(path)) != row["sha256"]:
            wrong.append(f"{path.name} is damaged: its sha256 is {actual[:12]}…, the lock has {row['sha256'][:12]}…")
    return wrong


def install_args(folder: Path, lock: str = "lock.txt") -> tuple[str, ...]:
    """Arguments of `pip install` that take everything from a bundle, and nothing that is not in its lock.

    Args:
        folder: the bundle.
        lock: which of its lock files.

    Returns:
        The arguments.

    Raises:
        UserError: the folder is no bundle.
        WorkError: a file is missing or damaged; each is named.
    """
    wrong = problems(folder)
    if wrong:
        raise WorkError(f"the bundle {folder} is not whole: {'; '.join(wrong)}", hint="run surefoot setup bundle again")
    return _arguments(folder, lock)


def _arguments(folder: Path, lock: str) -> tuple[str, ...]:
    links = ("--no-index", "--find-links", str(folder / "wheels"))
    return (*links, "--no-deps", "--require-hashes", "-r", str(folder / lock))


def offline(plan: Plan, folder: Path) -> Plan:
    """Turn a plan into one whose pip calls take everything from a bundle.

    Args:
        plan: the plan, made at the site.
        folder: the bundle.

    Returns:
        The plan with other pip calls; the same steps.

    Raises:
        UserError: the bundle is for another torch, another Python or lacks a step.
        WorkError: a file is missing or damaged.
    """
    found = read_bundle(folder)
    if found["torch"] != plan.torch:
        hint = f"plan with the options that the bundle was made with: {found.get('made_with') or 'none'}"
        raise UserError(f"the bundle has torch {found['torch']}, the plan {plan.torch}", hint=hint, key="--offline")
    python = python_of(plan)
    if python and python != found["python"]:
        hint = "plan for the Python of the bundle, or make the bundle from this plan"
        raise UserError(
            f"the bundle is for Python {found['python']}, the plan makes {python}", hint=hint, key="--offline"
        )
    install_args(folder)
    left = without_pip(plan)
    notes = tuple(f"the bundle does not hold what this step fetches: {line}" for line in left)
    return replace(
        plan, steps=tuple(_offline_step(s, folder.absolute()) for s in plan.steps), notes=(*plan.notes, *notes)
    )


def _offline_step(step: Step, folder: Path) -> Step:
    """Let a step's pip calls read their own lock files."""
    number = 0

    def swap(found: re.Match[str]) -> str:
        nonlocal number
        number += 1
        lock = f"locks/{step.id}-{number}.txt"
        if not (folder / lock).is_file():
            raise UserError(
                f"the bundle has nothing for the step {step.id}", hint="make it for this plan", key="--offline"
            )
        kept = [word for word in shlex.split(found["args"]) if word == "--no-build-isolation"]
        return f"{found['head']} install {shlex.join((*kept, *_arguments(folder, lock)))}"

    commands = tuple(PIP_LINE.sub(swap, command) for command in step.commands)
    return replace(
        step,
        commands=commands,
        downloads=("nothing: from the bundle",) if commands != step.commands else step.downloads,
    )
