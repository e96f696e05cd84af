"""Checkpoints written beside the training: a copy is taken between two steps, a thread does the rest.

The thread reads nothing that training changes, so that a run's numbers are the same with it. One checkpoint is on its
way at a time: the next one, the guard's experiments and the end of the run wait for it.
"""

from __future__ import annotations

import contextlib
import copy
import socket
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surefoot.data.batch import digest
from surefoot.model.memory import GIB, free_memory
from surefoot.train import sharded
from surefoot.train.checkpoint import rotate, save_checkpoint
from surefoot.train.ranks import OtherRankError

if TYPE_CHECKING:
    from surefoot.train.loop import Run

ROOM = 0.8  # of the free memory that a copy may take: writing and reading back need some too
CGROUP = Path("/sys/fs/cgroup")


class Saver:
    """The checkpoint of a run that is on its way to the disk, if there is one.

    Attributes:
        party: the ranks that write pieces of it; None before the first such checkpoint.
    """

    party: sharded.Party | None

    def __init__(self) -> None:
        self.party = None
        self._begun: tuple[int, Path] | None = None  # the same on all ranks, whoever writes
        self._future: Future[Path] | None = None  # of a rank that writes
        self._told = self._told_of_memory = False
        self._given_up = threading.Event()

    def expect(self, step: int, folder: Path) -> None:
        """A checkpoint is on its way; all ranks must call it.

        Args:
            step: that it is of.
            folder: where it will stand.
        """
        self._begun, self._told = (step, folder), False

    def begin(self, work: Callable[[], Path], *, aside: bool) -> None:
        """Let a checkpoint be written by this rank.

        Args:
            work: writes and verifies it.
            aside: in a thread; otherwise it is done when this returns.
        """
        if aside:
            executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._future = executor.submit(work)
            executor.shutdown(wait=False)
        else:
            self._future = Future()
            self._future.set_result(work())

    def may_go_on(self) -> None:
        """In the thread: stop here if a second signal has interrupted the run."""
        if self._given_up.is_set():
            raise InterruptedError("the run was interrupted while a checkpoint was written")

    def failure(self) -> Exception | None:
        """Return why the checkpoint could not be written, if so; what another rank died of is that rank's to tell."""
        if self._future is None or not self._future.done():
            return None
        error = self._future.exception()
        return error if isinstance(error, Exception) and not isinstance(error, OtherRankError) else None

    def look(self, run: Run) -> None:
        """Between two steps: tell of the checkpoint if it is verified by now."""
        if self._future is not None and self._future.done() and self._future.exception() is None:
            self._tell(run)

    def finish(self, run: Run) -> None:
        """Wait for the checkpoint that is on its way, if there is one; all ranks must call it.

        Raises what writing it raised, and `OtherRankError` on the ranks that did not write.

        Args:
            run: that it is of.
        """
        if self._begun is None:
            return
        future, self._future = self._future, None
        if self.party is not None:  # every rank has written a part
            assert future is not None
            future.result()
        else:
            run.ranks.on(0, lambda: future.result() if future else None)
        self._tell(run)
        self._begun = None

    def abandon(self, run: Run, error: BaseException) -> None:
        """Before a run ends by an error: let a checkpoint that was begun become whole, as far as it can.

        Args:
            run: that it is of.
            error: that ends the run; after a second signal the thread stops at the next file.
        """
        future, self._future = self._future, None
        if future is None:
            return
        run.ranks.announce(error)  # the others need not wait for the disk
        if isinstance(error, KeyboardInterrupt):
            self._given_up.set()
        failed = future.exception()
        if failed is None:
            self._tell(run)
        elif failed is not error and not isinstance(failed, InterruptedError | OtherRankError):
            run.tell(f"The last checkpoint was not kept either: {failed}")

    def tell_of_memory(self, run: Run, needed: int, free: float) -> None:
        """Say once that there is no room for a copy."""
        if not self._told_of_memory:
            self._told_of_memory = True
            run.tell(
                f"Checkpoints are written while training waits: a copy of {needed / GIB:.1f} GiB has no room in the "
                f"{free / GIB:.1f} GiB of free host memory."
            )

    def _tell(self, run: Run) -> None:
        if self._begun is not None and not self._told:
            self._told = True
            for listener in run.listeners:
                listener.saved(*self._begun)


