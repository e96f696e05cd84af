"""Before step 1: does this model, with its rows packed and its loss in chunks, compute what it computes alone?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from surefoot.data.batch import PackedBatch, pack
from surefoot.data.messages import Sample
from surefoot.model.forward import LossForward, base_of, logit_shape, trained_head
from surefoot.model.loss import LogitShape

PROBE_TOKENS = 24
# Largest difference of final hidden states that rounding explains, as a share of their largest value: two ways
# round differently at each of some hundred operations. A leak between rows differs by 0.1 and more.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class PackingVerdict:
    """What the probe found.

    Attributes:
        packs: True when rows packed together give what they give alone.
        difference: largest difference of the final hidden states, as a share of their largest value; None when
            the packed forward could not run at all.
        reason: why rows cannot be packed; empty when they can.
    """

    packs: bool
    difference: float | None
    reason: str


def build_forward(
    model: Any,
    autocast: torch.dtype | None,
    *,
    upcast: bool,
    label_smoothing: float,
    within: Callable[[Callable[[], Any]], Any] | None = None,
    device: str | None = None,
) -> LossForward:
    """Choose how a model's loss is computed.

    Args:
        model: the loaded model, wrapped by PEFT or not.
        autocast: dtype of matrix products, or None.
        upcast: make the logits in float32.
        label_smoothing: share of the target spread over the vocabulary.
        within: see `LossForward`.
        device: where the model runs; None for where its weights are.

    Returns:
        The forward; chunked when the head is a plain linear and the probe agrees.
    """
    base = base_of(model)
    shape = logit_shape(base.config.get_text_config())
    head = trained_head(base)
    plain = type(head) is torch.nn.Linear
    forward = LossForward(base, autocast, shape, plain, True, upcast, label_smoothing, within=within)
    if plain:
        where = torch.device(device) if device else next(base.parameters()).device
        forward.chunked = _head_agrees(forward, head, shape, where)
    return forward


@torch.no_grad()
def check_packing(
    forward: LossForward, own_attention: str, samples: Sequence[Sample], device: str | None = None
) -> PackingVerdict:
    """Compare two rows packed together with the same rows alone, through the model's own attention.

    Args:
        forward: of the loaded model, which is put back as it was.
        own_attention: the model's own attention implementation, by transformers' name.
        samples: training items to take two short rows from.
        device: where the model runs; None for where its weights are.

    Returns:
        The verdict.
    """
    base = forward.model
    where = torch.device(device) if device else next(base.parameters()).device
    rows = [_shortened(sample) for sample in samples[:2]]
    rows = rows if len(rows) == 2 else rows * 2
    was_training, name = base.training, base.config._attn_implementation
    base.eval()
    try:
        with forward.precision(where.type):
            packed_TM = forward.run(lambda: forward.hidden(pack(rows).to(where))).float()
            _set_attention(base, own_attention)
            decoder = base.get_decoder()
            ids = [_ids(row, where) for row in rows]
            alone = [
                forward.run(lambda ids_1L=ids_1L: decoder(input_ids=ids_1L, use_cache=False).last_hidden_state)
                for ids_1L in ids
            ]
    except NotImplementedError as error:
        return PackingVerdict(False, None, str(error))
    finally:
        _set_attention(base, name)
        base.train(was_training)
    alone_TM = torch.cat([hidden_1TM[0].float() for hidden_1TM in alone])
    if not alone_TM.isfinite().all():
        return PackingVerdict(True, None, "")  # nothing to compare: the guard names what is not finite
    difference = float((packed_TM - alone_TM).abs().max() / alone_TM.abs().max().clamp_min(1e-9))
    dtype = forward.autocast or next(base.parameters()).dtype
    if not difference <= TOLERANCE.get(dtype, 1e-3):
        return PackingVerdict(False, difference, "rows packed together differ from the same rows alone")
    return PackingVerdict(True, difference, "")


@torch.no_grad()
def _head_agrees(forward: LossForward, head: Any, shape: LogitShape, device: torch.device) -> bool:
    base = forward.model
    ids = np.arange(1, 1 + PROBE_TOKENS, dtype=np.int32) % base.config.get_text_config().vocab_size
    batch = pack([Sample(("probe",), ids, ids, (len(ids),))]).to(device)
    was_training = base.training
    base.eval()
    try:
        with forward.precision(device.type):
            own_KV = forward.run(lambda: forward.logits(batch)).float()
            ours_KV = forward.run(lambda: _by_head(forward, head, batch)).float() * shape.scale
    except (NotImplementedError, TypeError):  # a model without packed layout or logits_to_keep: see check_packing
        return False
    finally:
        base.train(was_training)
    if shape.softcap is not None:
        ours_KV = shape.softcap * torch.tanh(ours_KV / shape.softcap)
    dtype = forward.autocast or head.weight.dtype
    bound = TOLERANCE.get(dtype, 1e-3) * own_KV.abs().max().clamp_min(1e-9)
    return bool((own_KV - ours_KV).abs().max() <= bound)


def _by_head(forward: LossForward, head: Any, batch: PackedBatch) -> torch.Tensor:
    hidden_KM = forward.hidden(batch).index_select(0, batch.trained_K)
    return F.linear(hidden_KM.to(head.weight.dtype), head.weight, head.bias)


def _set_attention(base: Any, name: str) -> None:
    if base.config._attn_implementation != name:
        base.set_attn_implementation(name)


def _shortened(sample: Sample) -> Sample:
    length = min(PROBE_TOKENS, sample.segments[0])
    return Sample(sample.row_ids[:1], sample.input_ids[:length], sample.labels[:length], (length,))


def _ids(sample: Sample, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(sample.input_ids.astype(np.int64))[None].to(device)
