"""Real processes that train one tiny model together, with a fault planted in one of them."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from helpers import random_table
from surefoot.cli.launch import free_port
from surefoot.config import make_config
from surefoot.data.order import TableOrder
from surefoot.errors import UserError
from surefoot.model.load import load_model
from surefoot.model.recompute import turn_on_recompute
from surefoot.model.sharded import groups_of, sharded
from surefoot.model.tokenizer import load_tokenizer
from surefoot.train import checkpoint, loop, run, shards
from surefoot.train.events import TrainResult
from surefoot.train.ranks import Ranks
from surefoot.train.step import StepRunner

TURN_TIMEOUT = 2  # seconds of `ddp_timeout`
SECONDS = 90  # no crew of these tests takes a third of it, on a machine that has nothing else to do
EVERY = -1  # rank of a fault that all of them have
BAD_TOKEN = 200  # an id that no random row has
SAMPLES = 73  # in steps of eight: the last one of an epoch has a single sample, and most ranks none


@dataclass
class Fault:
    """What goes wrong, where and when.

    Attributes:
        kind: see `plant`.
        rank: on which; `EVERY` for all.
        step: at which, counted from 1.
    """

    kind: str
    rank: int
    step: int


@dataclass
class Member:
    """What one rank has to tell of a run.

    Attributes:
        losses: of the steps that stood in the end.
        norms: of their gradients.
        messages: for the person.
        events: of the guard's journal.
        error: that ended it, as "Type: message"; empty when it ended well.
        resumed_from: the step.
        seconds: it took.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    resumed_from: int = 0
    seconds: float = 0.0


class Ears:
    """A listener that keeps what a test compares."""

    def __init__(self, member: Member) -> None:
        self.member = member

    def started(self, facts: Any) -> None:
        self.member.resumed_from = facts.resumed_from

    def stepped(self, event: Any) -> None:
        self.member.losses.append(event.loss)
        self.member.norms.append(event.grad_norm)

    def rewound(self, step: int) -> None:
        keep = max(0, step - self.member.resumed_from)
        self.member.losses, self.member.norms = self.member.losses[:keep], self.member.norms[:keep]

    def told(self, message: str) -> None:
        self.member.messages.append(message)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def plant(fault: Fault, model: Any) -> None:
    """Put a fault into this process; all happen once, but that of a row wherever the row is computed.

    A "flaky" one happens at three steps.
    """
    state = {"now": False}
    compute, apply, read = StepRunner.compute, loop.apply_step, loop.Run.samples_of

    left = {fault.step + more for more in ((0, 4, 8) if fault.kind == "flaky" else (0,))}

    def armed(runner: StepRunner, step: int, samples: Any, error: Any = None) -> Any:
        if step in left:
            left.remove(step)
            state["now"] = True
        return compute(runner, step, samples, error)

    def spent() -> bool:
        now, state["now"] = state["now"], False
        return now

    def strike(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not module.training or not spent():
            return None
        if fault.kind == "loss":
            return output * float("nan")
        if fault.kind == "memory":
            raise torch.OutOfMemoryError("planted")
        raise IndexError("planted: index out of range in self")

    def unreadable(self: loop.Run, done: int) -> Any:
        if done + 1 == fault.step:
            raise OSError(5, "planted: Input/output error")
        return read(self, done)

    def touch(run_: loop.Run, attempt: Any) -> None:
        apply(run_, attempt)
        if attempt.check.step == fault.step and not state.get("done"):
            state["done"] = True
            trained = fault.kind == "weight"
            held = sharded(run_.model)
            pieces = held.pieces if held else {}
            touched = next(n for n, p in run_.model.named_parameters() if p.requires_grad == trained and p.ndim == 2)
            pieces.get(touched, run_.model.get_parameter(touched).data).view(-1)[3] += 1.0

    def full(folder: Path, *rest: Any, **more: Any) -> None:
        if f"checkpoint-{fault.step}." in folder.name:
            raise OSError(28, "No space left on device")
        save(folder, *rest, **more)

    def watched(self: shards.Shards) -> None:
        watch(self)
        (group,) = groups_of(self.model.root._get_fsdp_state())
        # What is cut has other tensors while it runs, kept by torch; to gather them on one rank alone would hang.
        group.fsdp_params[0]._unsharded_param.register_hook(lambda grad: grad * float("inf") if spent() else None)

    def no_room(self: shards.Shards) -> Any:
        raise shards.NoRoomError("the whole model takes 9.0 GiB, and rank 0 has 1.0 GiB left")

    def dying(folder: Path, known: Any = None) -> Any:
        if f"checkpoint-{fault.step}." in folder.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return digests(folder, known)

    save, digests = checkpoint.save_model, checkpoint._digests
    watch = shards.Shards.watch_own_gradients
    StepRunner.compute = armed
    if fault.kind in ("gradient", "flaky", "huge"):
        # In its own product, so that only this step's backward feels it.
        first = next(p for p in model.parameters() if p.requires_grad)
        factor = 1e12 if fault.kind == "huge" else float("inf")
        first.register_hook(lambda grad: grad * factor if spent() else None)
        shards.Shards.watch_own_gradients = watched
    elif fault.kind in ("loss", "exception", "memory"):
        model.get_input_embeddings().register_forward_hook(strike)
    elif fault.kind == "data":
        loop.Run.samples_of = unreadable
    elif fault.kind in ("weight", "frozen"):
        loop.apply_step = touch
    elif fault.kind == "disk":
        checkpoint.save_model = full
    elif fault.kind == "recompute":  # no fault, but nothing that a YAML of a tiny model would bring about
        run.recompute = lambda model, choice: turn_on_recompute(model)
    elif fault.kind == "no room":  # and the gradient is bad as well
        shards.Shards.whole = no_room
        first = next(p for p in model.parameters() if p.requires_grad)
        if os.environ["RANK"] == "1":
            first.register_hook(lambda grad: grad * float("inf") if spent() else None)
    elif fault.kind == "killed in a save":  # all is written but the manifest, and nothing has its name yet
        checkpoint._digests = dying
    elif fault.kind == "row":
        model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: torch.where(inputs[0][..., None] == BAD_TOKEN, float("nan"), output)
        )
    elif fault.kind == "signal":
        model.get_input_embeddings().register_forward_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGTERM) if spent() else None
        )
    elif fault.kind == "killed":
        model.get_input_embeddings().register_forward_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL) if spent() else None
        )
    elif fault.kind == "stopped":
        model.get_input_embeddings().register_forward_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGSTOP) if spent() else None
        )