@contextlib.contextmanager
def saving_beside(run: Run) -> Generator[None]:
    """Train within this: at its end every checkpoint that was begun is whole and told of, or its error raised.

    Args:
        run: whose checkpoints they are.

    Yields:
        Nothing.
    """
    try:
        yield
        run.saver.finish(run)
    except BaseException as error:
        run.saver.abandon(run, error)
        raise


def save(run: Run, random_state: dict[str, Any]) -> None:
    """Begin a checkpoint of what stands now; of several ranks the main one writes, or each its shards.

    Args:
        run: after a committed step.
        random_state: of all generators as that step left them.
    """
    saver, step = run.saver, run.state.step
    saver.finish(run)
    if run.shards is not None and not run.cfg.save_only_model:
        _begin_pieces(run, run.shards, random_state)
    else:
        whole = whole_weights(run)
        with run.gathered(not run.cfg.save_only_model):
            run.ranks.on(0, lambda: _begin_whole(run, random_state, whole))
    saver.expect(step, run.output_dir / f"checkpoint-{step}")
    saver.look(run)


def whole_weights(run: Run) -> dict[str, torch.Tensor] | None:
    """Gather a sharded model's weights on the main rank where they are to be saved; all ranks must call it.

    Args:
        run: between two steps.

    Returns:
        The model's `state_dict` on the host; None where the model's own will do, as adapters' does.
    """
    shards = run.runner.shards
    if shards is None or not (shards.trains or run.guard.memory.embeddings_mended):
        return None
    return shards.whole_state()


def _begin_whole(run: Run, random_state: dict[str, Any], weights: dict[str, Any] | None) -> None:
    """Copy weights and optimizer to the host and let them be written; without room for a copy write them as they are.

    Args:
        run: after a committed step.
        random_state: of all generators as that step left them.
        weights: the model's `state_dict`, where it was gathered on the host; None to take the model's own.
    """
    with_embeddings = run.guard.memory.embeddings_mended
    own = _saved_weights(run.model, with_embeddings=with_embeddings) if weights is None else {}
    tensors = None
    if not run.cfg.save_only_model:
        tensors = {
            "optimizer.pt": run.optimizer.state_dict(),
            "scheduler.pt": copy.deepcopy(run.scheduler.state_dict()),
            "rng_state.pth": random_state,
        }
    live = {id(t): t for t in [*own.values(), *sharded.tensors_of((tensors or {}).get("optimizer.pt"))]}
    needed, free = sum(t.numel() * t.element_size() for t in live.values()), ROOM * free_host_memory()
    aside = needed <= free
    if not aside:
        run.saver.tell_of_memory(run, needed, free)
    else:
        copies = {key: sharded.on_host(tensor) for key, tensor in live.items()}
        if weights is None:
            weights = _with_copies(run.model, copies)
        if tensors is not None:
            tensors["optimizer.pt"] = sharded.replace_tensors(tensors["optimizer.pt"], lambda t: copies[id(t)])
    run.saver.begin(
        partial(
            _write, run, run.state.step, tensors, _state_of(run), _kept(run), weights=weights,
            with_embeddings=with_embeddings,
        ),
        aside=aside,
    )  # fmt: skip


