"""Tiny models of several families, adapted in several ways, held as a run would hold them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from helpers import VOCABULARY, random_sample
from surefoot.data.batch import count_trained, pack
from surefoot.model.attention import use_packed_attention
from surefoot.model.load import store_frozen_linears
from surefoot.model.probes import build_forward

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **EXPERTS}),
    "qwen3moe": ("Qwen3Moe", {"num_experts": 4, "head_dim": 8, **EXPERTS}),
    "neox": ("GPTNeoX", {}),
}
ADAPTERS = {"lora": {}, "dropout": {"lora_dropout": 0.2}, "dora": {"use_dora": True}}


def tiny(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose weights, all of them, are numbers of `dtype`; buffers as loading leaves them."""
    import transformers

    kind, settings = FAMILIES[family]
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3Text" else f"{kind}Config")
    causal = "Gemma3ForCausalLM" if kind == "Gemma3Text" else f"{kind}ForCausalLM"
    torch.manual_seed(0)
    # num_key_value_heads means nothing to GPT-NeoX, which takes it as an unknown key.
    model = getattr(transformers, causal)(config(**(SMALL | settings | changes)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Larger than initial weights, so that rounding to 16 bits is well above float32's own.
            p.copy_(
                torch.randn_like(p) * (0.5 if p.ndim == 1 else 0.25) + (0.0 if "bias" in name or p.ndim > 1 else 1.0)
            )
            p.data = p.data.to(dtype)
    return model


def adapted(
    model: Any, how: str, trainable: torch.dtype = torch.float32, autocast: torch.dtype | None = None
) -> tuple[Any, Any]:
    """The model with its trainables, and its forward, put together as `load_model` and `assemble` do."""
    from surefoot.model.lora import fuse_lora

    if how in ADAPTERS:
        from peft import LoraConfig, get_peft_model

        names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        config = LoraConfig(
            r=3, lora_alpha=6, target_modules=sorted(names - {"lm_head", "embed_out"}), init_lora_weights=how == "dora",
            **ADAPTERS[how],
        )  # fmt: skip
        torch.manual_seed(1)
        model = get_peft_model(model, config)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(trainable)
    if autocast is not None:
        store_frozen_linears(model, autocast)
    if how in ADAPTERS:
        fuse_lora(model)
    base = model.get_base_model() if how in ADAPTERS else model
    use_packed_attention(base)
    base.config.use_cache = False
    model.train()
    return model, build_forward(model, autocast, upcast=False, label_smoothing=0.0)


def rows(seed: int = 0, lengths: tuple[int, ...] = (13, 7, 20)) -> Any:
    """Several rows packed into one pass."""
    rng = np.random.default_rng(seed)
    samples = [random_sample(rng, n, i) for i, n in enumerate(lengths)]
    return pack(samples), count_trained(samples)


def step(model: Any, forward: Any, scale: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and unscaled gradients of one pass, the same random numbers every time."""
    batch, trained = rows(seed)
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    loss = forward(batch).loss / trained
    (loss * scale).backward()
    grads = {n: p.grad.float() / scale for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """A copy of the model with its parameters cast, their ties kept."""
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.data = p.data.to(dtype)
    return other


def fingerprint(model: Any, forward: Any) -> list[Any]:
    """Everything of a model that a change could leave behind: modules' attributes, parameters' identity and bytes."""
    facts: list[Any] = [dict(vars(forward))]
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, bool, type(None)))}
        facts.append((name, type(module), sorted(vars(module)), plain, module._compiled_call_impl))
        facts += [(key, id(p), None if p is None else p.dtype) for key, p in module._parameters.items()]
        facts += [(key, id(b)) for key, b in module._buffers.items()]
    facts += [p.detach().clone().view(torch.uint8).flatten().tolist() for p in model.parameters()]
    config = getattr(model, "config", None)
    return [*facts, config.to_dict(), config._attn_implementation]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], bound: float) -> None:
    """Each gradient within `bound` of the other, as a share of its norm."""
    assert left.keys() == right.keys() and left
    for name, grad in right.items():
        assert (left[name] - grad).norm() <= bound * grad.norm() + 1e-12, name
