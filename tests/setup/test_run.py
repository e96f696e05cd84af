"""Running a plan: order, skipping, asking, stopping, and a journal that tells the truth after every kind of end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import surefoot
from surefoot.errors import UserError, WorkError
from surefoot.machine.case import base_snapshot
from surefoot.machine.snapshot import Snapshot
from surefoot.setup import run as room
from surefoot.setup.journal import Journal, as_document, as_plan, differences
from surefoot.setup.plan import Plan, Step, Wish
from surefoot.setup.run import StepFailedError, WaitingError, plan_under_way, run_plan

BARE = Snapshot(base_snapshot("cpu-only"))


def touch(name: str, **more) -> Step:
    """A step that adds a line to a file of its name, and is done when the file is there."""
    return Step(
        name,
        f"make {name}",
        "a test",
        (f"echo {name} says something", f"echo x >> {name}"),
        (f"test -s {name}",),
        **more,
    )


def plan_of(*steps: Step, **more) -> Plan:
    return Plan(Wish(), "a test machine", (), "2.13.0", "none", (), steps, **more)


class Talk:
    """Who is asked and told; keeps both."""

    def __init__(self, answer: bool = True) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.told: list[str] = []

    def run(self, plan: Plan, folder: Path, *, resume: bool = False) -> None:
        run_plan(plan, folder, resume=resume, confirm=self.confirm, say=self.told.append, look=lambda: BARE)

    def confirm(self, step: Step) -> bool:
        self.asked.append(step.id)
        return self.answer


def events(folder: Path) -> list[tuple[str, str]]:
    return [(e["event"], e["step"]) for e in Journal(folder / room.JOURNAL).events]


def count(folder: Path, name: str) -> int:
    return len((folder / name).read_text().splitlines()) if (folder / name).exists() else 0


def test_steps_run_in_order_and_the_journal_has_each(tmp_path):
    Talk().run(plan_of(touch("a"), touch("b", needs=("a",))), tmp_path)
    assert events(tmp_path) == [
        ("plan", ""), ("started", "a"), ("done", "a"), ("started", "b"), ("done", "b"), ("end", ""),
    ]  # fmt: skip
    assert "a says something" in (tmp_path / "surefoot-setup/logs/01-a.log").read_text()


def test_satisfied_and_verified_steps_are_skipped_and_the_journal_says_why(tmp_path):
    (tmp_path / "b").write_text("x\n")
    talk = Talk()
    talk.run(plan_of(touch("a", satisfied="the kernel has it"), touch("b"), touch("c")), tmp_path)
    skipped = {e["step"]: e["why"] for e in Journal(tmp_path / room.JOURNAL).events if e["event"] == "skipped"}
    assert skipped == {"a": "the kernel has it", "b": "its check passes already"}
    assert count(tmp_path, "a") == 0 and count(tmp_path, "b") == 1 and count(tmp_path, "c") == 1
    assert any("the kernel has it" in line for line in talk.told)


def test_a_step_without_a_check_is_run_once_and_not_skipped_before(tmp_path):
    once = replace(touch("a"), verify=())
    bad = Step("b", "fails", "a test", ("test -e mended",), ())
    with pytest.raises(StepFailedError):
        Talk().run(plan_of(once, bad), tmp_path)
    (tmp_path / "mended").touch()
    Talk().run(plan_of(once, bad), tmp_path, resume=True)
    assert count(tmp_path, "a") == 1


def test_a_failing_step_stops_the_plan_with_its_lines_the_doctors_word_and_the_undo(tmp_path):
    bad = Step(
        "torch", "install torch", "a test",
        ("echo Collecting torch", "echo 'ERROR: Could not install packages due to an OSError: "
         "[Errno 28] No space left on device' >&2", "exit 7", "touch never"), ("test -e never",),
        undo=("rm -rf .venv",),
    )  # fmt: skip
    with pytest.raises(StepFailedError) as caught:
        Talk().run(plan_of(touch("a"), bad, touch("c")), tmp_path)
    text = str(caught.value)
    assert caught.value.step.id == "torch" and caught.value.code == 7
    assert any("No space left" in line for line in caught.value.lines)
    assert "exit code 7" in text and "02-torch.log" in text and "rm -rf .venv" in text
    assert "The doctor says of this log: F53" in text
    assert not (tmp_path / "never").exists() and not (tmp_path / "c").exists()
    last = Journal(tmp_path / room.JOURNAL).events[-1]
    assert (last["event"], last["step"], last["code"]) == ("failed", "torch", 7)


@pytest.mark.parametrize("torch_done", [True, False])
def test_the_doctor_speaks_of_the_machine_only_once_torch_is_in_place(tmp_path, torch_done):
    """Without torch, `torch is not installed` is no news: the plan is about to install it."""
    bare = base_snapshot("cpu-only")
    bare["python"] = {**bare["python"], "dists": {"pip": "25.0"}, "torch": None}
    plan = plan_of(touch("torch" if torch_done else "env"), Step("b", "b", "b", ("exit 3",), ()))
    with pytest.raises(StepFailedError) as caught:
        run_plan(plan, tmp_path, resume=False, confirm=lambda _: True, say=print, look=lambda: Snapshot(bare))
    assert ("finds on this machine: F102" in str(caught.value)) == torch_done


def test_any_failing_line_ends_the_step_pipes_included(tmp_path):
    for lines in (("false", "true"), ("false | cat", "true"), ("echo $no_such_variable", "true")):
        with pytest.raises(StepFailedError):
            Talk().run(plan_of(Step("s", "s", "s", lines, ())), tmp_path)


def test_a_step_whose_check_fails_afterwards_is_not_done(tmp_path):
    liar = Step("a", "a", "a", ("true",), ("echo looked >&2", "test -e nothing"))
    with pytest.raises(StepFailedError, match="its check fails") as caught:
        Talk().run(plan_of(liar, touch("b")), tmp_path)
    assert caught.value.code == 0
    assert any("test -e nothing" in line for line in caught.value.lines), "the line of the check that failed"
    assert events(tmp_path)[-1] == ("failed", "a")


def test_resume_goes_on_with_the_step_that_failed(tmp_path):
    plan = plan_of(touch("a"), Step("b", "b", "b", ("test -e mended", "touch b"), ("test -e b",)), touch("c"))
    with pytest.raises(StepFailedError):
        Talk().run(plan, tmp_path)
    (tmp_path / "mended").touch()
    Talk().run(plan, tmp_path, resume=True)
    assert count(tmp_path, "a") == 1 and count(tmp_path, "c") == 1
    assert events(tmp_path)[-6:] == [
        ("skipped", "a"), ("started", "b"), ("done", "b"), ("started", "c"), ("done", "c"), ("end", ""),
    ]  # fmt: skip


def test_a_step_that_came_undone_is_run_again(tmp_path):
    plan = plan_of(touch("a"), Step("b", "b", "b", ("test -e mended",), ()))
    with pytest.raises(StepFailedError):
        Talk().run(plan, tmp_path)
    (tmp_path / "a").unlink()
    (tmp_path / "mended").touch()
    Talk().run(plan, tmp_path, resume=True)
    assert count(tmp_path, "a") == 1


def test_resuming_another_plan_is_refused_with_what_differs(tmp_path):
    with pytest.raises(StepFailedError):
        Talk().run(plan_of(touch("a"), Step("b", "b", "b", ("false",), ())), tmp_path)
    wished = replace(plan_of(touch("c")), wish=Wish(torch="2.12"))
    with pytest.raises(UserError, match=r"of another plan: --torch was '' and is '2.12'\n"):
        Talk().run(wished, tmp_path, resume=True)
    other = replace(plan_of(touch("a"), touch("c")), torch="2.12.0")
    with pytest.raises(UserError) as caught:
        Talk().run(other, tmp_path, resume=True)
    for words in (
        "torch was '2.13.0' and is '2.12.0'",
        "step b is gone",
        "step c is new",
    ):
        assert words in str(caught.value)
    before = (tmp_path / room.JOURNAL).read_bytes()
    Talk().run(other, tmp_path)  # told to start anew: the old journal is kept beside it
    assert [p.read_bytes() for p in (tmp_path / "surefoot-setup").glob("journal-*.jsonl")] == [before]


def test_resuming_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing was begun"):
        Talk().run(plan_of(touch("a")), tmp_path, resume=True)


def test_the_plan_under_way_comes_back_from_the_journal(tmp_path):
    plan = plan_of(touch("a", root=True, minutes=1.5), notes=("one",))
    assert plan_under_way(tmp_path) is None
    Talk().run(plan, tmp_path)
    assert plan_under_way(tmp_path) == plan
    assert differences(as_document(plan), as_document(replace(plan, machine="in other words", notes=()))) == []
    assert as_plan(as_document(plan)) == plan


@pytest.mark.parametrize("answer", [True, False])
def test_root_is_asked_for_and_a_no_waits(tmp_path, answer):
    talk = Talk(answer)
    plan = plan_of(touch("a"), touch("driver", root=True), touch("c"))
    if answer:
        talk.run(plan, tmp_path)
    else:
        with pytest.raises(WaitingError, match="needs root"):
            talk.run(plan, tmp_path)
        assert events(tmp_path)[-1] == ("waiting", "driver") and not (tmp_path / "driver").exists()
        (tmp_path / "driver").write_text("x\n")  # the person did it
        talk.run(plan, tmp_path, resume=True)
    assert talk.asked == ["driver"]
    assert (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["reboot", "login"])
def test_a_restart_and_a_login_stop_the_plan_until_their_check_passes(tmp_path, kind):
    step = Step(
        kind,
        kind,
        "groups count from the next login on",
        ("touch must-not-run",),
        ("test -e happened",),
        **{kind: True},
    )
    plan = plan_of(touch("a"), step, touch("c"))
    for resume in (False, True):
        with pytest.raises(WaitingError):
            Talk().run(plan, tmp_path, resume=resume)
        assert not (tmp_path / "must-not-run").exists() and not (tmp_path / "c").exists()
    (tmp_path / "happened").touch()
    Talk().run(plan, tmp_path, resume=True)
    assert (tmp_path / "c").exists() and events(tmp_path)[-1] == ("end", "")


def test_a_step_that_needs_more_disk_than_there_is_does_not_begin(tmp_path):
    plan = plan_of(touch("a", disk_gib=0.001), touch("torch", disk_gib=1e9))
    with pytest.raises(WorkError, match="it was not begun"):
        Talk().run(plan, tmp_path)
    assert events(tmp_path)[-1] == ("refused", "torch") and not (tmp_path / "torch").exists()


def test_commands_get_no_terminal_and_english_messages(tmp_path):
    step = Step("a", "a", "a", ("! read -r _", "echo $LC_ALL $PIP_NO_INPUT >a"), ())
    Talk().run(plan_of(step), tmp_path)
    assert (tmp_path / "a").read_text() == "C.UTF-8 1\n"


# -- the journal itself ---------------------------------------------------------------------------


def test_a_torn_last_line_is_dropped_and_the_next_event_takes_its_place(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("plan", plan={})
    journal.write("started", "a")
    whole = path.read_bytes()
    journal.write("done", "a", seconds=1.0)
    for cut in range(len(whole), path.stat().st_size):
        path.write_bytes(path.read_bytes()[:cut] if cut > len(whole) else whole)
        again = Journal(path)
        assert [e["event"] for e in again.events] == ["plan", "started"]
        again.write("done", "a", seconds=1.0)
        assert [e["event"] for e in Journal(path).events] == ["plan", "started", "done"]


def test_a_damaged_line_before_the_last_is_not_passed_over(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("plan", plan={})
    path.write_bytes(path.read_bytes() + b"{ broken\n")
    with pytest.raises(UserError, match="line 2"):
        Journal(path)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_fails_and_comes_undone_the_order_holds_and_the_end_is_verified(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("plan")
    names = [f"s{n}" for n in range(data.draw(st.integers(1, 4)))]
    plan = plan_of(
        *(
            Step(n, n, n, (f"test ! -e broken-{n}", f"echo {n} >> order", f"touch {n}"), (f"test -e {n}",))
            for n in names
        )
    )
    broken = data.draw(st.sets(st.sampled_from(names)))
    for name in broken:
        (folder / f"broken-{name}").touch()
    resume = False
    for name in sorted(broken):  # each run gets to the next fault
        with pytest.raises(StepFailedError) as caught:
            Talk().run(plan, folder, resume=resume)
        assert caught.value.step.id == name
        (folder / f"broken-{name}").unlink()
        resume = True
    Talk().run(plan, folder, resume=resume)
    assert (folder / "order").read_text().split() == names, "each once, in order"
    done = [step for event, step in events(folder) if event == "done"]
    assert done == names


# -- ends of every kind -----------------------------------------------------------------------------

DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_run import BARE, slow_plan
from surefoot.setup.run import run_plan
run_plan(slow_plan(), Path("."), resume=sys.argv[2] == "resume", confirm=lambda s: True, say=print, look=lambda: BARE)
"""


