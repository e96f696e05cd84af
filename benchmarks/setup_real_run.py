"""The CPU plan really run: from nothing to the smoke step, killed at each step and resumed, and with planted faults.

Everything happens in a temporary folder; packages come from pip's own index, or the one named. Prints one table.

    python benchmarks/setup_real_run.py [--index URL] [straight killed failing disk index]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from surefoot.errors import UserError, WorkError
from surefoot.machine.capture import capture
from surefoot.setup.journal import Journal, as_document, as_plan, holders
from surefoot.setup.plan import Plan, Step, Wish
from surefoot.setup.planner import make_plan
from surefoot.setup.run import JOURNAL, run_plan

ROOT = Path(__file__).resolve().parents[1]
LONG = ("torch", "trainer")  # killed at three places each


def work(folder: Path, resume: bool) -> int:
    """Be the process that is killed: run the plan in `plan.json`."""
    os.environ.pop("PYTHONPATH", None)  # the new environment must not see this checkout
    plan = as_plan(json.loads((folder / "plan.json").read_text()))
    try:
        run_plan(plan, folder, resume=resume, confirm=lambda _: False, say=lambda text: print(text, flush=True))
    except (UserError, WorkError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    return 0


class Place:
    """A folder with a plan to run.

    Args:
        folder: empty.
        plan: the plan.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(as_document(plan)))
        self.output = folder / "output.txt"

    def start(self, resume: bool = False, **environment: str) -> subprocess.Popen[bytes]:
        """Start a run of it in a process of its own."""
        argv = [sys.executable, __file__, "--work", str(self.folder), *(["--resume"] if resume else [])]
        with self.output.open("ab") as output:
            return subprocess.Popen(
                argv, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | environment
            )

    def run(self, resume: bool = False, **environment: str) -> tuple[int, str]:
        """Run it to its end; return the exit code and what was said."""
        before = self.output.stat().st_size if self.output.exists() else 0
        code = self.start(resume, **environment).wait()
        return code, self.output.read_bytes()[before:].decode()

    @property
    def events(self) -> list[dict[str, Any]]:
        """What its journal has."""
        return Journal(self.folder / JOURNAL).events

    def has(self, event: str, step: str) -> bool:
        """Whether the journal has an event of a step."""
        return any((e["event"], e["step"]) == (event, step) for e in self.events)

    def about(self, step: Step) -> list[str]:
        """The journal's events of a step."""
        return [e["event"] for e in self.events if e["step"] == step.id]

    def holders(self) -> list[int]:
        """Processes of a run, or of what a killed one left."""
        return [int(words.split()[0]) for words in holders(self.folder / "surefoot-setup/lock")]


def table_of(place: Place) -> dict[str, float]:
    """Seconds of each step that was done."""
    return {e["step"]: e["seconds"] for e in place.events if e["event"] == "done"}


def straight(base: Path, plan: Plan) -> str:
    """From nothing to the end; then once more, when every step must be skipped."""
    place = Place(base / "straight", plan)
    began = time.monotonic()
    code, said = place.run()
    seconds = time.monotonic() - began
    print(said)
    assert code == 0, said
    print("seconds:", json.dumps(table_of(place)))
    smoke = json.loads((place.folder / "surefoot-setup/smoke.json").read_text())
    assert smoke["ok"] and len(smoke["results"]) == 3, smoke
    first = len(place.events)
    code, said = place.run(resume=True)
    again = [e["step"] for e in place.events[first:] if e["event"] == "started"]
    assert code == 0, said
    return f"{len(plan.steps)} steps in {seconds:.0f} s; run once more, started again: {again or 'none'}"


def killed(base: Path, plan: Plan) -> str:
    """Kill -9 in each step, then resume: with its commands, and alone (they go on, and the lock says so)."""
    rng = random.Random(0)
    usual = table_of(Place(base / "straight", plan)) if (base / "straight").exists() else {}
    place = Place(base / "killed", plan)
    refused = torn = 0
    for step in plan.steps:
        for number in range(3 if step.id in LONG else 1):
            delay = kill_in(place, step, usual.get(step.id, 0.0) * (0.2 + 0.3 * number) * rng.random())
            if delay is None:
                continue
            print(f"  killed in {step.id} after {delay:.2f} s; the journal's last word: {place.events[-1]['event']}")
            if number == 2 or (step.id not in LONG and rng.random() < 0.5):
                refused += left_alone(place)
            for pid in place.holders():
                os.kill(pid, signal.SIGKILL)
            while place.holders():
                time.sleep(0.05)
            with (place.folder / JOURNAL).open("ab") as journal:  # as if the kill had come in the middle of a line
                journal.write(b'{"at": "torn')
                torn += 1
    code, said = place.run(resume=True)
    print(said)
    assert code == 0, said
    truthful(place, plan)
    words = f"{torn} kills, each with a torn line, {refused} resumes refused while commands were left running"
    return f"{words}; ended with all steps verified, the last {plan.steps[-1].id}"