def looking(assembled: loop.Run, ahead: bool) -> loop.Run:
    """Let a run compute a step ahead of the verdict on the one before, as it does on a GPU."""
    assembled.looks_ahead = ahead
    return assembled


def work(
    rank: int, world: int, port: int, settings: dict[str, Any], fault: Fault | None, ahead: bool, out: str
) -> None:
    """Train as one of several processes, and write down what this one saw."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    began, told = time.monotonic(), Member()
    cfg = make_config(settings)
    tokenizer = load_tokenizer(cfg)
    loaded = load_model(cfg, tokenizer, "cpu")
    ranks = Ranks.join(cfg, "cpu", os.environ)
    if fault and fault.rank in (rank, EVERY):
        plant(fault, loaded.model)
    keepers: list[Any] = []
    keep = run.Keeper.__init__
    run.Keeper.__init__ = lambda self, *a, **k: (keep(self, *a, **k), keepers.append(self))[0]
    assemble = run.assemble
    run.assemble = lambda *given: looking(assemble(*given), ahead)
    table = random_table(SAMPLES)
    if fault and fault.kind == "row":
        row = int(TableOrder(table, 8, cfg.seed).indices_of(fault.step - 1)[0])  # type: ignore[arg-type]
        table.samples[row].input_ids[2] = BAD_TOKEN
    data = SimpleNamespace(train=table, evals={"": random_table(6, 1)} if cfg.do_eval else {})
    try:
        result = run.run_training(cfg, loaded, tokenizer, data, [Ears(told)], "cpu", ranks)
        assert isinstance(result, TrainResult)
        ranks.leave()
    except Exception as error:  # noqa: BLE001 - whatever it is, a test wants to see it
        ranks.announce(error)
        told.error = f"{type(error).__name__}: {error}"
    told.events = [event for keeper in keepers for event in keeper.journal.events]
    told.seconds = time.monotonic() - began
    Path(out, f"{rank}.json").write_text(json.dumps(vars(told)))


def take_turns(rank: int, port: int, fails: bool, out: str) -> None:
    """Do something long on the first of two processes, and look what the other hears of it."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = Ranks.join(SimpleNamespace(ddp_timeout=TURN_TIMEOUT, ddp_backend=None), "cpu", os.environ)
    done = Path(out) / "done"

    def prepare(first: bool) -> str:
        if not first:
            return done.read_text()
        time.sleep(2 * TURN_TIMEOUT)
        if fails:
            raise UserError("planted: the rows cannot be read")
        done.write_text("by the first")
        return "first"

    try:
        said = ranks.first_of_host(prepare)
        ranks.leave()
    except Exception as error:  # noqa: BLE001 - whatever it is, a test wants to see it
        ranks.announce(error)
        said = f"{type(error).__name__}: {error}"
    Path(out, f"{rank}.txt").write_text(said)


def server() -> Any:
    """The context that ranks are forked in; what its server shall import is looked for in PYTHONPATH only."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def train(
    folder: Path, world: int, settings: dict[str, Any], fault: Fault | None = None, *, ahead: bool = False
) -> list[Member | None]:
    """Let `world` processes train together; one that is killed or hangs has nothing to tell.

    Steps have eight samples, however many processes share them.
    """
    context = server()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    settings = {"per_device_train_batch_size": 2} | settings | {"gradient_accumulation_steps": 4 // world}
    port = free_port()
    crew = [
        context.Process(target=work, args=(rank, world, port, settings, fault, ahead, str(folder)))
        for rank in range(world)
    ]
    for process in crew:
        process.start()
    deadline = time.monotonic() + SECONDS
    sleeper = fault.rank if fault and fault.kind.startswith(("stopped", "killed")) else None
    for rank, process in enumerate(crew):
        if rank != sleeper:
            process.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(crew) if process.is_alive() and rank != sleeper]
    for process in crew:
        if process.is_alive():
            process.kill()
        process.join()
    assert not hanging, f"the ranks {hanging} were not done after {SECONDS} s"
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [Member(**json.loads(file.read_text())) if file.exists() else None for file in files]
