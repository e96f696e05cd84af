"""Surefoot's two first commands, with nothing but Python: set up `.venv` here, then run the quickstart or the checks.

    python3 go.py quickstart    teaches a real model a new skill on the CPU, and shows that it learned it
    python3 go.py test          runs every check that the project has

A torch that the running Python can already import (ROCm, CUDA, CPU) is used as it is and never replaced.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
SCRIPTS = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = SCRIPTS / ("python.exe" if os.name == "nt" else "python")
DONE = VENV / "surefoot-setup.json"
LOG = VENV / "surefoot-setup.log"
TORCH = "torch==2.13.0"  # what is installed where there is no torch at all
TRITON = "triton==3.7.1"  # with a torch that has none: checks what our kernels become on GPUs that are not here
OLDEST = (3, 10)
ROOM_GIB = 4
QUICKSTART = "examples/quickstart.yaml"
UNDER, OVER = 10.0, 80.0  # exact-match %, before and after training: what the quickstart promises


class GoError(Exception):
    """Ends the command with a message for the person."""


# ---------------------------------------------------------------- setting up


def set_up(extras: list[str]) -> None:
    """Make `.venv` hold this project with `extras`; what is already there is left alone."""
    if shutil.disk_usage(ROOT).free < ROOM_GIB * 2**30 and not DONE.exists():
        raise GoError(f"less than {ROOM_GIB} GiB are free under {ROOT}: make room, then run this again")
    outside = torch_version(Path(sys.executable))
    if outside is None and importlib.util.find_spec("torch"):
        raise GoError(
            f"{sys.executable} has a torch that cannot be imported. See `{sys.executable} -c 'import torch'`; "
            "mend or uninstall it, or run this with another Python."
        )
    torch = torch_version(PYTHON)
    if torch is None and (outside or not PYTHON.exists()):
        make_venv(outside)  # anew, where your torch came after an attempt without one
        torch = torch_version(PYTHON)
    elif outside and torch != outside:
        say(
            f"note: {VENV} has torch {torch}, your Python {outside}: to use that one, remove the folder and start again"
        )
    if torch is None:
        say(f"no torch is visible: installing {TORCH} (for a ROCm torch, stop here, install yours, and start again)")
        pip("install", TORCH)
        torch = torch_version(PYTHON)
        if torch is None:
            raise GoError(f"torch was installed but cannot be imported; see {LOG}")
    fingerprint = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + torch.encode()).hexdigest()
    done = json.loads(DONE.read_text()) if DONE.exists() else {}
    if done.get("fingerprint") == fingerprint and set(extras) <= set(done.get("extras", [])):
        say(f"set up already (torch {torch})")
        return
    say(f"installing surefoot[{','.join(extras)}] beside torch {torch}")
    with tempfile.TemporaryDirectory() as scratch:
        pins = Path(scratch) / "constraints.txt"
        pins.write_text(f"torch=={torch}\n")
        pip("install", "--constraint", str(pins), "--editable", f"{ROOT}[{','.join(extras)}]")
    now = torch_version(PYTHON)
    if now != torch:
        raise GoError(f"the installation replaced torch {torch} with {now}; remove {VENV} and report this")
    DONE.write_text(json.dumps({"fingerprint": fingerprint, "extras": extras, "torch": torch}) + "\n")


def make_venv(outside: str | None) -> None:
    """Create `.venv`; it sees the running Python's packages when a torch is among them."""
    inside_another = sys.prefix != sys.base_prefix
    options = ["--system-site-packages"] if outside and not inside_another else []
    say(f"making {VENV}" + (f", which sees your torch {outside} and keeps it" if outside else ""))
    outcome = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", *options, str(VENV)], capture_output=True, text=True
    )
    if outcome.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        version = "{}.{}".format(*sys.version_info[:2])
        raise GoError(
            f"this Python cannot make a virtual environment:\n{(outcome.stdout + outcome.stderr).strip()}\n"
            f"On Debian and Ubuntu: apt install python{version}-venv"
        )
    if outside and inside_another:
        # --system-site-packages would show the Python below the active environment, not the environment itself
        packages = run_python(PYTHON, "import sysconfig; print(sysconfig.get_path('purelib'))")
        active = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        Path(packages, "surefoot_outer.pth").write_text("\n".join(active) + "\n")


def run_python(python: Path, code: str) -> str:
    """What a snippet prints, or "" if it fails."""
    if not python.exists():
        return ""
    outcome = subprocess.run([str(python), "-c", code], capture_output=True, text=True, cwd=tempfile.gettempdir())
    return outcome.stdout.strip() if outcome.returncode == 0 else ""


def torch_version(python: Path) -> str | None:
    """The version of the torch that a Python can really import; None if it has none or a broken one."""
    return run_python(python, "import torch; print(torch.__version__)") or None


