"""A rank is killed at any moment of a run: what was verified stays, and the run ends as the undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from crew import Fault, train
from lab import build_model, environment, good_rows, log_entries, make_job, start
from safetensors.torch import load_file

from surefoot.train.checkpoint import find_checkpoints, read_checkpoint

SECONDS = 240.0
STEPS = 20
# Put on a child's path as `sitecustomize`: flushing and renaming take a while, so that a save can be met at each place.
SLOW_DISK = """
import os, pathlib, time
flush, rename = os.fsync, pathlib.Path.rename
os.fsync = lambda handle: (time.sleep(0.02), flush(handle))[1]
wait = lambda path: time.sleep(0.2 if ".checkpoint-" in path.name else 0)
pathlib.Path.rename = lambda self, target: (wait(self), rename(self, target))[1]
"""


def weights_of(out: Path) -> dict:
    return load_file(out / "adapter_model.safetensors")


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(("rank", "kind"), [(0, "killed in a save"), (1, "killed")])
def test_the_run_goes_on_from_the_last_verified_checkpoint(settings, tmp_path, rank, kind):
    settings |= {"save_strategy": "steps", "save_steps": 4, "max_steps": 12, "ddp_timeout": 10}
    straight = train(tmp_path / "straight", 2, settings | {"output_dir": str(tmp_path / "straight out")})
    told = train(tmp_path / "killed", 2, settings, Fault(kind, rank, 8 if kind != "killed" else 10))
    assert told[rank] is None and told[1 - rank].error.startswith("OtherRankError")
    out = tmp_path / "out"
    left = [read_checkpoint(folder).step for folder in find_checkpoints(out)]
    assert left == ([4] if rank == 0 else [4, 8])
    resumed = train(tmp_path / "resumed", 2, settings)
    assert [(member.error, member.resumed_from) for member in resumed] == [("", left[-1])] * 2
    assert resumed[0].losses == straight[0].losses[left[-1] :]
    assert_same(weights_of(tmp_path / "straight out"), weights_of(out))
    assert not [file for file in out.iterdir() if file.name.startswith(".")], "nothing half written stays"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killing")
    (folder / "slow").mkdir()
    (folder / "slow" / "sitecustomize.py").write_text(SLOW_DISK)
    build_model(folder / "model")
    return folder


def job_in(lab: Path, name: str):
    job = make_job(
        lab / name, lab / "model", gradient_accumulation_steps=1, num_train_epochs=4.0, lora_dropout=0.1, save_steps=3,
        ddp_timeout=60, save_total_limit=3,
    )  # fmt: skip
    job.rows(good_rows(20))
    return job


def workers_of(launcher: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True, check=False)
    return sorted(int(pid) for pid in listed.stdout.split())


def step_of(out: Path) -> int:
    log = out / "trainer_log.jsonl"
    return max((entry["current_steps"] for entry in log_entries(out)), default=0) if log.exists() else 0


@pytest.mark.long
def test_killed_at_five_moments_the_job_comes_back_by_itself(lab):
    """One rank or the other, under torchrun: no hand is laid on it between the first start and the end."""
    env = environment(
        PYTHONPATH=str(lab / "slow"), SUREFOOT_CACHE=str(lab / "cache"), FORCE_TORCHRUN="1", NPROC_PER_NODE="2",
        MAX_RESTARTS="5", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    undisturbed = job_in(lab, "undisturbed")
    done = start("train", undisturbed.yaml, env=env)
    assert done.communicate(timeout=SECONDS)[1] and done.returncode == 0
    dice, out = random.Random(20), (job := job_in(lab, "killed")).out
    early, half = dice.randint(1, 2), 3 * dice.randint(2, 3)
    moments = {
        "before the first save": lambda: step_of(out) >= early,
        "while it is written": lambda: any(out.glob(f".checkpoint-{half}.*.tmp")),
        "between the last file and its name": lambda: any(
            (folder / "surefoot" / "manifest.json").exists() for folder in out.glob(f".checkpoint-{half + 3}.*.tmp")
        ),
        "in the middle of a step": lambda: step_of(out) >= half + 4,
        "near the end": lambda: step_of(out) >= STEPS - 1,
    }
    process = start("train", job.yaml, env=env)
    killed: set[int] = set()
    try:
        for name, moment in moments.items():
            deadline = time.monotonic() + SECONDS
            while not moment():
                assert process.poll() is None, f"over before {name}: {process.communicate()}"
                assert time.monotonic() < deadline, name
                time.sleep(0.001)
            for folder in find_checkpoints(out):
                read_checkpoint(folder)  # what has the name of a checkpoint is whole
            workers = workers_of(process.pid)
            assert len(workers) == 2 and not killed & set(workers)
            rank = 0 if "file" in name or "written" in name else dice.randrange(2)
            os.kill(workers[rank], signal.SIGKILL)
            killed |= set(workers)
            while killed & set(workers_of(process.pid)):  # until the launcher has seen it
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
        said = process.communicate(timeout=SECONDS)[1]
    finally:
        for pid in (*workers_of(process.pid), process.pid) if process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, said
    assert_same(weights_of(undisturbed.out), weights_of(out))
    one, other = (
        [(e["current_steps"], e["loss"]) for e in log_entries(o) if "loss" in e] for o in (undisturbed.out, out)
    )
    assert one == other, "each step once, with the same loss"
