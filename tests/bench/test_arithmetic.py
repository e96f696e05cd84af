"""Operations counted from matrices against those that torch counts while the same step runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import random_sample, tiny_llama
from surefoot.bench.arithmetic import Arithmetic, causal_pairs, count_step, matrices_of, window_of
from surefoot.data.batch import pack
from surefoot.model.attention import use_packed_attention
from surefoot.model.lora import fuse_lora
from surefoot.model.probes import build_forward

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def samples(lengths=(19, 33, 8)):
    rng = np.random.default_rng(0)
    return [random_sample(rng, length, row) for row, length in enumerate(lengths)]


def lora(model, targets):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))
    fuse_lora(model)
    return model


def freeze_all_but_last(model):
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    return model


def frozen_embeddings(model):
    model.model.embed_tokens.requires_grad_(False)
    return model


MODELS = {
    "lora": lambda model: lora(model, ALL),
    "lora on the last matrix": lambda model: lora(model, ["down_proj"]),
    "lora on values": lambda model: lora(model, ["v_proj", "o_proj"]),
    "full": lambda model: model,
    "full, embeddings frozen": frozen_embeddings,
    "last layer": freeze_all_but_last,
}


def counted(model, rows):
    """Ours, and torch's by kind of operator: products of two matrices, and the rest (attention)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    use_packed_attention(base)
    forward = build_forward(model, None, upcast=False, label_smoothing=0.0)
    # torch does not count products that add in place by itself.
    in_place = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        forward(pack(rows)).loss.backward()
    by_operator = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    products = sum(count for name, count in by_operator.items() if name in ("aten.mm", "aten.addmm", "aten.addmm_"))
    return count_step(forward, rows), products, sum(by_operator.values()) - products


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_products_are_those_that_torch_counts(kind, tied):
    model = MODELS[kind](tiny_llama(**SIZES, tie_word_embeddings=tied)).train()
    ours, products, _ = counted(model, samples())
    assert ours.total - ours.attention == pytest.approx(products, rel=0.01)
    assert (ours.frozen > 0) == (kind.startswith("l")) or kind == "full, embeddings frozen"


def test_attention_is_half_of_what_torch_counts_without_the_mask():
    model = lora(tiny_llama(**SIZES, attn_implementation="eager"), ALL).train()
    ours, products, attention = counted(model, samples([48, 48]))
    assert attention == pytest.approx(2 * ours.attention, rel=0.01)
    assert ours.total == pytest.approx(products + attention / 2, rel=0.01)


def test_the_whole_step_is_within_5_percent():
    rows = samples([12, 16, 9])
    ours, products, attention = counted(lora(tiny_llama(**SIZES), ALL).train(), rows)
    assert ours.total == pytest.approx(products + attention, rel=0.05)


def test_experts_count_for_the_tokens_that_they_get():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, head_dim=8,
    )  # fmt: skip
    layer = Qwen3MoeForCausalLM(config).model.layers[0]
    experts = [matrix for matrix in matrices_of(layer, config) if "experts" in matrix.name]
    assert sum(matrix.used for matrix in experts) == 2 * 3 * 32 * 16


def test_packed_weights_count_as_what_they_stand_for():
    layer = torch.nn.Module()
    layer.proj = torch.nn.Linear(64, 32, bias=False)
    layer.proj.weight = torch.nn.Parameter(torch.zeros(1024, 1, dtype=torch.uint8), requires_grad=False)
    (matrix,) = matrices_of(layer, tiny_llama().config)
    assert (matrix.inputs, matrix.outputs, matrix.used) == (64, 32, 2048)


def test_a_window_bounds_the_pairs():
    rows = samples([100])
    assert causal_pairs(rows, None) == causal_pairs(rows, 1000) == 5000
    exact = sum(min(place + 1, 10) for place in range(100))
    assert causal_pairs(rows, 10) == pytest.approx(exact, rel=0.01)


def test_windows_are_read_layer_by_layer():
    from transformers import Gemma2Config, LlamaConfig, MistralConfig

    gemma = Gemma2Config(num_hidden_layers=2, sliding_window=16)
    assert [window_of(gemma, place) for place in range(2)] == [16, None]
    assert window_of(LlamaConfig(), 0) is None
    assert window_of(MistralConfig(sliding_window=8), 0) == 8


def test_the_ceiling_takes_each_rate_for_its_own_part():
    work = Arithmetic(frozen=8e12, trained=1e12, attention=2e12, head=1e12)
    assert work.least_seconds(tflops=2.0, frozen_tflops=4.0) == 8 / 4 + 4 / 2
    assert (work + work).total == 24e12
