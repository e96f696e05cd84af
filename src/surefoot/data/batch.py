"""Samples laid end to end for one forward and backward pass, and how attention keeps them apart.

Legend of tensor suffixes: T tokens of the pass, N samples of a bucket, L longest sample of a bucket,
P padded slots of all buckets together, K tokens that carry loss.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from surefoot.data.messages import IGNORE_INDEX, Sample

# A bucket takes samples down to this share of its longest one: at worst 1/0.75 of its attention is padding,
# and lengths that fall off geometrically need few buckets.
BUCKET_SHARE = 0.75


@dataclass(frozen=True)
class AttentionLayout:
    """How the packed rows of a pass are gathered into right-padded batches for attention alone.

    The numbers lie in two tensors, so that one copy sends them to a device and a compiled layer can hand them on.

    Attributes:
        index_S: the packed position of every slot of every bucket, then for each packed token its slot among all
            of them, int64 [slots + tokens]. A padding slot repeats its row's last token; nobody reads its result.
        shapes_2B: rows and slots a row of each bucket, one after the other, int64 [2 · buckets], always on the CPU.
        bounds_N: where each attention span begins in packed order, and where the last one ends, int32 [spans + 1].
        lengths: tokens of each attention span, in packed order; padding tokens are the last span.
        padding: tokens at the end of the pass that stand for nothing; nobody reads what attention gives for them.
    """

    index_S: torch.Tensor
    shapes_2B: torch.Tensor
    bounds_N: torch.Tensor
    lengths: tuple[int, ...]
    padding: int = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All that a compiled layer needs of the layout."""
        return self.index_S, self.shapes_2B, self.bounds_N

    @cached_property
    def parts(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """The buckets and the slots, as `split_index` gives them."""
        return split_index(self.index_S, self.shapes_2B)

    @property
    def buckets(self) -> tuple[torch.Tensor, ...]:
        """For each bucket the packed position of every slot, int64 [N, L]."""
        return self.parts[0]

    @property
    def slots_T(self) -> torch.Tensor:  # noqa: N802
        """For each packed token but padding its slot among all buckets' slots laid end to end, int64 [T]."""
        return self.parts[1]


def split_index(index_S: torch.Tensor, shapes_2B: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Take a layout's index apart.

    Args:
        index_S: `AttentionLayout.index_S`.
        shapes_2B: `AttentionLayout.shapes_2B`.

    Returns:
        The buckets, int64 [N, L] each, and the slots of the packed tokens, int64 [T]; views all of them.
    """
    numbers = shapes_2B.tolist()
    shapes = list(zip(numbers[::2], numbers[1::2], strict=True))
    slots = sum(rows * length for rows, length in shapes)
    *parts, slots_T = index_S.split([*(rows * length for rows, length in shapes), index_S.shape[0] - slots])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True)), slots_T


@dataclass(frozen=True)
class PackedBatch:
    """The tensors of one pass.

    Attributes:
        input_ids_1T: token ids, int64 [1, tokens].
        position_ids_1T: place of each token in its own row, int64 [1, tokens].
        layout: how attention keeps the rows apart.
        trained_K: packed positions whose next token carries loss, int64 [trained tokens].
        targets_K: the token that each of them must predict, int64 [trained tokens].
        row_ids: the rows in it, in packed order.
    """

    input_ids_1T: torch.Tensor
    position_ids_1T: torch.Tensor
    layout: AttentionLayout
    trained_K: torch.Tensor
    targets_K: torch.Tensor
    row_ids: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens in the pass, padding included."""
        return self.input_ids_1T.shape[1]

    def to(self, device: torch.device | str) -> PackedBatch:
        """Copy the tensors to a device, without waiting for a GPU."""
        device = torch.device(device)

        def send(tensor: torch.Tensor) -> torch.Tensor:
            if device.type != "cuda":
                return tensor.to(device)
            # Pinned, or the copy would wait until the GPU has done all work before it.
            return tensor.pin_memory().to(device, non_blocking=True)

        layout = replace(self.layout, index_S=send(self.layout.index_S), bounds_N=send(self.layout.bounds_N))
        return PackedBatch(
            send(self.input_ids_1T), send(self.position_ids_1T), layout, send(self.trained_K), send(self.targets_K),
            self.row_ids,
        )  # fmt: skip


def next_token_targets(sample: Sample) -> np.ndarray:
    """Shift labels so that position t holds what it must predict; the last token of a row predicts nothing.

    Args:
        sample: one training item, of one row or several.

    Returns:
        Token ids, int32 [tokens], with -100 where nothing is trained.
    """
    targets = np.full(len(sample.labels), IGNORE_INDEX, dtype=np.int32)
    targets[:-1] = sample.labels[1:]
    targets[np.cumsum(sample.segments) - 1] = IGNORE_INDEX
    return targets


def count_trained(samples: Sequence[Sample]) -> int:
    """Count the tokens that carry loss in a group of samples."""
    return int(sum(np.count_nonzero(next_token_targets(sample) != IGNORE_INDEX) for sample in samples))


def digest(samples: Sequence[Sample]) -> int:
    """Return a CRC-32 of the token ids of a step's samples, to recognise the step by."""
    return zlib.crc32(b"".join(np.ascontiguousarray(sample.input_ids, dtype="<i4").tobytes() for sample in samples))


def split_into_passes(samples: Sequence[Sample], tokens_per_pass: int) -> list[list[Sample]]:
    """Spread a step's samples over as few passes as the token limit allows (first fit, longest first).

    Args:
        samples: the samples of one optimizer step.
        tokens_per_pass: most tokens that a pass should hold; a longer sample gets a pass of its own.

    Returns:
        The passes; within one, samples keep the step's order.
    """
    longest_first = sorted(range(len(samples)), key=lambda i: (-len(samples[i].input_ids), i))
    passes: list[list[int]] = []
    room: list[int] = []
    for index in longest_first:
        size = len(samples[index].input_ids)
        place = next((p for p, left in enumerate(room) if left >= size), None)
        if place is None:
            passes.append([index])
            room.append(tokens_per_pass - size)
        else:
            passes[place].append(index)
            room[place] -= size
    return [[samples[i] for i in sorted(members)] for members in passes]


def pack(samples: Sequence[Sample], round_to: int = 1) -> PackedBatch:
    """Lay samples end to end.

    Args:
        samples: at least one; together they are one pass.
        round_to: fill the pass up with padding tokens to a multiple of this, so that compiled layers see few sizes.
            Padding carries no loss and no row sees it.

    Returns:
        The pass's tensors, on the CPU.
    """
    ids_T = np.concatenate([sample.input_ids for sample in samples]).astype(np.int64)
    targets_T = np.concatenate([next_token_targets(sample) for sample in samples]).astype(np.int64)
    positions_T = np.concatenate([np.arange(length) for sample in samples for length in sample.segments])
    spans = [span for sample in samples for span in attention_spans(sample)]
    trained_K = np.flatnonzero(targets_T != IGNORE_INDEX)
    padding = -len(ids_T) % round_to
    ids_T = np.pad(ids_T, (0, padding))
    # Not 0, which is where a row starts, and within any model's reach.
    positions_T = np.pad(positions_T, (0, padding), constant_values=1)
    return PackedBatch(
        torch.from_numpy(ids_T)[None],
        torch.from_numpy(positions_T)[None],
        lay_out(spans, padding),
        torch.from_numpy(trained_K),
        torch.from_numpy(targets_T[trained_K]),
        tuple(row_id for sample in samples for row_id in sample.row_ids),
    )


def attention_spans(sample: Sample) -> tuple[int, ...]:
    """Return the lengths within which a sample's tokens see each other: its rows, or all of it when joined."""
    return (len(sample.input_ids),) if sample.joined else sample.segments


def lay_out(lengths: Sequence[int], padding: int = 0) -> AttentionLayout:
    """Group rows of like length into buckets and number their slots.

    Args:
        lengths: tokens of each attention span, in packed order.
        padding: tokens behind them that take no part in attention.

    Returns:
        The layout, with its tensors on the CPU.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for index in order:
        if groups and lengths[index] >= BUCKET_SHARE * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    slots_T = np.empty(int(sum(lengths)), dtype=np.int64)
    index, shapes, used = [], [], 0
    for group in groups:
        longest = lengths[group[0]]
        steps_L = np.arange(longest)
        bucket_NL = np.stack([starts[i] + np.minimum(steps_L, lengths[i] - 1) for i in group])
        for place, i in enumerate(group):
            slots_T[starts[i] : starts[i] + lengths[i]] = used + place * longest + np.arange(lengths[i])
        used += bucket_NL.size
        index.append(bucket_NL.ravel())
        shapes += bucket_NL.shape
    spans = tuple(int(n) for n in lengths) + ((padding,) if padding else ())
    index_S = torch.from_numpy(np.concatenate([*index, slots_T]))
    bounds_N = torch.from_numpy(np.cumsum([0, *spans], dtype=np.int32))
    return AttentionLayout(index_S, torch.tensor(shapes), bounds_N, spans, padding)
