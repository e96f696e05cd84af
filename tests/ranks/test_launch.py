"""`surefoot train` on several cards: who starts whom, and what becomes of a run whose rank is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lab import build_model, environment, good_rows, make_job, start
from safetensors.torch import load_file

from surefoot.cli import launch
from surefoot.cli.launch import launch_command
from surefoot.config import make_config
from surefoot.errors import UserError
from surefoot.train.place import Place, device_of

SECONDS = 240.0
# Put on a child's path as `sitecustomize`: flushing a file takes a while, so that a run can be met between two saves.
SLOW_DISK = "import os, time\nflush = os.fsync\nos.fsync = lambda handle: (time.sleep(0.03), flush(handle))\n"


def config(settings, **changes):
    return make_config({key: value for key, value in (settings | changes).items() if value is not None})


def test_one_card_or_a_launcher_of_its_own_starts_nothing(settings, monkeypatch):
    cfg = config(settings, device=None)
    monkeypatch.setattr(launch, "cards_in_sight", lambda: ["NVIDIA card at 1"])
    monkeypatch.setattr(launch, "count_cards", lambda: pytest.fail("torch must not be asked"))
    assert launch_command(cfg, ["x.yaml"], {}) is None
    monkeypatch.setattr(launch, "cards_in_sight", lambda: ["NVIDIA card at 1", "NVIDIA card at 2"])
    assert launch_command(cfg, ["x.yaml"], {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}) is None
    assert launch_command(config(settings, device="cuda:1"), ["x.yaml"], {}) is None
    assert launch_command(config(settings, device="cpu"), ["x.yaml"], {}) is None


def test_every_card_in_sight_gets_a_process(settings, monkeypatch):
    monkeypatch.setattr(launch, "cards_in_sight", lambda: ["AMD card at 1", "AMD card at 2", "AMD card at 3"])
    for cards, started in ((1, False), (3, True)):
        monkeypatch.setattr(launch, "count_cards", lambda cards=cards: cards)
        command = launch_command(config(settings, device=None), ["x.yaml", "seed=1"], {})
        assert (command is not None) == started
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert "--nproc-per-node=3" in command and "--max-restarts=0" in command
    assert command[-5:] == ["-m", "surefoot", "train", "x.yaml", "seed=1"]


def test_llama_factorys_variables_are_honoured(settings):
    variables = {
        "FORCE_TORCHRUN": "1", "NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "4", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29501", "MAX_RESTARTS": "3",
    }  # fmt: skip
    command = launch_command(config(settings), ["x.yaml"], variables)
    wanted = ["nnodes=2", "node-rank=1", "nproc-per-node=4", "master-addr=10.0.0.1", "master-port=29501",
              "max-restarts=3"]  # fmt: skip
    assert {f"--{option}" for option in wanted} <= set(command)
    with pytest.raises(UserError, match="NNODES"):
        launch_command(config(settings), ["x.yaml"], variables | {"NNODES": "1:4"})


def test_the_place_is_read_from_the_launchers_variables():
    assert Place.of({}) == Place()
    assert Place.of({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}) == Place()
    read = Place.of({"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert read == Place(5, 8, 1, 2)
    with pytest.raises(UserError, match="LOCAL_RANK"):
        Place.of({"WORLD_SIZE": "8", "RANK": "5"})


def test_a_process_takes_the_card_of_its_local_rank(settings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device_of(config(settings, device="auto"), Place(6, 8, 2)) == "cuda:2"
    assert device_of(config(settings, device="cuda:3"), Place()) == "cuda:3"
    with pytest.raises(UserError, match="one card"):
        device_of(config(settings, device="cuda:3"), Place(1, 2, 1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of(config(settings, device="auto"), Place(6, 8, 2)) == "cuda:0"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "slow").mkdir()
    (folder / "slow" / "sitecustomize.py").write_text(SLOW_DISK)
    build_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def env(lab):
    return environment(
        PYTHONPATH=str(lab / "slow"), SUREFOOT_CACHE=str(lab / "cache"), FORCE_TORCHRUN="1", NPROC_PER_NODE="2",
        MAX_RESTARTS="2", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip


def job_in(lab: Path, name: str):
    job = make_job(
        lab / name, lab / "model", gradient_accumulation_steps=1, num_train_epochs=5.0, lora_dropout=0.1, save_steps=4,
        overwrite_output_dir=True, ddp_timeout=60,
    )  # fmt: skip
    job.rows(good_rows(22))
    return job


def workers_of(launcher: int) -> list[int]:
    """The processes that a launcher has started, in the order of their ranks."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True, check=False)
    return sorted(int(pid) for pid in listed.stdout.split())


def end_of(process: subprocess.Popen) -> str:
    """Wait for a process; what it said on stderr."""
    try:
        return process.communicate(timeout=SECONDS)[1]
    except subprocess.TimeoutExpired:
        for pid in (*workers_of(process.pid), process.pid):
            os.kill(pid, signal.SIGKILL)
        raise


@pytest.fixture(scope="module")
def undisturbed(lab, env):
    job = job_in(lab, "undisturbed")
    process = start("train", job.yaml, env=env)
    said = end_of(process)
    assert process.returncode == 0, said
    assert said.count("Training done") == 1, "one process speaks"
    return job.out


@pytest.mark.long
def test_a_killed_rank_comes_back_from_the_last_checkpoint(lab, env, undisturbed):
    job = job_in(lab, "killed")
    process = start("train", job.yaml, env=env)
    deadline = time.monotonic() + SECONDS
    while not (job.out / "checkpoint-8").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    os.kill(random.Random(time.time_ns()).choice(workers), signal.SIGKILL)
    said = end_of(process)
    assert process.returncode == 0, said
    assert "checkpoint-" in said
    one, other = (load_file(out / "adapter_model.safetensors") for out in (undisturbed, job.out))
    assert all(one[name].equal(other[name]) for name in one)


# Stands for a library that holds the group: what is alive when Python takes itself apart says so.
HELD = """
import atexit
class Held:
    def __del__(self):
        print("taken apart", flush=True)
held = Held()
atexit.register(print, "exit functions ran")
"""


def test_a_process_of_several_ends_without_taking_python_apart(tmp_path):
    """A gloo group that is alive then aborts the process now and then, after a run that went well."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    told = {}
    for command in ("version", "train"):
        for world in ("1", "2"):
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "WORLD_SIZE": world}
            said = subprocess.run(
                [sys.executable, "-c", f"import torch.distributed, sys; sys.argv[1:] = [{command!r}]; "
                 "from surefoot.cli.main import main; sys.exit(main())"],
                env=env, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            told[command, world] = (said.returncode, "exit functions ran" in said.stdout, "taken apart" in said.stdout)
    assert told == {
        ("version", "1"): (0, True, True),
        ("version", "2"): (0, True, False),
        ("train", "1"): (2, True, True),
        ("train", "2"): (2, True, False),
    }