def slow_plan() -> Plan:
    """Three steps that each say that they began, wait until they may go on, and then end."""
    steps = []
    for name in ("a", "b", "c"):
        lines = (f"echo $$ > {name}.began", f"while ! test -e {name}.go; do sleep 0.02; done", f"echo x >> {name}")
        steps.append(Step(name, name, name, lines, (f"test -s {name}",)))
    return plan_of(*steps)


def start(folder: Path, how: str, before: str = "") -> subprocess.Popen:
    argv = [sys.executable, "-c", before + DRIVER, str(Path(__file__).parent), how]
    source = {"PYTHONPATH": str(Path(surefoot.__file__).parents[1])}
    return subprocess.Popen(
        argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | source
    )


def wait_for(condition, process=None) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends, "it never came"
        assert process is None or process.poll() is None, process.stdout.read()
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("at", ["a", "b", "c"])
def test_kill_9_leaves_a_true_journal_and_a_lock_until_the_commands_end(tmp_path, at):
    for name in "abc"[: "abc".index(at)]:
        (tmp_path / f"{name}.go").touch()
    process = start(tmp_path, "new")
    wait_for(lambda: (tmp_path / f"{at}.began").exists() and (tmp_path / f"{at}.began").read_text().strip(), process)
    process.kill()
    process.wait()
    assert events(tmp_path)[-1] == ("started", at)
    shell = int((tmp_path / f"{at}.began").read_text())
    assert alive(shell), "kill -9 leaves the commands running: the lock must say so"
    with pytest.raises(UserError, match=str(shell)):
        Talk().run(slow_plan(), tmp_path, resume=True)
    os.killpg(shell, signal.SIGKILL)
    wait_for(lambda: not alive(shell))
    for name in "abc":
        (tmp_path / f"{name}.go").touch()
    Talk().run(slow_plan(), tmp_path, resume=True)
    assert [count(tmp_path, name) for name in "abc"] == [1, 1, 1]
    assert events(tmp_path)[-1] == ("end", "")


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_stops_the_commands_too_and_says_so_in_the_journal(tmp_path, sign):
    process = start(tmp_path, "new")
    wait_for(lambda: (tmp_path / "a.began").exists() and (tmp_path / "a.began").read_text().strip(), process)
    shell = int((tmp_path / "a.began").read_text())
    process.send_signal(sign)
    output = process.communicate(timeout=30)[0]
    assert process.returncode != 0 and "--resume goes on" in output
    assert not alive(shell)
    assert events(tmp_path)[-1] == ("interrupted", "a")
    for name in "abc":
        (tmp_path / f"{name}.go").touch()
    Talk().run(slow_plan(), tmp_path, resume=True)
    assert events(tmp_path)[-1] == ("end", "")