def _begin_pieces(run: Run, shards: sharded.Shards, random_state: dict[str, Any]) -> None:
    """Copy this rank's shards to the host and let all ranks write them together."""
    saver = run.saver
    saver.party = saver.party or sharded.Party.of(run.ranks)
    state, party = shards.state(run.optimizer), saver.party
    needed = sum(t.numel() * t.element_size() for t in map(sharded.local, sharded.tensors_of(state)))
    asked = run.ranks.gather((socket.gethostname(), needed, free_host_memory()))
    here = [(size, free) for host, size, free in asked if host == socket.gethostname()]
    mine = (sum(size for size, _ in here), ROOM * min(free for _, free in here))
    rooms = run.ranks.gather(mine)
    aside = all(size <= free for size, free in rooms)
    if not aside:
        saver.tell_of_memory(run, *max(rooms, key=lambda room: room[0] - room[1]))
    else:
        state = sharded.replace_tensors(state, sharded.on_host)
    state, values = sharded.split_values(state)
    if not run.ranks.is_main:
        saver.begin(lambda: sharded.follow(party, state), aside=aside)
        return
    tensors = {
        "optimizer.pt": {"param_groups": run.optimizer.state_dict()["param_groups"], "values": values},
        "scheduler.pt": copy.deepcopy(run.scheduler.state_dict()),
        "rng_state.pth": random_state,
    }
    write = partial(
        _write, run, run.state.step, tensors, _state_of(run) | {"shards": run.ranks.place.world}, _kept(run),
        pieces=lambda place: sharded.lead(party, state, place),
    )  # fmt: skip
    saver.begin(lambda: party.until_done(write), aside=aside)


def _write(
    run: Run, step: int, tensors: dict[str, Any] | None, state: dict[str, Any], keep: set[Path], **more: Any
) -> Path:
    folder = save_checkpoint(
        run.output_dir, step, run.model, run.tokenizer, tensors, state, go_on=run.saver.may_go_on, **more
    )
    rotate(run.output_dir, run.cfg.save_total_limit, keep | {folder})
    return folder


def _state_of(run: Run) -> dict[str, Any]:
    """Return a run's counters and settings as they stand, to be written later."""
    return copy.deepcopy(
        asdict(run.state)
        | {
            "epoch": run.schedule.epoch_of(run.state.step),
            "epochs": run.schedule.epochs,
            "total_steps": run.schedule.total_steps,
            "loss_scale": run.runner.scale.state(),
            "tokens_per_pass": run.runner.tokens_per_pass,
            "fingerprint": run.fingerprint,
            "guard": run.guard.state(),
            "last_batch": digest(run.order.samples_of(run.state.step - 1)),
        }
    )


def _kept(run: Run) -> set[Path]:
    best = run.state.best_step if run.cfg.load_best_model_at_end else None
    return set() if best is None else {run.output_dir / f"checkpoint-{best}"}


def _saved_weights(model: Any, *, with_embeddings: bool) -> dict[str, torch.Tensor]:
    """Return what is written of a model's weights: all of them, or with PEFT those that are trained."""
    state = model.state_dict(keep_vars=True)
    if not hasattr(model, "peft_config"):
        return state
    found = {name: tensor for name, tensor in state.items() if tensor.requires_grad}
    if with_embeddings:
        layers = (model.get_input_embeddings(), model.get_output_embeddings())
        theirs = {id(p) for layer in layers if layer is not None for p in layer.parameters()}
        found |= {name: tensor for name, tensor in state.items() if id(tensor) in theirs}
    return found


def _with_copies(model: Any, copies: dict[int, torch.Tensor]) -> dict[str, Any]:
    """Return a model's `state_dict` with copies in the places of what is saved; tied names share one."""
    return {name: copies.get(id(tensor), tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


def free_host_memory() -> int:
    """Return the bytes of host memory that this process may still take, in a container too."""
    free = free_memory("cpu")
    with contextlib.suppress(OSError, ValueError, StopIteration):  # no control groups, or no limit in them
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        place = CGROUP / own.removeprefix("0::").lstrip("/")
        used = int((place / "memory.current").read_text())
        cached = next(line for line in (place / "memory.stat").read_text().splitlines() if line.startswith("file "))
        free = min(free, int((place / "memory.max").read_text()) - used + int(cached.split()[1]))
    return free
