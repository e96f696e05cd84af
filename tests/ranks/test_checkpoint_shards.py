"""Sharded checkpoints: written by four ranks, read by two and by one; a fault on one rank is a fault of the whole."""

from __future__ import annotations

import shutil

import pytest
import torch
from shard_crew import BAD, BROKEN, FULL, LATE, start, train_whole

from surefoot.errors import UserError, WorkError
from surefoot.model.source import weight_files
from surefoot.train.checkpoint import read_checkpoint
from surefoot.train.sharded import Whole, load_pieces


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("shards")
    return out, start("write", 4, out)


def expected():
    trained, optimizer = train_whole()
    tensors = {f"{name} ": p.detach() for name, p in trained.items()}
    return tensors | {f"{name} {key}": v for name, p in trained.items() for key, v in optimizer.state[p].items()}


def fresh():
    trained = {name: torch.nn.Parameter(torch.zeros_like(p)) for name, p in train_whole()[0].items()}
    return Whole(trained), torch.optim.AdamW(trained.values(), lr=0.5)


def test_what_four_wrote_two_and_one_read_bit_for_bit(written):
    out, _ = written
    wanted = expected()
    assert [rate for (rate,) in start("read", 2, out)] == [0.1, 0.1]
    by_two = torch.load(out / "read by 2.pt", weights_only=True)
    whole, optimizer = fresh()
    load_pieces(whole, out / "checkpoint-2", optimizer)
    state = whole.state(optimizer)
    by_one = {f"{name} ": p.detach() for name, p in state["model"].items()}
    by_one |= {f"{n} {k}": value for n, entry in state["optimizer"].items() for k, value in entry.items()}
    for found in (by_two, by_one):
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not found[name].equal(wanted[name])] == []
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_checkpoint_is_whole_and_every_rank_wrote_its_own_file(written):
    out, told = written
    checkpoint = read_checkpoint(out / "checkpoint-2")
    assert (checkpoint.step, checkpoint.state["shards"]) == (2, 4)
    names = {file.name for file in (out / "checkpoint-2" / "surefoot" / "shards").iterdir()}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}
    assert all([2, "checkpoint-2"] in heard and [LATE, f"checkpoint-{LATE}"] in heard for heard in told)


@pytest.mark.parametrize(
    ("step", "culprit", "why"),
    [(FULL, 2, "disk is full"), (BAD, 1, "layers.0.weight is not finite"), (BROKEN, 0, "disk is full")],
)
def test_a_fault_on_one_rank_ends_the_checkpoint_on_all(written, step, culprit, why):
    out, told = written
    for rank, heard in enumerate(told):
        (said,) = [words for words in heard if isinstance(words, str) and words.startswith(f"{step}: ")]
        assert why in said
        assert ("OtherRankError" in said) == (rank != culprit)
        assert rank == culprit or f"rank {culprit} (" in said
    assert not list(out.glob(f"*checkpoint-{step}*")), "nothing half written stays"


def test_what_is_written_is_what_stood_when_it_was_saved(written):
    out, _ = written
    whole, optimizer = fresh()
    load_pieces(whole, out / f"checkpoint-{LATE}", optimizer)
    wanted = expected()
    assert all(p.equal(wanted[f"{name} "]) for name, p in whole.trained.items())


def test_a_missing_shard_a_torn_folder_and_another_model_are_named(written, tmp_path):
    out, _ = written
    folder = shutil.copytree(out / "checkpoint-2", tmp_path / "checkpoint-2")
    shard = folder / "surefoot" / "shards" / "__1_0.distcp"
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(WorkError, match=r"surefoot/shards/__1_0\.distcp is missing"):
        read_checkpoint(folder)
    shard.write_bytes(content[:-1] + b"x")
    with pytest.raises(WorkError, match=r"__1_0\.distcp is not what was written"):
        read_checkpoint(folder)
    (folder / "surefoot" / "manifest.json").unlink()
    with pytest.raises(WorkError, match="not a whole Surefoot checkpoint"):
        read_checkpoint(folder)
    whole, _ = fresh()
    whole.trained["more"] = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match="more is missing"):
        load_pieces(whole, out / "checkpoint-2", None)


def test_as_a_model_it_is_refused_with_the_way_out(written):
    out, _ = written
    with pytest.raises(UserError, match="sharded checkpoint") as refused:
        weight_files(str(out / "checkpoint-2"))
    assert "resume_from_checkpoint" in refused.value.problems[0].hint