def test_nohup_is_respected(tmp_path):
    process = start(tmp_path, "new", before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    wait_for(lambda: (tmp_path / "a.began").exists(), process)
    process.send_signal(signal.SIGHUP)
    for name in "abc":
        (tmp_path / f"{name}.go").touch()
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 0, output
    assert events(tmp_path)[-1] == ("end", "")


def test_a_second_run_beside_the_first_is_refused(tmp_path):
    process = start(tmp_path, "new")
    try:
        wait_for(lambda: (tmp_path / "a.began").exists(), process)
        with pytest.raises(UserError, match="is at work in"):
            Talk().run(slow_plan(), tmp_path)
        assert [event for event, _ in events(tmp_path)] == ["plan", "started"], "the journal was left alone"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_a_command_that_ignores_ctrl_c_is_killed(tmp_path, monkeypatch):
    from surefoot.setup import command

    monkeypatch.setattr(command, "_GRACE_SECONDS", 0.3)
    lines = ("trap '' INT TERM", "echo $$ > pid", "while true; do sleep 0.1; done")
    assert command.run_bash(lines, tmp_path, tmp_path / "log", os.open(tmp_path, os.O_RDONLY), seconds=1.0) == 124
    assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_check_that_hangs_is_stopped_with_all_that_it_started(tmp_path, terminal):
    from surefoot.setup import command

    lines = (
        ("sleep 60 & echo $! > pid", "wait") if not terminal else ("echo $$ > pid", "while true; do sleep 0.1; done")
    )
    lock = os.open(tmp_path, os.O_RDONLY)
    assert command.run_bash(lines, tmp_path, tmp_path / "log", lock, seconds=0.5, terminal=terminal) == 124
    os.close(lock)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_what_a_killed_pip_left_is_cleared_before_the_check_that_it_would_pass(tmp_path):
    """A real pip takes a package with METADATA and without RECORD for installed, and so does importlib.metadata."""
    site = ".venv/lib/python3.11/site-packages"
    info = f"{site}/torch-2.13.0.dist-info"
    (tmp_path / site / "whole-1.0.dist-info").mkdir(parents=True)
    (tmp_path / site / "whole-1.0.dist-info/RECORD").touch()
    (tmp_path / site / "~orch").mkdir()
    install = (f"mkdir -p {info}", f"touch {info}/METADATA", "test -e mended", f"touch {info}/RECORD")
    plan = plan_of(Step("torch", "torch", "a test", install, (f"test -e {info}/METADATA",)))
    with pytest.raises(StepFailedError):
        Talk().run(plan, tmp_path)
    assert (tmp_path / site / "~orch").exists(), "a first run touches nothing"
    (tmp_path / "mended").touch()
    talk = Talk()
    talk.run(plan, tmp_path, resume=True)
    assert sorted(p.name for p in (tmp_path / site).iterdir()) == ["torch-2.13.0.dist-info", "whole-1.0.dist-info"]
    assert (tmp_path / info / "RECORD").exists()
    assert any("torch-2.13.0 was half installed" in line for line in talk.told)


# -- real disks, real pip -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, where this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("no right to mount a small file system here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_fails_the_step_and_the_journal_stays_true(small_disk):
    fill = Step("fill", "fill", "fill", ("head -c 3000000 /dev/zero > big",), ("test -e ok",), undo=("rm big",))
    with pytest.raises(StepFailedError) as caught:
        Talk().run(plan_of(touch("a"), fill), small_disk)
    assert caught.value.step.id == "fill"
    # The disk is full now, so the journal's last word may be `started`: not done, in either case.
    assert events(small_disk)[-1] in (("started", "fill"), ("failed", "fill"))
    assert "done" not in [event for event, step in events(small_disk) if step == "fill"]
    (small_disk / "big").unlink()
    (small_disk / "ok").touch()
    Talk().run(plan_of(touch("a"), fill), small_disk, resume=True)
    assert events(small_disk)[-1] == ("end", "")


def test_a_broken_index_is_named(tmp_path):
    import socket

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    pip = (
        f"PIP_CONFIG_FILE=/dev/null {sys.executable} -m pip download --no-cache-dir --retries 1 --no-deps "
        f"--index-url http://127.0.0.1:{port}/simple surefoot-of-another-world"
    )
    with pytest.raises(StepFailedError) as caught:
        Talk().run(plan_of(Step("torch", "torch", "torch", (pip,), ("test -e no",))), tmp_path)
    assert any("Connection refused" in line for line in caught.value.lines), caught.value.lines
    assert any("No matching distribution found" in line for line in caught.value.lines)
