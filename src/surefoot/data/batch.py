"""Samples laid end to end for one forward and backward pass, and how attention keeps them apart.

Legend of tensor suffixes: T tokens of the pass, N samples of a bucket, L longest sample of a bucket,
P padded slots of all buckets together, K tokens that carry loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from surefoot.data.messages import IGNORE_INDEX, Sample

# A bucket takes samples down to this share of its longest one: at worst 1/0.75 of its attention is padding,
# and lengths that fall off geometrically need few buckets.
BUCKET_SHARE = 0.75


@dataclass(frozen=True)
class AttentionLayout:
    """How the packed rows of a pass are gathered into right-padded batches for attention alone.

    Attributes:
        buckets: for each bucket the packed position of every slot, int64 [N, L]; a padding slot repeats the
            sample's last token, whose result nobody reads.
        slots_T: for each packed token its slot among all buckets' slots laid end to end, int64 [T].
        lengths: tokens of each attention span, in packed order.
    """

    buckets: tuple[torch.Tensor, ...]
    slots_T: torch.Tensor
    lengths: tuple[int, ...]


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
        """Real tokens in the pass."""
        return self.input_ids_1T.shape[1]

    def to(self, device: torch.device | str) -> PackedBatch:
        """Copy the tensors to a device."""
        layout = AttentionLayout(
            tuple(bucket.to(device) for bucket in self.layout.buckets),
            self.layout.slots_T.to(device),
            self.layout.lengths,
        )
        return PackedBatch(
            self.input_ids_1T.to(device),
            self.position_ids_1T.to(device),
            layout,
            self.trained_K.to(device),
            self.targets_K.to(device),
            self.row_ids,
        )


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


def pack(samples: Sequence[Sample]) -> PackedBatch:
    """Lay samples end to end.

    Args:
        samples: at least one; together they are one pass.

    Returns:
        The pass's tensors, on the CPU.
    """
    ids_T = np.concatenate([sample.input_ids for sample in samples]).astype(np.int64)
    targets_T = np.concatenate([next_token_targets(sample) for sample in samples]).astype(np.int64)
    positions_T = np.concatenate([np.arange(length) for sample in samples for length in sample.segments])
    spans = [span for sample in samples for span in attention_spans(sample)]
    trained_K = np.flatnonzero(targets_T != IGNORE_INDEX)
    return PackedBatch(
        torch.from_numpy(ids_T)[None],
        torch.from_numpy(positions_T)[None],
        lay_out(spans),
        torch.from_numpy(trained_K),
        torch.from_numpy(targets_T[trained_K]),
        tuple(row_id for sample in samples for row_id in sample.row_ids),
    )


def attention_spans(sample: Sample) -> tuple[int, ...]:
    """Return the lengths within which a sample's tokens see each other: its rows, or all of it when joined."""
    return (len(sample.input_ids),) if sample.joined else sample.segments


def lay_out(lengths: Sequence[int]) -> AttentionLayout:
    """Group rows of like length into buckets and number their slots.

    Args:
        lengths: tokens of each attention span, in packed order.

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
    buckets, used = [], 0
    for group in groups:
        longest = lengths[group[0]]
        steps_L = np.arange(longest)
        bucket_NL = np.stack([starts[i] + np.minimum(steps_L, lengths[i] - 1) for i in group])
        for place, i in enumerate(group):
            slots_T[starts[i] : starts[i] + lengths[i]] = used + place * longest + np.arange(lengths[i])
        used += bucket_NL.size
        buckets.append(torch.from_numpy(bucket_NL))
    return AttentionLayout(tuple(buckets), torch.from_numpy(slots_T), tuple(int(n) for n in lengths))
