"""Ranks decide alike about a step: the sums, then real processes with a planted infinity and a planted exception."""

from __future__ import annotations

import random
import time
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from surefoot.guard.consensus import REASONS, Verdict, agree, attempt, payload, read_verdict

SECONDS = 60


@given(
    ranks=st.sampled_from([1, 2, 8, 50, 51, 130]),
    bad=st.dictionaries(st.integers(0, 129), st.sampled_from([*REASONS, "inf", "nan"]), max_size=6),
)
def test_the_sums_name_exactly_the_bad_ranks(ranks, bad):
    bad = {rank: how for rank, how in bad.items() if rank < ranks}
    sums = torch.zeros_like(payload(0, ranks, torch.tensor(0.0), {}))
    for rank in range(ranks):
        how = bad.get(rank)
        square = torch.tensor(float(how) if how in ("inf", "nan") else 4.0)
        sums += payload(rank, ranks, square, {how: torch.tensor(True)} if how in REASONS else {})
    verdict = read_verdict(sums.tolist())
    assert verdict.bad == bool(bad)
    assert verdict.decision == ("REPLAY" if bad else "APPLY")
    assert verdict.ranks == tuple(sorted(bad))
    assert set(verdict.reasons) == {"gradient" if how in ("inf", "nan") else how for how in bad.values()}
    assert verdict.norm == pytest.approx(2.0 * (ranks - len(bad)) ** 0.5)


def test_one_process_needs_no_group():
    assert agree(torch.tensor(9.0), {}) == Verdict(False, (), (), 3.0)
    assert agree(torch.tensor(float("nan")), {"loss": True}) == Verdict(True, (0,), ("loss", "gradient"), 0.0)


def steps_of_a_rank(rank: int, ranks: int, folder: str, faults: dict[int, tuple[int, str]], steps: int) -> None:
    """Train a line on `ranks` processes; at a step of `faults` the named rank's computation goes wrong."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model, seen = torch.nn.Linear(3, 1), []
    for step in range(steps):
        faulty, kind = faults.get(step, (-1, ""))

        def compute(kind: str = kind if rank == faulty else "") -> None:
            x = torch.ones(2, 3) * (rank + 1)
            if kind == "inf":
                x[1, 1] = float("inf")
            loss = model(x).square().mean()
            if kind == "exception":
                raise IndexError("index out of range in self")
            loss.backward()

        model.zero_grad()
        reasons, error = attempt(compute, model.parameters())
        grads = [p.grad for p in model.parameters()]
        verdict = agree(torch.stack([g.float().square().sum() for g in grads]).sum() / ranks, reasons)
        for grad in grads:  # as data parallelism does, also after an exception
            dist.all_reduce(grad)
        seen.append((list(astuple(verdict)), type(error).__name__ if error else None))
        if not verdict.bad:
            torch.optim.SGD(model.parameters(), 0.01).step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    verdicts, errors = zip(*seen, strict=True)
    torch.save({"verdicts": list(verdicts), "errors": list(errors), "weights": weights}, f"{folder}/{rank}")
    dist.destroy_process_group()


def run_ranks(folder: Path, ranks: int, faults: dict[int, tuple[int, str]], steps: int) -> list[dict]:
    """Spawn the ranks, wait a limited time, and return what each of them wrote."""
    context = mp.start_processes(
        steps_of_a_rank, (ranks, str(folder), faults, steps), nprocs=ranks, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + SECONDS
    while not context.join(1.0):  # True once all have ended well; raises when one has failed
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail(f"{ranks} ranks were not done after {SECONDS} s")
    return [torch.load(folder / str(rank), weights_only=True) for rank in range(ranks)]


def verdicts_of(told: list[dict]) -> list[Verdict]:
    """Check that all ranks saw the same, and return it."""
    verdicts = [[Verdict(bad, tuple(ranks), tuple(reasons), norm) for bad, ranks, reasons, norm in rank["verdicts"]]
                for rank in told]  # fmt: skip
    assert all(one == verdicts[0] for one in verdicts)
    assert all(torch.equal(rank["weights"], told[0]["weights"]) for rank in told)
    return verdicts[0]


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_an_infinity_on_one_rank_replays_that_step_on_both(tmp_path):
    told = run_ranks(tmp_path, 2, {1: (1, "inf")}, steps=4)
    verdicts = verdicts_of(told)
    assert [v.decision for v in verdicts] == ["APPLY", "REPLAY", "APPLY", "APPLY"]
    assert verdicts[1].ranks == (1,)
    assert verdicts[1].reasons == ("gradient",)
    assert told[0]["weights"].isfinite().all()


def test_an_exception_on_any_rank_hangs_nobody(tmp_path):
    rng = random.Random(5)
    faults = {1: (rng.randrange(4), "exception"), 3: (rng.randrange(4), "exception")}
    told = run_ranks(tmp_path, 4, faults, steps=5)
    verdicts = verdicts_of(told)
    for step, verdict in enumerate(verdicts):
        assert verdict.bad == (step in faults)
        assert verdict.ranks == ((faults[step][0],) if step in faults else ())
        assert verdict.reasons == (("exception",) if step in faults else ())
    for rank, one in enumerate(told):
        assert one["errors"] == ["IndexError" if faults.get(step, ())[:1] == (rank,) else None for step in range(5)]