def kill_in(place: Place, step: Step, delay: float) -> float | None:
    """Run until a step has begun, wait, and kill the run while the step is at work; None when it needs no work."""
    if step.satisfied or (place.about(step) == ["skipped"]):
        return None
    for _ in range(10):
        seen = len(place.about(step))
        process = place.start(resume=bool(place.events))
        while process.poll() is None and len(place.about(step)) == seen:
            time.sleep(0.001)
        began = time.monotonic()
        while place.about(step)[-1] == "started" and time.monotonic() - began < delay:
            time.sleep(0.01)
        process.kill()
        process.wait()
        if place.about(step)[-1] == "started":
            return time.monotonic() - began
        if place.about(step)[-1] == "skipped" and seen == 0:
            return None  # this machine has it
        # It was quicker than we: undo it and try again, at once after it begins.
        delay = 0.0
        while place.holders():
            time.sleep(0.05)
        undo = [line for line in step.undo if not line.startswith("#")] or [f"rm -rf {plan_folder(place)}"]
        subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(undo)], cwd=place.folder, check=True)
    raise AssertionError(f"{step.id} was never caught at work")


def plan_folder(place: Place) -> str:
    """The environment's folder: what goes when a step can only be undone with all of it."""
    return json.loads((place.folder / "plan.json").read_text())["wish"]["folder"]


def left_alone(place: Place) -> int:
    """Resume while what the kill left is at work: refused, 1; then wait until it ends. 0 when it had ended already."""
    if not place.holders():
        return 0
    code, said = place.run(resume=True)
    while place.holders():
        time.sleep(0.1)
    if code == 2:
        assert "is at work in" in said, said
        return 1
    assert code == 0, said  # it ended in between
    return 0


def truthful(place: Place, plan: Plan) -> None:
    """Hold the journal against the folder: what it calls done passes its check now, and the end is its last word."""
    assert place.events[-1]["event"] == "end"
    for step in plan.steps:
        assert any(e["step"] == step.id and e["event"] in ("done", "skipped") for e in place.events), step.id
        lines = ["set -euo pipefail", *step.verify]
        verdict = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=place.folder, capture_output=True)
        assert verdict.returncode == 0 or step.satisfied, (step.id, verdict.stderr)


def before(plan: Plan, step: str, *more: Step) -> Plan:
    """The plan's steps before one, and others behind them."""
    names = [step.id for step in plan.steps]
    return replace(plan, steps=(*plan.steps[: names.index(step)], *more))


def failing(base: Path, plan: Plan) -> str:
    """A planted step whose second line fails; mended, the plan goes on from there."""
    bad = Step("planted", "fail", "planted", ("echo begun", "test -e mended # planted", "touch planted"),
               ("test -e planted",), undo=("rm -f planted",))  # fmt: skip
    place = Place(base / "failing", before(plan, "torch", bad))
    code, said = place.run()
    print(said)
    assert code == 1 and "step planted" in said and "rm -f planted" in said, said
    assert place.events[-1]["event"] == "failed"
    (place.folder / "mended").touch()
    code, said = place.run(resume=True)
    assert code == 0 and [e["step"] for e in place.events if e["event"] == "done"].count("env") == 1, said
    return "stopped at the planted step (exit 1), resumed to the end after it was mended"


def disk(base: Path, plan: Plan) -> str:
    """A disk of 300 MiB: refused before torch when its size is known, and when it is not, pip's failure is told."""
    place = base / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        return "not run: no right to mount a small file system here"
    try:
        small = Place(place / "known", plan)
        code, said = small.run()
        print(said)
        assert code == 1 and "it was not begun" in said and not small.has("started", "torch"), said
        refused = small.events[-1]["step"]
        shutil.rmtree(small.folder)
        unknown = replace(plan, steps=tuple(replace(step, disk_gib=0.0) for step in plan.steps))
        small = Place(place / "unknown", unknown)
        code, said = small.run()
        print(said)
        assert code == 1 and "No space left" in said and "F53" in said, said
        last = small.events[-1]
        assert last["event"] in ("failed", "started") and not small.has("done", last["step"]), last
        return f"refused before step {refused}; without sizes: step {last['step']} {last['event']}, the doctor says F53"
    finally:
        subprocess.run(["umount", str(place)], check=True)


def index(base: Path, plan: Plan) -> str:
    """An index at a port where nothing listens."""
    closed = "http://127.0.0.1:9/simple"
    broken = make_plan(capture(), replace(plan.wish, index=closed))
    place = Place(base / "index", broken)
    # A pip.conf of this machine may name a second source.
    code, said = place.run(PIP_RETRIES="1", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")
    print(said)
    assert code == 1 and "step torch" in said and "Connection refused" in said, said
    return f"step {place.events[-1]['step']} failed, 'Connection refused' among its telling lines"


def main() -> int:
    """Run the scenarios that were asked for; 1 when one does not hold."""
    parser = argparse.ArgumentParser()
    known: dict[str, Callable[[Path, Plan], str]] = {
        "straight": straight, "killed": killed, "failing": failing, "disk": disk, "index": index,
    }  # fmt: skip
    parser.add_argument("scenarios", nargs="*", default=list(known))
    parser.add_argument("--index", default="", help="where torch comes from instead of PyTorch's CPU index")
    parser.add_argument("--folder", type=Path, help="keep everything here")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work, args.resume)
    plan = make_plan(capture(), Wish(gpu="cpu", env="venv", surefoot=str(ROOT), index=args.index))
    base = args.folder or Path(tempfile.mkdtemp(prefix="surefoot-real-run-"))
    base.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in args.scenarios:
        try:
            results[name] = (True, known[name](base, plan))
        except AssertionError as error:
            results[name] = (False, str(error)[-600:])
        print(f"{'ok  ' if results[name][0] else 'FAIL'}  {name:9} {results[name][1]}", flush=True)
    if args.folder is None:
        shutil.rmtree(base)
    return 0 if all(good for good, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
