"""Restore points of a run: back to an earlier step in the same process, bit for bit on a CPU.

For adapters, weights and moments are copied to host memory every so often, the last two copies are kept, and the very
start. A full fine-tune is too large for that: it goes back to its last verified checkpoint, or loads its model anew.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from surefoot.errors import WorkError
from surefoot.model.randomness import set_random_state
from surefoot.train.checkpoint import find_checkpoints, read_checkpoint, remove_folders
from surefoot.train.restore import restore

if TYPE_CHECKING:
    from surefoot.train.loop import Run, RunState

# 42 million LoRA parameters with moments are 0.5 GB: 10 ms over PCIe 5, so 0.2 ms a step at this distance (estimate;
# measured by benchmarks/guard_cost.py).
EVERY = 50


@dataclass(frozen=True)
class RestorePoint:
    """A run as it stood between two steps.

    Attributes:
        state: its counters.
        names: of the trained weights that were copied; None for a full fine-tune's start, which is loaded anew.
        optimizer: the optimizer's state as it was laid out; its tensors are the live ones, their copies are elsewhere.
        scheduler: the schedule's state.
        scale: value and clean steps of the loss scale.
        random_state: of all generators.
        guard: what the guard knew.
        memory: the copies, weights first, then the optimizer's.
    """

    state: RunState
    names: tuple[str, ...] | None
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    scale: dict[str, Any]
    random_state: dict[str, Any]
    guard: dict[str, Any]
    memory: HostCopy

    def copies(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the copied weights by name, and the optimizer's state with the copies in it."""
        tensors = iter(self.memory.tensors())
        weights = {name: next(tensors) for name in self.names or ()}
        return weights, _with_tensors(self.optimizer, tensors)

    def with_optimizer(self, optimizer: dict[str, Any]) -> RestorePoint:
        """Return this point with another optimizer's state in it.

        Args:
            optimizer: its `state_dict`, of the same moment; its tensors are copied.

        Returns:
            The point; this one stays as it is.
        """
        weights, _ = self.copies()
        memory = HostCopy()
        memory.take([*weights.values(), *_tensors_of(optimizer)])
        return replace(self, optimizer=optimizer, memory=memory)


class RestorePoints:
    """The restore points of one run.

    Attributes:
        points: oldest first; the first is the run's very start, whose weights are loaded anew where they are not held.
    """

    points: list[RestorePoint]

    def __init__(self, run: Run, random_state: dict[str, Any], birth: RestorePoint | None) -> None:
        """Take the first points.

        Args:
            run: before its first step in this process.
            random_state: of all generators now.
            birth: the run before its checkpoint was restored; None when it goes on from none.
        """
        self._in_memory = hasattr(run.model, "peft_config")
        self._spare: list[HostCopy] = []
        if self._in_memory and run.runner.device != "cpu":
            # Of the two points that take turns. Asked for between two steps it would hold up both of them.
            self._spare = [HostCopy(_room(run)), HostCopy(_room(run))]
        self.points = [] if birth is None else [birth]
        if birth is None or self._in_memory:  # a full fine-tune that was resumed has its checkpoint
            self.points.append(take(run, random_state, with_weights=self._in_memory))

    def due(self, step: int) -> bool:
        """Say whether a point should be taken after a step."""
        return self._in_memory and step % EVERY == 0

    def add(self, run: Run, random_state: dict[str, Any]) -> None:
        """Take a point, and forget the oldest but the first and the last two."""
        memory = self.points.pop(1).memory if len(self.points) > 2 else None
        if self._spare:
            memory = self._spare.pop()
        self.points.append(take(run, random_state, with_weights=True, memory=memory))

    def moments_lost(self, run: Run) -> bool:
        """Say whether Adam's second moments have shrunk faster than they can: they decay by beta2 a step, no more.

        Args:
            run: at the step that is looked at.

        Returns:
            True when more than half of them are below half of what the last restore point leaves of them.
        """
        point = self.points[-1]
        lost = total = 0
        states = run.optimizer.state_dict()["state"]
        _, optimizer = point.copies()
        for group in optimizer["param_groups"]:
            decay = group.get("betas", (0.0, 0.0))[1] ** (run.state.step - point.state.step)
            for index in group["params"]:
                before = optimizer["state"].get(index, {}).get("exp_avg_sq")
                now = states.get(index, {}).get("exp_avg_sq")
                if before is None or now is None:
                    continue
                live = before > 0
                lost += int(((now.to(before.device) < 0.5 * decay * before) & live).sum())
                total += int(live.sum())
        return total > 0 and lost > total / 2

    def go_back(self, run: Run, before: int) -> int:
        """Put a run to the newest point with at most `before` steps done.

        Checkpoints beyond it are removed: their steps are done again, and so are they.

        Args:
            run: changed in place; the changes of its precision plan stay.
            before: most steps that may be done.

        Returns:
            Steps that are done now.

        Raises:
            WorkError: this process began later than that and there is no checkpoint either.
        """
        run.saver.finish(run)  # what is on its way may be what to go back to, or what to remove
        at = self._restore(run, before)
        self.points = [point for point in self.points if point.state.step <= at] or self.points[:1]
        doomed = [f for f in find_checkpoints(run.output_dir) if int(f.name.rpartition("-")[2]) > at]
        if run.ranks.is_main:
            remove_folders(doomed)
        for listener in run.listeners:
            listener.rewound(at)
        run.model.zero_grad(set_to_none=True)
        return at

    def _restore(self, run: Run, before: int) -> int:
        best = next((point for point in reversed(self.points) if point.state.step <= before), None)
        for folder in reversed(find_checkpoints(run.output_dir)):
            step = int(folder.name.rpartition("-")[2])
            if step <= before and (best is None or step > best.state.step):
                checkpoint = read_checkpoint(folder)
                if not checkpoint.state["weights_only"]:
                    restore(run, checkpoint, same_process=True)
                    return step
        if best is None:
            raise WorkError(f"there is no restore point at or before step {before}", hint="start the run again")
        put_back(run, best)
        return best.state.step


