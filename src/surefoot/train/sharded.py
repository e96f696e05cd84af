"""Checkpoints of a model that is sharded over ranks: each writes its shards, any number of ranks reads them.

The format is that of `torch.distributed.checkpoint` (DCP). Shards are written from a thread of each rank, which talk
over a gloo group of their own, so that training and its collectives go on meanwhile.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from surefoot.errors import UserError, WorkError
from surefoot.files import explain_disk_errors
from surefoot.train.checkpoint import PIECES, digest_of
from surefoot.train.ranks import OtherRankError, words_of

if TYPE_CHECKING:
    import torch

    from surefoot.train.ranks import Ranks

T = TypeVar("T")


class Shards(Protocol):
    """What a checkpoint needs of a run whose trained weights are sharded.

    Attributes:
        trained: what the optimizer moves on this rank, by the names of the whole parameters.
    """

    trained: dict[str, torch.nn.Parameter]

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Return "model": tensors by name, in the run's own memory, and "optimizer": their state by name and key."""

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Gather the model's `state_dict` on the main rank's host; all ranks must call it."""


@dataclass
class Whole:
    """The same for a run whose every rank holds all of its weights: it can read what sharded runs have written.

    Attributes:
        trained: as in `Shards`.
    """

    trained: dict[str, torch.nn.Parameter]

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Return weights and moments as they lie in memory."""
        moments = {name: optimizer.state[p] for name, p in self.trained.items() if p in optimizer.state}
        return {"model": dict(self.trained), "optimizer": moments}

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Return the trained weights."""
        return {name: p.detach().cpu() for name, p in self.trained.items()}


@dataclass
class Party:
    """The ranks while they write one checkpoint after another, in their threads.

    Attributes:
        ranks: of the run.
        group: a gloo group that nobody else uses.
    """

    ranks: Ranks
    group: Any
    _ended: bool = field(default=False)

    @classmethod
    def of(cls, ranks: Ranks) -> Party:
        """Found the group; all ranks must call it, in the thread that trains."""
        import torch.distributed as dist

        return cls(ranks, dist.new_group(backend="gloo", timeout=timedelta(seconds=ranks.timeout)))

    def each(self, work: Callable[[], T]) -> list[T]:
        """Let every rank do something; if one cannot, none goes on.

        Args:
            work: returns plain data.

        Returns:
            What it returned, by rank.

        Raises:
            OtherRankError: it raised on another rank. On that rank its own exception goes on.
        """
        import torch.distributed as dist

        value, raised = None, None
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it before it goes on
            raised = error
        told: list[Any] = [None] * self.ranks.place.world
        words = None if raised is None else words_of(raised)
        try:
            dist.all_gather_object(told, (value, words, isinstance(raised, OtherRankError)), group=self.group)
        except RuntimeError as error:  # what gloo raises when a rank is gone or too late
            raise raised or OtherRankError(f"a rank is gone while a checkpoint was written: {error}") from error
        failed = [rank for rank, (_, said, _) in enumerate(told) if said is not None]
        if not failed:
            return [there for there, _, _ in told]
        self._ended = True
        if raised is not None and not isinstance(raised, OtherRankError):
            raise raised
        first = next((rank for rank in failed if not told[rank][2]), failed[0])
        raise OtherRankError(f"{self.ranks.names[first]}: {told[first][1]}")

    def until_done(self, work: Callable[[], Path]) -> Path:
        """On the main rank: write a checkpoint, and tell the others that wait for it how it ended.

        Args:
            work: calls `lead` in between.

        Returns:
            What it returned.
        """
        self._ended = False
        try:
            folder = work()
        except Exception as error:
            if not self._ended:  # it was raised where the others do not know of it
                self.each(lambda error=error: _raise(error))
            raise
        self.each(lambda: folder)
        return folder


def lead(party: Party, state: dict[str, Any], place: Path) -> dict[str, list[Any]]:
    """On the main rank: write this rank's shards and have the others write theirs.

    Args:
        party: of all ranks.
        state: as `Shards.state` gave it, tensors only; nobody may change it meanwhile.
        place: folder to write into, on a file system that all ranks share.

    Returns:
        Size in bytes and SHA-256 of every file, by its name in the folder.
    """
    party.each(lambda: str(place))
    return _write_pieces(party, state, place)


def follow(party: Party, state: dict[str, Any]) -> Path:
    """On another rank: write this rank's shards where the main rank says, and wait until all is verified.

    Args:
        party: of all ranks.
        state: as for `lead`.

    Returns:
        The checkpoint's folder.
    """
    place = party.each(lambda: None)[0]
    _write_pieces(party, state, Path(str(place)))
    return Path(str(party.each(lambda: None)[0]))


def _write_pieces(party: Party, state: dict[str, Any], place: Path) -> dict[str, list[Any]]:
    party.each(lambda: _refuse_unfit(state))
    party.each(lambda: _write(party, state, place))
    own = f"__{party.ranks.place.rank}_*"
    names = [own, ".metadata"] if party.ranks.is_main else [own]
    parts = party.each(lambda: {f.name: digest_of(f) for name in names for f in sorted(place.glob(name))})
    found = {name: known for part in parts for name, known in part.items()}
    party.each(lambda: _refuse_unseen(party, found, place))
    return found


def _write(party: Party, state: dict[str, Any], place: Path) -> None:
    """Write with DCP, and say which rank's disk it was where it does not."""
    import torch.distributed.checkpoint as dcp

    with explain_disk_errors(place):
        try:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(place), process_group=party.group)
        except dcp.CheckpointException as error:  # on all ranks, with what each of them has met
            failures = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
            own = failures.get(party.ranks.place.rank)
            if own is None:
                rank = min(failures)
                raise OtherRankError(f"{party.ranks.names[rank]}: {words_of(failures[rank])}") from error
            if isinstance(own, RuntimeError) and shutil.disk_usage(place).free < _bytes_of(state):
                raise OSError(28, "No space left on device") from error  # torch's writer has no word for it
            raise own from error


