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


def watched(work: Callable[[], Any]) -> tuple[list[int], int]:
    """Bytes in the order in which memory is taken, negative where it is given back; and how many LoRA products ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    found, nodes = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.tag.name == "Allocation":
            found.append((node.start_time_ns, node.extra_fields.alloc_size))
    products = sum(event.count for event in profile.key_averages() if event.key == "surefoot::lora_linear")
    return [size for _, size in sorted(found, key=lambda pair: pair[0])], products


def prepared(
    family: str, how: str, weight: torch.dtype, autocast: torch.dtype | None, *, compiled: bool = False,
    choice: Choice = KEEP,
) -> tuple[Any, Callable[[], torch.Tensor], MemoryModel]:  # fmt: skip
    """A model, the loss of one pass, and the plan's figures for it."""
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
    return model, lambda: forward(batch).loss, MemoryModel(shapes, numerics, 0, 0, 0, LAYERS)


def said_held(memory: MemoryModel, choice: Choice) -> float:
    """Bytes that the formula says are kept between forward and backward pass."""
    tokens = ROWS * LENGTH
    held = memory.activation_bytes(tokens, choice, LENGTH) - tokens * memory._layer.working
    if choice.layers == LAYERS:  # a recomputed layer is alive in the backward pass only
        held -= (
            memory.activation_bytes(tokens, Choice(), LENGTH) / LAYERS
            - tokens * (memory._layer.working + end_bytes(memory.shapes, memory.how)) / LAYERS
        )
    elif choice.layers + choice.mlps == LAYERS:
        held -= tokens * memory._layer.mlp + memory._layer.mlp_casts
    return held


def measured_and_said(*setup: Any, choice: Choice = KEEP, **more: Any) -> tuple[float, float]:
    """Bytes a token that are kept in one pass, and what the formula says."""
    model, loss, memory = prepared(*setup, choice=choice, **more)
    return kept_bytes(model, loss) / (ROWS * LENGTH), said_held(memory, choice) / (ROWS * LENGTH)


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


@pytest.mark.parametrize("choice", [Choice(0, 4), Choice(4, 0)], ids=str)
def test_compiled_layers_free_what_is_recomputed(choice):
    """By the allocator's count: a compiled function's own notes pass by autograd's hooks."""
    _, loss, memory = prepared("llama", "lora", BF16, BF16, compiled=True, choice=choice)
    losses: list[torch.Tensor] = []
    held = sum(watched(lambda: losses.append(loss()))[0])
    assert said_held(memory, choice) == pytest.approx(held, rel=0.06)
    sizes, products = watched(lambda: losses[0].backward())
    peak, said = held + max(np.cumsum(sizes)), memory.activation_bytes(ROWS * LENGTH, choice, LENGTH)
    assert 0.75 * said < peak < said
    if choice.mlps:  # of a recomputed MLP the last product is not needed again: nothing in it asks for its own output
        assert products == 2 * choice.mlps
