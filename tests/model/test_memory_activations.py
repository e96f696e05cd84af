"""What the formulas say that autograd keeps, against what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from helpers import random_sample
from surefoot.data.batch import pack
from surefoot.model.activations import Numerics, end_bytes
from surefoot.model.memory import Choice, MemoryModel
from surefoot.model.recompute import recompute
from surefoot.model.shapes import read_shapes
from variant_models import adapted, tiny

BF16, FP32 = torch.bfloat16, torch.float32
KEEP = Choice()
LAYERS, ROWS, LENGTH = 4, 2, 200  # above the length up to which a CPU writes attention out
WIDE = {
    "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24,
    "num_hidden_layers": LAYERS, "max_position_embeddings": 4096, "moe_intermediate_size": 352,
    "num_experts_per_tok": 2, "query_pre_attn_scalar": 24, "sliding_window": 4096,
}  # fmt: skip


def kept_bytes(model: Any, loss: Callable[[], torch.Tensor]) -> int:
    """Bytes of all storages that are saved for the backward pass, parameters and buffers left out."""
    known = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            kept.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def measured_and_said(
    family: str, how: str, weight: torch.dtype, autocast: torch.dtype | None, *, compiled: bool = False,
    choice: Choice = KEEP,
) -> tuple[float, float]:  # fmt: skip
    """Bytes a token that are kept in one pass, and what the formula says."""
    model, forward = adapted(tiny(family, weight, **WIDE), how, FP32, autocast)
    recompute(model, choice)
    rng = np.random.default_rng(0)
    batch = pack([random_sample(rng, LENGTH, row) for row in range(ROWS)])
    if compiled:
        from surefoot.model.compiled import compile_layers

        torch._dynamo.reset()
        said: list[str] = []
        compile_layers(model, tell=said.append, backend="aot_eager")
        forward(batch).loss.backward()
        model.zero_grad(set_to_none=True)
        assert not any("uncompiled" in sentence for sentence in said)
    shapes = read_shapes(forward.model.config.to_dict())
    whole = how == "full"
    numerics = Numerics(
        compute=(autocast or weight).itemsize, stream=weight.itemsize, weight=weight.itemsize, whole=whole,
        adapted=frozenset() if whole else frozenset(x.name for x in shapes.linears), rank=0 if whole else 3,
        dropout=how == "dropout", compiled=compiled, cpu=True,
    )  # fmt: skip
    tokens, memory = ROWS * LENGTH, MemoryModel(shapes, numerics, 0, 0, 0, LAYERS)
    held = memory.activation_bytes(tokens, choice, LENGTH) - tokens * memory._layer.working
    if choice.layers == LAYERS:  # a recomputed layer is alive in the backward pass only
        held -= (
            memory.activation_bytes(tokens, Choice(), LENGTH) / LAYERS
            - tokens * (memory._layer.working + end_bytes(shapes, numerics)) / LAYERS
        )
    elif choice.layers + choice.mlps == LAYERS:
        held -= tokens * memory._layer.mlp + memory._layer.mlp_casts
    return kept_bytes(model, lambda: forward(batch).loss) / tokens, held / tokens


@pytest.mark.parametrize(
    ("family", "how", "weight", "autocast"),
    [("llama", "lora", BF16, BF16), ("llama", "full", FP32, BF16), ("qwen3", "lora", FP32, BF16),
     ("qwen3", "full", FP32, None), ("gemma2", "lora", BF16, BF16), ("gemma2", "dropout", FP32, None),
     ("mixtral", "lora", BF16, BF16), ("mixtral", "full", FP32, BF16), ("llama", "dropout", BF16, BF16)],
)  # fmt: skip
def test_eager_layers_keep_what_is_planned(family, how, weight, autocast):
    measured, said = measured_and_said(family, how, weight, autocast)
    assert said == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("family", "how", "weight", "autocast"),
    [("llama", "lora", BF16, BF16), ("llama", "full", FP32, BF16), ("gemma2", "lora", FP32, BF16)],
)  # fmt: skip
def test_compiled_layers_keep_what_is_planned(family, how, weight, autocast):
    measured, said = measured_and_said(family, how, weight, autocast, compiled=True)
    assert said == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("choice", [Choice(2, 0), Choice(1, 3), Choice(4, 0)], ids=str)
@pytest.mark.parametrize("how", ["lora", "full"])
def test_recomputed_parts_keep_what_is_planned(choice, how):
    weight = BF16 if how == "lora" else FP32
    measured, said = measured_and_said("llama", how, weight, BF16, choice=choice)
    assert said == pytest.approx(measured, rel=0.1)


def test_compiled_layers_whose_mlp_is_recomputed_keep_what_is_planned():
    measured, said = measured_and_said("llama", "lora", BF16, BF16, compiled=True, choice=Choice(0, 3))
    assert said == pytest.approx(measured, rel=0.1)
