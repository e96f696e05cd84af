"""The all-reduces before a model is loaded: right sums pass, a wrong one is named, a rank that stands still too."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from crew import SECONDS, server

from surefoot.cli.launch import free_port
from surefoot.errors import WorkError
from surefoot.machine.table import load_table
from surefoot.run import link_test
from surefoot.run.link_test import LinkSpeed, pattern
from surefoot.train.ranks import Ranks


def take_part(rank: int, world: int, port: int, fault: str, out: str) -> None:
    """Test the links as one of several processes; write down what was said, or what it ended with."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    ranks = Ranks.join(SimpleNamespace(ddp_timeout=6, ddp_backend=None), "cpu", os.environ)
    reduce, rounds = dist.all_reduce, []

    def counted(tensor: torch.Tensor) -> None:
        rounds.append(tensor.numel())
        if fault == "stands still" and rank == world - 1 and tensor.numel() > 10_000:
            time.sleep(1000)
        reduce(tensor)
        if fault == "wrong" and rank == world - 1 and tensor.numel() > 10_000:
            tensor[77] += 1

    dist.all_reduce = counted
    said: list[str] = []
    link_test.LATE = 2.0
    began = time.monotonic()
    try:
        speed = link_test.test_links(ranks, "cpu", said.append)
        told = {"said": said, "rounds": rounds, "gbs": speed.bus_gbs, "seconds": time.monotonic() - began}
        ranks.leave()
    except WorkError as error:
        ranks.announce(error)
        told = {"error": error.problems[0].message, "said": said}
    Path(out, f"{rank}.json").write_text(json.dumps(told))


def together(folder: Path, world: int, fault: str = "") -> list[dict | None]:
    port = free_port()
    crew = [server().Process(target=take_part, args=(rank, world, port, fault, str(folder))) for rank in range(world)]
    for process in crew:
        process.start()
    for process in crew[: world - 1] if fault == "stands still" else crew:
        process.join(SECONDS)
    late = [process for process in crew if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    assert len(late) == (fault == "stands still")
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def test_right_sums_and_the_same_rounds_on_all_ranks(tmp_path):
    told = together(tmp_path, 3)
    assert told[0]["rounds"] == told[1]["rounds"] == told[2]["rounds"]
    assert max(told[0]["rounds"]) > 256, "more than the smallest"
    assert "All-reduce over 3 processes: sums right up to" in told[0]["said"][0]
    assert "GB/s bus" in told[0]["said"][0] and told[0]["gbs"] > 0


def test_a_wrong_sum_ends_all_and_names_the_rank_that_holds_it(tmp_path):
    for one in together(tmp_path, 2, "wrong"):
        assert "gives wrong sums on rank 1 (" in one["error"]


@pytest.mark.long
def test_a_rank_that_stands_still_is_named_in_time(tmp_path):
    began = time.monotonic()
    told = together(tmp_path, 2, "stands still")
    assert "rank 1 (" in told[0]["error"] and "does not answer" in told[0]["error"]
    assert len(told[0]["said"]) == 1 and "has not come back for 2 s" in told[0]["said"][0]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("world", [2, 64, 2048])
def test_every_sum_of_the_pattern_is_exact(world):
    factor = sum(rank % link_test.RESIDUES + 1 for rank in range(world))
    assert factor * link_test.RESIDUES < 2**24
    total = torch.stack([pattern(rank, 300, "cpu") for rank in range(min(world, 64))]).sum(0)
    if world <= 64:
        assert total.equal(pattern(0, 300, "cpu") * factor)


def test_bandwidth_is_counted_as_nccl_tests_do():
    speed = LinkSpeed(8, 20e-6, 2**28, 2**28 / 200e9, 2.0)
    assert speed.algorithm_gbs == pytest.approx(200)
    assert speed.bus_gbs == pytest.approx(350)
    assert "256 MiB, 350 GB/s bus (200 algorithm), latency 20 us" in speed.describe()
    assert "nothing larger" in LinkSpeed(4, 0.3, 1024, 0.3, 2.8).describe()


def test_slow_links_are_told_only_where_the_table_knows_better(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    names = tuple(f"rank {rank} (node7, cuda:{rank})" for rank in range(8))
    ranks = Ranks(names=names)
    slow, good = (LinkSpeed(8, 2e-5, 2**28, 2**28 * 1.75 / (gbs * 1e9), 2.0) for gbs in (60, 310))
    assert "60 GB/s is far below the 336 GB/s" in link_test._too_slow(ranks, slow, "cuda:0")
    assert link_test._too_slow(ranks, good, "cuda:0") == ""
    assert link_test._too_slow(ranks, slow, "cpu") == ""
    two_hosts = Ranks(names=(*names[:7], "rank 7 (node8, cuda:0)"))
    assert link_test._too_slow(two_hosts, slow, "cuda:0") == ""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert link_test._too_slow(ranks, slow, "cuda:0") == ""
    assert load_table().link_of("MI300X").bus_gbs(16) is None


def test_cards_without_peer_access_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 1})
    assert "cards 0 and 2, 1 and 2 cannot reach" in link_test._without_peers("cuda:0")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert link_test._without_peers("cuda:0") == "" == link_test._without_peers("cpu")


def test_a_process_alone_tests_nothing():
    assert link_test.test_links(Ranks(), "cpu", lambda line: pytest.fail("nothing to tell")) is None
