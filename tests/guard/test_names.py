from __future__ import annotations

import pytest
import torch
from guard_scenes import make_scene, tiny

from surefoot.guard.names import clean, leaf_name, module_names, owner_name

PEFT = "base_model.model."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp", "model.layers.3.mlp"),
        (PEFT + "model.layers.3.self_attn.v_proj.base_layer.weight", "model.layers.3.self_attn.v_proj.weight"),
        (PEFT + "model.layers.2.self_attn.q_proj.lora_A.default", "model.layers.2.self_attn.q_proj"),
        (PEFT + "model.layers.2.self_attn.q_proj.lora_A.default.weight", "model.layers.2.self_attn.q_proj"),
        (PEFT + "model.layers.2.self_attn.q_proj.lora_magnitude_vector.default", "model.layers.2.self_attn.q_proj"),
        (PEFT + "model.embed_tokens.lora_embedding_A.default", "model.embed_tokens"),
        (PEFT + "lm_head.modules_to_save.default.weight", "lm_head.weight"),
        (PEFT + "lm_head.original_module.weight", "lm_head.weight"),
        ("base_model", ""), ("base_model.model", ""), ("", ""), ("base_model.model.model", "model"),
        ("module.base_model.model.lm_head", "lm_head"), ("module.model.norm", "model.norm"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
    ],
)  # fmt: skip
def test_clean(name, expected):
    assert clean(name) == expected


def test_leaves_keep_what_tells_an_adapters_weights_apart():
    name = PEFT + "model.layers.2.mlp.up_proj.lora_B.default.weight"
    assert leaf_name(name) == "model.layers.2.mlp.up_proj.lora_B.weight"
    assert owner_name(name) == "model.layers.2.mlp.up_proj"
    assert leaf_name(PEFT + "model.norm.weight") == "model.norm.weight"
    assert owner_name("model.norm.weight") == "model.norm"
    assert owner_name(PEFT + "model.embed_tokens.lora_embedding_A.default") == "model.embed_tokens"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "mixtral"])
def test_names_under_peft_are_those_of_the_model_without_it(family):
    plain = tiny(family)
    wrapped = make_scene(family, dtype=torch.float32).model
    assert set(module_names(wrapped).values()) == {name for name, _ in plain.named_modules()}
    adapted = {clean(name) for name, _ in wrapped.named_parameters() if "lora_" not in name}
    assert adapted == {name for name, _ in plain.named_parameters()}
