"""Scenes of tiny models, as a run would leave them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from helpers import VOCABULARY, random_sample
from surefoot.data.batch import PackedBatch
from surefoot.guard.scene import Scene
from surefoot.model.attention import use_packed_attention
from surefoot.model.forward import base_of
from surefoot.model.load import store_frozen_linears
from surefoot.model.lora import fuse_lora
from surefoot.model.loss import LossSums
from surefoot.model.probes import build_forward
from surefoot.model.randomness import get_random_state

FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    ),
}  # fmt: skip


def tiny(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of four layers, width 32."""
    import transformers

    config_name, model_name, own = FAMILIES[family]
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**(settings | own | changes))
    return getattr(transformers, model_name)(config)


def make_scene(
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float16,
    attention: str = "eager",
    lora: str = "fused",
    rows: int = 3,
    recompute: bool = False,
    loss_scale: float | None = None,
    chunked: bool | None = None,
    tokens_per_pass: int = 1000,
    stream: torch.dtype | None = None,
    adapter: dict[str, Any] | None = None,
    **changes: Any,
) -> Scene:
    """A step of a tiny model under autocast (none for float32): frozen base and LoRA, or all weights trained.

    `stream` is the dtype that the whole base is held in, so that its residual stream is too; `adapter` are settings of
    the LoRA.
    """
    model = tiny(family, attn_implementation=attention, **changes)
    if stream is not None:
        model = model.to(stream)
    if lora != "none":
        from peft import LoraConfig, get_peft_model

        linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        if family in ("mixtral", "qwen3_moe"):
            linears = linears[:4]
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=linears, init_lora_weights=False, **(adapter or {}))
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float() * 0.1
    autocast = None if dtype == torch.float32 else dtype
    if autocast is not None:
        store_frozen_linears(model, autocast)
    if lora == "fused":
        fuse_lora(model)
    base = base_of(model)
    use_packed_attention(base)
    base.config.use_cache = False
    if recompute:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        if lora == "none":
            assert all(p.requires_grad for p in model.parameters())
        else:
            base.enable_input_require_grads()
    forward = build_forward(model, autocast, upcast=False, label_smoothing=0.0)
    model.train()
    if chunked is not None:
        forward.chunked = chunked
    rng = np.random.default_rng(0)
    lengths = [12, 12, 7, 20, 5, 9, 16][:rows]
    samples = tuple(random_sample(rng, length, i) for i, length in enumerate(lengths))
    scale = loss_scale if loss_scale is not None else 1024.0 if dtype == torch.float16 else 1.0
    torch.manual_seed(1)
    return Scene(model, forward, "cpu", 1, samples, tokens_per_pass, scale, get_random_state("cpu"))


class Wrapped:
    """A forward whose loss is changed, given the final hidden states of the trained tokens."""

    def __init__(self, forward: Any, change: Any) -> None:
        self._forward, self._change = forward, change
        self.model, self.round_to = forward.model, forward.round_to
        self._kept: list[torch.Tensor] = []

    @staticmethod
    def around(scene: Scene, change: Any) -> Scene:
        return replace(scene, forward=Wrapped(scene.forward, change))

    def __call__(self, batch: PackedBatch) -> LossSums:
        hidden = self._forward.hidden

        def keep(batch: PackedBatch) -> torch.Tensor:
            self._kept.append(hidden(batch))
            return self._kept[-1]

        self._forward.hidden = keep
        try:
            sums = self._forward(batch)
        finally:
            del self._forward.hidden
        return replace(sums, loss=self._change(sums.loss, self._kept.pop()))