def _room(run: Run) -> dict[torch.dtype, int]:
    """Count the numbers of a point with Adam's moments and counters; an optimizer that holds more asks for more."""
    room: dict[torch.dtype, int] = {}
    for parameter in run.runner.trained.values():
        room[parameter.dtype] = room.get(parameter.dtype, 0) + 3 * parameter.numel() + 1
    return room


def take(run: Run, random_state: dict[str, Any], *, with_weights: bool, memory: HostCopy | None = None) -> RestorePoint:
    """Copy what a run needs to be put back here; a GPU is not waited for.

    Args:
        run: between two steps.
        random_state: of all generators as the last step left them.
        with_weights: False leaves the weights to be loaded anew.
        memory: of a point that is forgotten, to be used again.

    Returns:
        The point.
    """
    memory = memory or HostCopy()
    trained: dict[str, torch.Tensor] = dict(run.runner.trained) if with_weights else {}
    optimizer = run.optimizer.state_dict()
    optimizer["state"] = {index: dict(state) for index, state in optimizer["state"].items()}
    memory.take([*trained.values(), *_tensors_of(optimizer)])
    return RestorePoint(
        copy.copy(run.state),
        tuple(trained) if with_weights else None,
        optimizer,
        copy.deepcopy(run.scheduler.state_dict()),
        dict(run.runner.scale.state()),
        random_state,
        copy.deepcopy(run.guard.state()),
        memory,
    )


@torch.no_grad()
def put_back(run: Run, point: RestorePoint) -> None:
    """Put a run where a point was taken.

    Args:
        run: changed in place; parameters stay the same objects, since the optimizer holds them.
        point: of this run.
    """
    if run.runner.device != "cpu":
        torch.cuda.synchronize(run.runner.device)  # the copies were started without waiting
    weights, optimizer = point.copies()
    if point.names is None:
        weights = _loaded_anew(run)
    for name, parameter in run.runner.trained.items():
        parameter.copy_(weights[name])
    run.optimizer.load_state_dict(copy.deepcopy(optimizer))
    run.scheduler.load_state_dict(copy.deepcopy(point.scheduler))
    run.runner.scale = type(run.runner.scale)(**point.scale)
    run.state = copy.copy(point.state)
    run.guard.went_back(point.guard)
    set_random_state(point.random_state, run.runner.device)


class HostCopy:
    """Tensors of the device copied to the host in one piece a dtype; the memory can be used again.

    Pinned memory takes the driver about a millisecond a piece, and an adapter has more than a thousand tensors with its
    moments: copied one by one they held a step up for seconds (measured on an H200, 8B shapes). The pieces are only cut
    into tensors when those are wanted, which is hardly ever.
    """

    def __init__(self, reserve: dict[torch.dtype, int] | None = None) -> None:
        """Ask for pinned memory ahead, where it is known how much will be needed.

        Args:
            reserve: numbers of each dtype that will be copied from a GPU.
        """
        self._flat = {dtype: _pinned(count, dtype) for dtype, count in (reserve or {}).items()}
        self._places: dict[torch.dtype, list[int]] = {}
        self._shapes: list[torch.Size] = []
        self._clones: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: list[torch.Tensor]) -> None:
        """Copy tensors; from a GPU into pinned memory, without waiting.

        Args:
            tensors: of any dtypes and shapes; those that are not on a GPU are cloned.
        """
        self._shapes = [tensor.shape for tensor in tensors]
        self._clones = {i: tensor.clone() for i, tensor in enumerate(tensors) if tensor.device.type != "cuda"}
        self._places = {}
        for i, tensor in enumerate(tensors):
            if i not in self._clones:
                self._places.setdefault(tensor.dtype, []).append(i)
        for dtype, places in self._places.items():
            packed = torch.cat([tensors[i].flatten() for i in places])
            if dtype not in self._flat or self._flat[dtype].numel() < packed.numel():
                self._flat[dtype] = _pinned(packed.numel(), dtype)
            self._flat[dtype][: packed.numel()].copy_(packed, non_blocking=True)

    def tensors(self) -> list[torch.Tensor]:
        """Return the copies, in the order and shapes of what was copied last; the next copy overwrites them."""
        copies = dict(self._clones)
        for dtype, places in self._places.items():
            sizes = [self._shapes[i].numel() for i in places]
            parts = self._flat[dtype][: sum(sizes)].split(sizes)
            copies |= {i: part.view(self._shapes[i]) for i, part in zip(places, parts, strict=True)}
        return [copies[i] for i in range(len(self._shapes))]


def _pinned(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, pin_memory=True)


def _with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Rebuild nested dictionaries with other tensors in the places of theirs."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    return copy.deepcopy(value)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value.values() for t in _tensors_of(item)] if isinstance(value, dict) else []


def _loaded_anew(run: Run) -> dict[str, torch.Tensor]:
    """Load a full fine-tune's model again; loading is seeded, so it is the same model."""
    from surefoot.model.load import load_model

    fresh = load_model(run.cfg, run.tokenizer, "cpu")
    shards = run.runner.shards
    cut = shards.model.piece_of if shards is not None and shards.trains else torch.nn.Identity()
    return {name: cut(p.detach()) for name, p in fresh.model.named_parameters() if p.requires_grad}
