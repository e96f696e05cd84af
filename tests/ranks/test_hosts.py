"""Two hosts of two ranks each over a lossy link: they train as one process does, resume, and say who is missing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hosts import Host, two_hosts, why_not
from lab import Job, build_model, environment, good_rows, log_entries, make_job, run
from safetensors.torch import load_file

from surefoot.cli import roll_call
from surefoot.cli.launch import free_port, launch_command, meet_others
from surefoot.cli.roll_call import Node, call_roll
from surefoot.config import make_config
from surefoot.errors import UserError, WorkError
from surefoot.machine import network
from surefoot.machine.network import check_names, own_address, tie_to_network

SECONDS = 240.0
PORT = 29501
LACKING = why_not()
needs_hosts = pytest.mark.skipif(bool(LACKING), reason=LACKING or "two hosts can be set up")


def job_in(lab: Path, name: str, **changes) -> Job:
    job = make_job(
        lab / name, lab / "model", per_device_train_batch_size=1, gradient_accumulation_steps=1, num_train_epochs=3.0,
        save_steps=5, ddp_timeout=60, **changes,
    )  # fmt: skip
    job.rows(good_rows(22))
    return job


def start_on(hosts: tuple[Host, Host], job: Job, **changes: str) -> list[subprocess.Popen]:
    """Start the same command on both. `NAME_1` is a variable of the second only."""
    started = []
    for number, host in enumerate(hosts):
        variables = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "NNODES": "2", "NODE_RANK": str(number),
                     "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}  # fmt: skip
        variables |= {k: v for k, v in changes.items() if not k.endswith("_1")}
        variables |= {k.removesuffix("_1"): v for k, v in changes.items() if k.endswith("_1") and number == 1}
        env = environment(SUREFOOT_CACHE=str(job.folder / f"cache{number}"), **variables)
        if "GLOO_SOCKET_IFNAME" not in variables:
            env.pop("GLOO_SOCKET_IFNAME", None)  # the product has to find it
        started.append(host.start([sys.executable, "-m", "surefoot", "train", str(job.yaml)], env))
    return started


def ends_of(started: list[subprocess.Popen], seconds: float = SECONDS) -> list[tuple[int, str]]:
    """Wait for both; what each of them ended with and said."""
    told = []
    deadline = time.monotonic() + seconds
    for process in started:
        try:
            said = process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            for other in started:
                for pid in (*workers_of(other), other.pid):
                    os.kill(pid, signal.SIGKILL)
            raise
        told.append((process.returncode, said))
    return told


def workers_of(launcher: subprocess.Popen) -> list[int]:
    """The processes that a launcher has started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


