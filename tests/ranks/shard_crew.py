"""Real processes that hold shards of a few tensors and write them as a run does, with a fault planted in one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from crew import SECONDS, server

from helpers import random_table
from surefoot.cli.launch import free_port
from surefoot.train import saving
from surefoot.train.loop import RunState
from surefoot.train.ranks import Ranks
from surefoot.train.sharded import load_pieces

SHAPES = {"layers.0.weight": (10, 6), "layers.0.bias": (3,), "norm.weight": (5,)}  # cut unevenly; a rank may have none
FULL, BAD, LATE, BROKEN = 4, 6, 8, 10  # the steps whose checkpoints meet something


def whole_weights(shift: float = 0.0) -> dict[str, torch.Tensor]:
    """What all ranks together hold."""
    rng = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=rng) + shift for name, shape in SHAPES.items()}


def train_whole() -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    """The same in one process, after one update."""
    trained = {name: torch.nn.Parameter(tensor) for name, tensor in whole_weights().items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.1)
    for parameter in trained.values():
        parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
    optimizer.step()
    return trained, optimizer


class Cut:
    """Shards of the tensors above, as a run's `Shards` has them."""

    def __init__(self, world: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (world,))
        self.whole = {name: distribute_tensor(w, mesh, [Shard(0)]) for name, w in whole_weights().items()}
        self.trained = {name: torch.nn.Parameter(w.to_local()) for name, w in self.whole.items()}

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.tensor import distribute_tensor

        for name, parameter in self.trained.items():
            like = self.whole[name]
            grad = torch.linspace(-1, 1, like.numel()).view(like.shape)
            parameter.grad = distribute_tensor(grad, like.device_mesh, like.placements).to_local()
        optimizer.step()

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        moments = {
            name: {key: self._wrapped(value, self.whole[name]) for key, value in optimizer.state[p].items()}
            for name, p in self.trained.items()
            if p in optimizer.state
        }
        return {"model": {n: self._wrapped(p.detach(), self.whole[n]) for n, p in self.trained.items()},
                "optimizer": moments}  # fmt: skip

    def whole_state(self) -> dict[str, torch.Tensor]:
        return {
            name: w.full_tensor() for name, w in self.state(torch.optim.SGD(self.trained.values()))["model"].items()
        }

    def _wrapped(self, value: Any, like: Any) -> Any:
        from torch.distributed.tensor import DTensor

        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        return DTensor.from_local(
            value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def files_only(folder: Any, **_: Any) -> None:
    (Path(folder) / "config.json").write_text("{}")


def fake_run(out: Path, ranks: Ranks, shards: Cut, optimizer: torch.optim.Optimizer, told: list[Any]) -> Any:
    """What saving asks of a run, and no more."""
    cfg = SimpleNamespace(save_only_model=False, save_total_limit=None, load_best_model_at_end=False)
    return SimpleNamespace(
        cfg=cfg, output_dir=out, ranks=ranks, shards=shards, optimizer=optimizer, saver=saving.Saver(),
        state=RunState(step=2), fingerprint={}, order=SimpleNamespace(samples_of=lambda _: random_table(2).samples),
        scheduler=SimpleNamespace(state_dict=lambda: {"last_epoch": 2}), tell=told.append,
        model=SimpleNamespace(config=SimpleNamespace(save_pretrained=files_only)),
        tokenizer=SimpleNamespace(save_pretrained=files_only),
        schedule=SimpleNamespace(epoch_of=float, epochs=1.0, total_steps=20),
        runner=SimpleNamespace(scale=SimpleNamespace(state=dict), tokens_per_pass=64),
        guard=SimpleNamespace(state=dict, memory=SimpleNamespace(embeddings_mended=False)),
        listeners=[SimpleNamespace(saved=lambda step, folder: told.append([step, folder.name]))],
    )  # fmt: skip


def broken(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def write(ranks: Ranks, out: Path) -> list[Any]:
    """Save five times, three of them with a fault; what each save came to on this rank."""
    from torch.distributed.checkpoint import FileSystemWriter

    shards, told, rank = Cut(ranks.place.world), [], ranks.place.rank
    optimizer = torch.optim.AdamW(shards.trained.values(), lr=0.1)
    shards.step(optimizer)
    run = fake_run(out, ranks, shards, optimizer, told)
    write_data, first = FileSystemWriter.write_data, shards.trained["layers.0.weight"]
    for step in (2, FULL, BAD, LATE, BROKEN):
        run.state.step = step
        kept = first.detach().clone()
        if step == FULL and rank == 2:
            FileSystemWriter.write_data = broken
        if step == BAD and rank == 1:
            first.data[0, 0] = float("nan")
        if step == BROKEN and rank == 0:
            run.tokenizer.save_pretrained = broken
        try:
            saving.save(run, {})
            first.data.add_(step == LATE)  # training goes on, and so do its collectives
            assert [ranks.gather((turn, rank))[3] for turn in range(50)] == [(turn, 3) for turn in range(50)]
            run.saver.finish(run)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to see it
            run.saver = saving.Saver()
            told.append(f"{step}: {type(error).__name__}: {error}")
        FileSystemWriter.write_data = write_data
        first.data.copy_(kept)
    return told


def read(ranks: Ranks, out: Path) -> list[Any]:
    """Read the first checkpoint with another number of ranks, into shards of zeros, and gather what came of it."""
    shards = Cut(ranks.place.world)
    optimizer = torch.optim.AdamW(shards.trained.values(), lr=0.5)
    for parameter in shards.trained.values():
        parameter.data.zero_()
    load_pieces(shards, out / "checkpoint-2", optimizer)
    state = shards.state(optimizer)
    whole = {f"{n} ": w.full_tensor() for n, w in state["model"].items()}
    whole |= {f"{n} {k}": v.full_tensor() if hasattr(v, "full_tensor") else v
              for n, entry in state["optimizer"].items() for k, v in entry.items()}  # fmt: skip
    if ranks.is_main:
        torch.save(whole, out / f"read by {ranks.place.world}.pt")
    return [optimizer.param_groups[0]["lr"]]


def work(rank: int, world: int, port: int, task: str, out: str) -> None:
    """Be one of several processes."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    ranks = Ranks.join(SimpleNamespace(ddp_timeout=30, ddp_backend=None), "cpu", os.environ)
    told = {"write": write, "read": read}[task](ranks, Path(out))
    Path(out, f"{task} {world} {rank}.json").write_text(json.dumps(told))
    ranks.leave()


def start(task: str, world: int, out: Path) -> list[list[Any]]:
    """Let `world` processes do something together; what each of them has to tell."""
    port = free_port()
    crew = [server().Process(target=work, args=(rank, world, port, task, str(out))) for rank in range(world)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(SECONDS)
    hanging = [process.kill() for process in crew if process.is_alive()]
    assert not hanging and [process.exitcode for process in crew] == [0] * world
    return [json.loads((out / f"{task} {world} {rank}.json").read_text()) for rank in range(world)]
