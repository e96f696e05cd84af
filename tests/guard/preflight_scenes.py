"""Steps of tiny models, for tests of what is looked at before step 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from helpers import VOCABULARY, random_sample
from surefoot.data.messages import Sample
from surefoot.guard.scene import Scene
from surefoot.model.attention import use_packed_attention
from surefoot.model.lora import fuse_lora
from surefoot.model.probes import build_forward
from surefoot.model.randomness import get_random_state

SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.08,
}  # fmt: skip


def tiny(kind: str = "qwen2", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of one of transformers' architectures."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | changes)))
    return model.to(dtype)


def with_lora(model: Any, **changes: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    experts = any("experts" in name for name, _ in model.named_modules())
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if experts else "all-linear"  # experts take no dropout
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": targets, "task_type": "CAUSAL_LM"}
    wrapped = get_peft_model(model, LoraConfig(**(settings | changes)))
    fuse_lora(wrapped)
    return wrapped


def rows(count: int = 4, seed: int = 0, longest: int = 30) -> tuple[Sample, ...]:
    rng = np.random.default_rng(seed)
    return tuple(random_sample(rng, int(rng.integers(8, longest)), i) for i in range(count))


def scene_of(
    model: Any,
    samples: tuple[Sample, ...] | None = None,
    *,
    autocast: torch.dtype | None = None,
    packs: bool = True,
    loss_scale: float = 1.0,
) -> Scene:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if packs:
        use_packed_attention(base)
    base.config.use_cache = False
    model.train()
    forward = build_forward(model, autocast, upcast=False, label_smoothing=0.0)
    forward.packs = packs
    tokens = 10_000 if packs else 1
    return Scene(model, forward, "cpu", 1, samples or rows(), tokens, loss_scale, get_random_state("cpu"))


def state_of(model: Any) -> dict[str, Any]:
    """Everything that a check must leave as it was."""
    return {
        "tensors": {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "identities": {n: id(p) for n, p in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "gradients": [n for n, p in model.named_parameters() if p.grad is not None],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = one["tensors"].keys() == other["tensors"].keys() and all(
        t.dtype == other["tensors"][n].dtype and torch.equal(t.view(torch.uint8), other["tensors"][n].view(torch.uint8))
        if t.ndim and t.element_size() > 1
        else torch.equal(t, other["tensors"][n])
        for n, t in one["tensors"].items()
    )
    rest = all(one[key] == other[key] for key in ("identities", "modes", "gradients", "hooks"))
    return tensors and rest and torch.equal(one["random"], other["random"])