def weights_of(job: Job) -> dict:
    return load_file(job.out / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    build_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def two(lab):
    """A run on two hosts from beginning to end."""
    job = job_in(lab, "two")
    with two_hosts(delay=0.02, loss=0.01) as (first, second, link):
        told = ends_of(start_on((first, second), job))
        assert [code for code, _ in told] == [0, 0], told
        assert link.lost > 10, "packets were lost"
    assert "host0" in told[0][1] and "All-reduce over 4 processes: sums right" in told[0][1]
    return job


@pytest.mark.long
@needs_hosts
def test_two_hosts_train_as_one_process_does_and_resume(lab, two):
    alone = job_in(lab, "alone").set(per_device_train_batch_size=4)
    assert run("train", alone.yaml, env=environment()).returncode == 0
    losses, expected = ([entry["loss"] for entry in log_entries(job.out)[:-1]] for job in (two, alone))
    assert len(losses) == 18
    assert losses == pytest.approx(expected, abs=1e-5)
    # Back to step 5, as after a crash: the rest comes out as before.
    job = job_in(lab, "resumed")
    shutil.copytree(two.out / "checkpoint-5", job.out / "checkpoint-5")
    with two_hosts() as (first, second, _):
        told = ends_of(start_on((first, second), job))
    assert [code for code, _ in told] == [0, 0], told
    assert "18 steps, 5 of them done before" in told[0][1]
    whole, again = weights_of(two), weights_of(job)
    assert all(again[name].equal(whole[name]) for name in whole)


@pytest.mark.long
@needs_hosts
def test_a_rank_killed_on_the_second_host_comes_back_from_the_last_checkpoint(lab, two):
    job = job_in(lab, "killed")
    with two_hosts() as (first, second, _):
        started = start_on((first, second), job, MAX_RESTARTS="2")
        deadline = time.monotonic() + SECONDS
        while not (job.out / "checkpoint-5").exists():
            assert time.monotonic() < deadline and all(process.poll() is None for process in started)
            time.sleep(0.05)
        os.kill(workers_of(started[1])[0], signal.SIGKILL)
        told = ends_of(started)
    assert [code for code, _ in told] == [0, 0], told
    assert "of them done before" in told[0][1]
    whole, again = weights_of(two), weights_of(job)
    assert all(again[name].equal(whole[name]) for name in whole)


@pytest.mark.long
@needs_hosts
def test_mistakes_of_two_hosts_end_with_their_cause(lab):
    job = job_in(lab, "mistakes").set(ddp_timeout=8)
    with two_hosts() as hosts:
        for changes, first, second in (
            ({"NODE_RANK_1": "0"}, "NODE_RANK 0 was given to two: host0", "and host1"),
            ({"GLOO_SOCKET_IFNAME": "eth9"}, "host0 has no eth9: its interfaces are lo, eth7", "host1 has no eth9"),
            ({"MASTER_ADDR_1": "10.77.0.9"}, "of 2 nodes 1 did not come", "cannot reach MASTER_ADDR:MASTER_PORT 10.77"),
            ({"MASTER_ADDR_1": "192.0.2.1"}, "of 2 nodes 1 did not come", "Network is unreachable"),
        ):
            told = ends_of(start_on(hosts[:2], job, **changes), 60)
            assert all(code in (1, 2) for code, _ in told)
            assert first in told[0][1]
            assert second in told[1][1]


def roll(nodes: list[Node], patience: float = 20.0) -> list[str]:
    """Call the roll from several threads; what each of them ended with."""
    ends = [""] * len(nodes)

    def attend(place: int) -> None:
        try:
            call_roll(nodes[place], patience, lambda _: None)
        except (UserError, WorkError) as error:
            ends[place] = error.problems[0].message

    threads = [threading.Thread(target=attend, args=(place,)) for place in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return ends


def test_the_roll_is_called_before_machines_start():
    port = free_port()
    assert roll([Node(rank, 3, "127.0.0.1", port) for rank in range(3)]) == ["", "", ""]
    assert roll([Node(rank, 3, "127.0.0.1", port) for rank in (2, 0, 1)]) == ["", "", ""], "the port is free again"


def test_a_number_given_twice_and_a_machine_that_does_not_come_are_named():
    port = free_port()
    twice = roll([Node(rank, 3, "127.0.0.1", port) for rank in (0, 1, 1)])
    assert all(words.startswith("NODE_RANK 1 was given to two: ") for words in twice)
    ends = roll([Node(0, 3, "127.0.0.1", free_port())], patience=1.0)
    assert "of 3 nodes 1, 2 did not come" in ends[0]
    ends = roll([Node(1, 2, "127.0.0.1", free_port())], patience=1.0)
    assert "cannot reach" in ends[0] and "refused" in ends[0]


def test_a_port_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        ends = roll([Node(0, 2, "127.0.0.1", port)], patience=1.0)
    assert ends[0].startswith(f"MASTER_PORT {port} of node 0 (") and ends[0].endswith("is taken")


def test_a_person_is_told_what_is_waited_for(monkeypatch):
    monkeypatch.setattr(roll_call, "TELL_AFTER", 0.2)
    told: list[str] = []
    with pytest.raises(WorkError, match="did not come"):
        call_roll(Node(0, 2, "127.0.0.1", free_port()), 1.5, told.append)
    assert len(told) == 1 and "waits for node 1 of 2" in told[0]


def test_several_machines_need_what_they_cannot_guess(settings):
    cfg = make_config(settings)
    forced = {"FORCE_TORCHRUN": "1", "NNODES": "2", "NPROC_PER_NODE": "1"}
    with pytest.raises(UserError, match="MASTER_ADDR"):
        launch_command(cfg, ["x.yaml"], forced)
    with pytest.raises(UserError, match="NODE_RANK is 2, but NNODES is 2"):
        launch_command(cfg, ["x.yaml"], forced | {"NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1"})
    assert "--master-port=29500" in launch_command(cfg, ["x.yaml"], forced | {"MASTER_ADDR": "10.0.0.1"})
    elastic = launch_command(
        cfg, ["x.yaml"], forced | {"MASTER_ADDR": "10.0.0.1", "RDZV_ID": "job", "MIN_NNODES": "1", "MAX_NNODES": "3"}
    )
    wanted = ["--nnodes=1:3", "--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=10.0.0.1:29500"]
    assert set(wanted) <= set(elastic)
    meet_others(cfg, {"FORCE_TORCHRUN": "1"}, lambda line: pytest.fail("one machine waits for nobody"))


def test_gloo_takes_the_interface_that_leads_to_the_master(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": ["127.0.0.1"], "eth7": ["10.77.0.2", "fe80::1"]})
    monkeypatch.setattr(network, "own_address", lambda master: "127.0.0.1" if "127" in master else "10.77.0.2")
    several = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for variables, expected in (
        ({}, None),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1"}, "eth7"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, "lo"),
        (several | {"MASTER_ADDR": "127.0.1.1"}, "eth7"),  # as Debian writes a machine's own name into /etc/hosts
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "lo"}, "lo"),
    ):
        environ = dict(variables)
        tie_to_network(environ)
        assert environ.get("GLOO_SOCKET_IFNAME") == expected


@pytest.mark.parametrize(
    ("variables", "bad"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth"}, "no eth:"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth9"}, "no eth9:"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "no ib:"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "no eth:"),
        ({"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth7"}, ""),
        ({"NCCL_SOCKET_IFNAME": "=ib0,eth7"}, ""),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, ""),
    ],
)
def test_an_interface_that_is_not_there_is_named(variables, bad):
    if bad:
        with pytest.raises(UserError, match=bad):
            check_names(variables, ["lo", "eth7"])
    else:
        check_names(variables, ["lo", "eth7"])


def test_an_address_of_ones_own_is_found_without_sending_anything():
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match=r"MASTER_ADDR is no\.such\.host\.invalid"):
        own_address("no.such.host.invalid")