def _refuse_unfit(state: dict[str, Any]) -> None:
    """Refuse what may not be kept, or what could not be put together again."""
    for name, weight in state["model"].items():
        for key, tensor in {"": weight, **state["optimizer"].get(name, {})}.items():
            mine = local(tensor)
            label = f"{key} of {name}" if key else name
            if mine.is_floating_point() and not bool(mine.isfinite().all()):
                raise WorkError(f"{label} is not finite: the checkpoint was not kept", hint="the checkpoint before is")
            if mine is tensor and local(weight) is not weight and tensor.ndim:
                raise WorkError(
                    f"{label} is of this rank's shard alone: it could not be put together again",
                    hint="use an optimizer whose state has the shape of the weights (adamw), or no sharding",
                )


def _refuse_unseen(party: Party, found: dict[str, list[Any]], place: Path) -> None:
    """Refuse files of other machines that the main rank cannot see."""
    if not party.ranks.is_main:
        return
    unseen = sorted(
        n for n, (size, _) in found.items() if not (place / n).is_file() or (place / n).stat().st_size != size
    )
    if unseen:
        raise WorkError(
            f"{unseen[0]} was written by another rank and is not seen by {party.ranks.names[0]}",
            hint="every machine must see the same output_dir: name a folder on a shared file system",
        )


def load_pieces(shards: Shards, folder: Path, optimizer: torch.optim.Optimizer | None) -> None:
    """Read a sharded checkpoint into weights and optimizer; all ranks must call it.

    Args:
        shards: of this run, over any number of ranks; its weights are changed in place.
        folder: a verified checkpoint.
        optimizer: over `shards.trained`; None for the weights only.

    Raises:
        UserError: a weight is missing there or has another shape.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(folder / PIECES)
    metadata = reader.read_metadata()
    places = {tuple(path): metadata.state_dict_metadata[name] for name, path in (metadata.planner_data or {}).items()}
    weights = {name: tensor.detach() for name, tensor in _weights_of(shards, optimizer).items()}
    lacking = [n for n, w in weights.items() if getattr(places.get(("model", n)), "size", None) != w.shape]
    if lacking:
        raise UserError(
            f"{folder} does not fit this model: {lacking[0]} is missing or has another shape",
            hint="resume with the settings that it was made with",
            key="resume_from_checkpoint",
        )
    moments: dict[str, dict[str, Any]] = {}
    for path, kept in places.items() if optimizer is not None else ():
        if path[0] == "optimizer" and path[1] in weights:
            like, kind = weights[path[1]], kept.properties.dtype  # type: ignore[union-attr]
            same = kept.size == like.shape  # type: ignore[union-attr]
            empty = torch.zeros_like(like, dtype=kind) if same else torch.zeros(kept.size, dtype=kind)  # type: ignore[union-attr]
            moments.setdefault(path[1], {})[path[2]] = empty
    wanted: dict[str, Any] = {"model": weights} | ({"optimizer": moments} if moments else {})
    dcp.load(wanted, storage_reader=reader)
    if optimizer is None:
        return
    rest = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    names = {id(p): name for name, p in shards.trained.items()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state = {
        place: {key: local(value) for key, value in moments.get(name, {}).items()} | rest["values"].get(name, {})
        for place, name in enumerate(ordered)
        if name in moments or name in rest["values"]
    }
    optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})


def _weights_of(shards: Shards, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    import torch

    return shards.state(optimizer or torch.optim.SGD(list(shards.trained.values())))["model"]


def split_values(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Take out of an optimizer's state what is no tensor: DCP would keep it as code that runs when it is read.

    Args:
        state: as `Shards.state` gave it.

    Returns:
        The state with tensors only, and the other values by name and key.
    """
    tensors: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, entry in state["optimizer"].items():
        for key, value in entry.items():
            (tensors if hasattr(value, "is_floating_point") else values).setdefault(name, {})[key] = value
    return {"model": state["model"], "optimizer": tensors}, values


def local(tensor: Any) -> Any:
    """Return this rank's part of a sharded tensor; any other tensor is its own."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host, and wait until it is there: training goes on to change it."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")


def replace_tensors(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Rebuild nested dictionaries, lists and tuples with other tensors in the places of theirs."""
    if hasattr(value, "is_floating_point"):
        return make(value)
    if isinstance(value, dict):
        return {key: replace_tensors(item, make) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replace_tensors(item, make) for item in value)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """List the tensors in nested dictionaries, lists and tuples."""
    found: list[torch.Tensor] = []
    replace_tensors(value, lambda tensor: (found.append(tensor), tensor)[1])
    return found


def _bytes_of(state: dict[str, Any]) -> int:
    return sum(t.numel() * t.element_size() for t in map(local, tensors_of(state)))


def _raise(error: Exception) -> None:
    raise error
