"""Which part of each trained tensor DeepSpeed keeps on which rank, and the optimizer's state put together from parts.

ZeRO lays the trained tensors of a group end to end and cuts the line into one piece a rank (stages 1 and 2), or cuts
each tensor into one piece a rank and lays a rank's pieces end to end (stage 3). Either way a rank's optimizer holds
a few flat tensors. Optimizer states are saved as torch names them, by whole parameter, so that any number of ranks can
go on from them, also without DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Whole = dict[str, Any]  # as `torch.optim.Optimizer.state_dict` gives it


class Piece(NamedTuple):
    """A run of numbers of one trained tensor that lies on one rank.

    Attributes:
        name: of the parameter.
        begin: where it begins in the parameter, flattened.
        flat: number of the flat tensor that holds it.
        place: where it begins there.
        length: numbers in it; at least one.
    """

    name: str
    begin: int
    flat: int
    place: int
    length: int


class Parts:
    """How one run's trained tensors are cut.

    Attributes:
        flats: this rank's flat float32 tensors, which the optimizer updates.
        groups: number of the optimizer's group of each flat tensor.
        trained: the trained parameters by name.
        shapes: their shapes, also where the parameters themselves are empty.
    """

    flats: list[torch.Tensor]
    groups: list[int]
    trained: dict[str, torch.nn.Parameter]
    shapes: dict[str, torch.Size]

    def __init__(
        self, zero: Any, stage: int, trained: dict[str, torch.nn.Parameter], shapes: dict[str, torch.Size], world: int
    ) -> None:
        """Read the cuts from DeepSpeed's optimizer.

        Args:
            zero: DeepSpeed's optimizer, of stage 1, 2 or 3.
            stage: which.
            trained: the trained parameters by name.
            shapes: their shapes.
            world: number of ranks.
        """
        self._zero, self._stage = zero, stage
        self.trained, self.shapes = trained, shapes
        self._names = {id(parameter): name for name, parameter in trained.items()}
        if stage == 3:
            self.flats, self.groups = list(zero.fp32_partitioned_groups_flat), list(zero.sub_group_to_group_id.values())
        else:
            self.flats = list(zero.single_partition_of_fp32_groups)
            self.groups = list(range(len(self.flats)))
        self.of_rank = [self._cut(rank) for rank in range(world)]

    def _cut(self, rank: int) -> list[Piece]:
        """Return a rank's pieces, in the order in which its flat tensors hold them."""
        zero, pieces = self._zero, []
        for flat in range(len(self.flats)):
            if self._stage == 3:
                for parameter in zero.fp16_groups[flat]:
                    _, place, length = zero.grad_position[zero.get_param_id(parameter)]
                    left = self.shapes[self._names[id(parameter)]].numel() - rank * length
                    pieces.append(Piece(self._names[id(parameter)], rank * length, flat, place, min(length, left)))
                continue
            size = int(zero.partition_size[flat])
            line = zip(zero.round_robin_bit16_groups[flat], zero.round_robin_bit16_offsets[flat], strict=True)
            for parameter, offset in line:
                name = self._names[id(parameter)]
                first = max(offset, rank * size)
                last = min(offset + self.shapes[name].numel(), (rank + 1) * size)
                pieces.append(Piece(name, first - offset, flat, first - rank * size, last - first))
        return [piece for piece in pieces if piece.length > 0]

    def gradients(self, rank: int) -> list[tuple[str, torch.Tensor]]:
        """Return this rank's pieces of the gradient, after DeepSpeed has reduced it.

        Args:
            rank: this one.

        Returns:
            Name of the parameter, and the piece: a mean over ranks, with the loss scale.
        """
        zero = self._zero
        found: list[tuple[str, torch.Tensor]] = []
        if zero.offload_optimizer if self._stage == 3 else zero.cpu_offload:
            for piece in self.of_rank[rank]:
                found.append((piece.name, self.flats[piece.flat].grad.narrow(0, piece.place, piece.length)))  # type: ignore[union-attr]
            return found
        for flat in range(len(self.flats)):
            pieces = [piece for piece in self.of_rank[rank] if piece.flat == flat]
            reduced = [part for part in zero.averaged_gradients[flat] if not getattr(part, "_zero_padding", False)]
            for piece, part in zip(pieces, reduced, strict=False):  # padding follows
                found.append((piece.name, part.reshape(-1)[: piece.length]))
        return found

    def to_flat(self, whole: Whole, names: Sequence[Sequence[str]], rank: int) -> list[dict[str, Any]]:
        """Cut this rank's part out of an optimizer's whole state.

        Args:
            whole: by parameter.
            names: of the parameters in each group, in the order of their numbers.
            rank: this one.

        Returns:
            The state of each flat tensor; empty where there is none yet.
        """
        numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
        states: list[dict[str, Any]] = [{} for _ in self.flats]
        for piece in self.of_rank[rank]:
            flat, state = self.flats[piece.flat], states[piece.flat]
            for key, value in whole["state"].get(numbers[piece.name], {}).items():
                if not isinstance(value, torch.Tensor) or value.ndim == 0:
                    state[key] = value.to(flat.device, copy=True) if isinstance(value, torch.Tensor) else value
                    continue
                if key not in state:
                    state[key] = torch.zeros_like(flat)
                state[key].narrow(0, piece.place, piece.length).copy_(
                    value.reshape(-1).narrow(0, piece.begin, piece.length)
                )
        return states

    def to_whole(
        self, states: Sequence[Sequence[dict[str, Any]]], names: Sequence[Sequence[str]]
    ) -> dict[int, dict[str, Any]]:
        """Put the states of all ranks together.

        Args:
            states: of each rank, of each flat tensor.
            names: as for `to_flat`.

        Returns:
            The state of each parameter, by its number.
        """
        numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
        whole: dict[int, dict[str, Any]] = {}
        for pieces, flats in zip(self.of_rank, states, strict=True):
            for piece in pieces:
                state = whole.setdefault(numbers[piece.name], {})
                for key, value in flats[piece.flat].items():
                    if not isinstance(value, torch.Tensor) or value.ndim == 0:
                        # A tensor each: torch counts each parameter's steps in place.
                        state[key] = value.clone() if isinstance(value, torch.Tensor) else value
                        continue
                    shape = self.shapes[piece.name]
                    into = state.setdefault(key, torch.zeros(shape, dtype=value.dtype)).view(-1)
                    into.narrow(0, piece.begin, piece.length).copy_(value.narrow(0, piece.place, piece.length))
        return dict(sorted(whole.items()))

    @torch.no_grad()
    def take_weights(self, rank: int) -> None:
        """Copy this rank's part of the parameters into the flat tensors; for stages 1 and 2, where they are whole.

        Args:
            rank: this one.
        """
        for piece in self.of_rank[rank]:
            source = self.trained[piece.name].detach().reshape(-1).narrow(0, piece.begin, piece.length)
            self.flats[piece.flat].narrow(0, piece.place, piece.length).copy_(source)