def pip(*arguments: str) -> None:
    """Run the environment's pip, one changing line on the screen, everything in the log."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments, "--progress-bar", "off"]
    started, lines = time.monotonic(), []
    with LOG.open("a", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line.rstrip())
            if sys.stdout.isatty():
                print(f"\r\033[K   {time.monotonic() - started:4.0f} s  {line.strip()[:90]}", end="", flush=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    if process.wait():
        raise GoError(explain_pip("\n".join(lines)))
    say(f"done in {time.monotonic() - started:.0f} s")


def explain_pip(output: str) -> str:
    """The last words of pip, and what usually helps against them."""
    tail = "\n".join(f"   {line}" for line in output.splitlines()[-8:])
    if re.search(r"No space left|Errno 28", output):
        advice = f"The disk is full: an installation needs about {ROOM_GIB} GiB (more with a CUDA torch)."
    elif re.search(r"resolution|Connection|timed out|Network|SSL", output):
        advice = (
            "The package registry could not be reached: check the network or pip's proxy settings, then run this again."
        )
    else:
        advice = "Run this again after mending it: what is done already is kept."
    return f"pip failed:\n{tail}\n{advice} All of its output: {LOG}"


# ---------------------------------------------------------------- the quickstart


def quickstart() -> int:
    """Rows, score, train, score: exit 1 if the model did not learn what is promised."""
    started = time.monotonic()
    set_up(["demo"])
    output = ROOT / "saves" / "quickstart"
    score = [PYTHON, ROOT / "examples/quickstart/score.py", QUICKSTART]
    stage("1/4  Making the rows", [PYTHON, ROOT / "examples/quickstart/make_rows.py"])
    stage(
        "2/4  Scoring the model as it comes, on rows that training never sees",
        [*score, "--json", output_file("before")],
    )
    training = stage("3/4  Training", [SCRIPTS / "surefoot", "train", QUICKSTART, "overwrite_output_dir=true"])
    stage(
        "4/4  Scoring the model with the trained adapter", [*score, "--adapter", output, "--json", output_file("after")]
    )
    before, after = (json.loads(output_file(name).read_text())["exact_match"] for name in ("before", "after"))
    good = before < UNDER and after > OVER
    surefoot, run = (SCRIPTS / "surefoot").relative_to(ROOT), output.relative_to(ROOT)
    print(f"""
{"It learned." if good else f"It did not learn as promised (under {UNDER:.0f} % before, over {OVER:.0f} % after)."}
  exact answers on held-out rows   {before:.0f} % before, {after:.0f} % after
  training                         {training:.0f} s; everything {time.monotonic() - started:.0f} s
  loss plot                        {(output / "training_loss.png").relative_to(ROOT)}

Talk to it:          {surefoot} chat {run}
Make it one model:   {surefoot} export {run} export_dir=saves/merged
""")
    return 0 if good else 1


def output_file(name: str) -> Path:
    """Where a score of the quickstart goes."""
    return ROOT / "examples" / "quickstart" / "rows" / f"{name}.json"


def stage(title: str, command: list[str | Path]) -> float:
    """Run one stage, its output on the screen.

    Args:
        title: what it does.
        command: what to run.

    Returns:
        How long it took, seconds.

    Raises:
        GoError: it failed.
    """
    say(title)
    started = time.monotonic()
    code = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment()).returncode
    if code:
        raise GoError(f"this stage ended with exit code {code}: {title}")
    return time.monotonic() - started


def environment(**more: str) -> dict[str, str]:
    """The environment for what we start: OpenMP threads that wait must not burn a core that another needs."""
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", **more}


# ---------------------------------------------------------------- the checks


def test() -> int:
    """Every check; all of them run, so that one go shows all that is wrong."""
    set_up(["demo", "dev"])
    if sys.platform == "linux" and not run_python(PYTHON, "import triton; print(triton.__version__)"):
        say(f"installing {TRITON}, which your torch comes without")
        pip("install", "--no-deps", TRITON)  # not an extra: torch for CUDA and ROCm bring and pin their own
    code = [name for name in ("src", "tests", "examples", "benchmarks", "docs", "go.py") if (ROOT / name).exists()]
    documented = [name for name in code if name != "tests"]
    with tempfile.TemporaryDirectory() as site:
        checks: list[tuple[str, list[str]]] = [  # run as modules: some may lie in your Python, not in .venv
            ("format", ["ruff", "format", "--check", *code]),
            ("lint", ["ruff", "check", *code]),
            ("types", ["pyrefly", "check", "--python-interpreter-path", str(PYTHON), "--output-format", "min-text"]),
            ("docstrings", ["pydoclint.main", "--quiet", *documented]),
            ("docs", ["mkdocs", "build", "--strict", "--quiet", "--site-dir", site]),
            ("tests", ["pytest", "-n", "2", "--durations=8"]),
        ]
        quiet = environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", NO_MKDOCS_2_WARNING="1")
        failed = []
        for name, arguments in checks:
            say(name)
            if subprocess.run([str(PYTHON), "-m", *arguments], cwd=ROOT, env=quiet).returncode:
                failed.append(name)
    say(f"FAILED: {', '.join(failed)}" if failed else f"all passed: {', '.join(name for name, _ in checks)}")
    return 1 if failed else 0


def say(message: str) -> None:
    """One line about what goes on."""
    print(f"== {message}", flush=True)


def main() -> int:
    """Read the command and run it; the exit code is what the shell gets."""
    if sys.version_info < OLDEST:
        print("Surefoot needs Python {}.{} or newer; this is {}.{}.".format(*OLDEST, *sys.version_info[:2]))
        return 2
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["quickstart", "test"])
    wanted = parser.parse_args().command
    try:
        return quickstart() if wanted == "quickstart" else test()
    except GoError as stop:
        print(f"\n{stop}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run the same command to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
