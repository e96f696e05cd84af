"""The sizes of a model that its memory depends on, read from its configuration: no weight is loaded, nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# By transformers' `model_type`, where the configuration's keys do not say it.
TIED = frozenset({"gemma", "gemma2", "gemma3_text", "gpt2", "cohere", "cohere2"})  # the head is the embedding
NORMS = {"gemma2": 4, "gemma3_text": 4, "glm4": 4, "phi": 1, "cohere": 1, "cohere2": 1}  # of a layer; others have 2
HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3"})  # queries and keys are normed
UNGATED = frozenset({"gpt2", "gpt_neox", "phi", "falcon", "opt", "starcoder2", "bloom"})  # two products in the MLP
# Projections that others have one by one, under the name that they have there.
JOINED: dict[str, dict[str, tuple[str, ...]]] = {
    "phi3": {"qkv_proj": ("q", "k", "v"), "o_proj": ("o",), "gate_up_proj": ("gate", "up"), "down_proj": ("down",)},
    "gpt_neox": {"query_key_value": ("q", "k", "v"), "dense": ("o",), "dense_h_to_4h": ("up",),
                 "dense_4h_to_h": ("down",)},
    "gpt2": {"c_attn": ("q", "k", "v"), "c_proj": ("o", "down"), "c_fc": ("up",)},
}  # fmt: skip
OTHER_KEYS = {  # older models' words
    "hidden_size": ("n_embd", "d_model"), "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim"), "num_key_value_heads": ("num_kv_heads",),
}  # fmt: skip


@dataclass(frozen=True)
class Linear:
    """A linear of a decoder layer.

    Attributes:
        name: last part of its name in the model.
        inputs: its width.
        outputs: its height.
        in_mlp: whether it belongs to the MLP rather than to the attention.
    """

    name: str
    inputs: int
    outputs: int
    in_mlp: bool


@dataclass(frozen=True)
class Shapes:
    """The sizes of a decoder.

    Attributes:
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        queries: width of all query heads together.
        keys: width of all key heads together; the values' as well.
        feed_forward: width of the MLP; with experts, of all that a token goes through.
        gated: whether the MLP multiplies by a gate.
        experts: experts of a layer; 0 for a plain MLP.
        experts_per_token: of them, those that a token goes through; 1 for a plain MLP.
        expert_parameters: numbers in a layer's experts, router and shared expert.
        norms: of a layer, on the residual stream.
        head_norms: whether queries and keys are normed.
        softcap: whether scores are soft-capped, so that attention is written out.
        vocabulary: rows of the head.
        tied: whether the head is the embedding.
        linears: of a decoder layer; experts are none.
    """

    layers: int
    hidden: int
    heads: int
    queries: int
    keys: int
    feed_forward: int
    gated: bool
    experts: int
    experts_per_token: int
    expert_parameters: int
    norms: int
    head_norms: bool
    softcap: bool
    vocabulary: int
    tied: bool
    linears: tuple[Linear, ...]

    @property
    def layer_linears(self) -> int:
        """Numbers in a layer's linears, experts included."""
        return self.expert_parameters + sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def mlp_share(self) -> float:
        """The MLP's part of the arithmetic of a layer's products."""
        experts = self.expert_parameters * self.experts_per_token / max(1, self.experts)
        mlp = experts + sum(linear.inputs * linear.outputs for linear in self.linears if linear.in_mlp)
        return mlp / (mlp + sum(linear.inputs * linear.outputs for linear in self.linears if not linear.in_mlp))

    @property
    def embeddings(self) -> int:
        """Numbers in the embedding and, if it is not the same, the head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Numbers in the model; biases are left out, which are less than a thousandth."""
        head_norms = (self.queries + self.keys) // self.heads if self.head_norms else 0
        norms = self.layers * (self.norms * self.hidden + head_norms) + self.hidden
        return self.embeddings + self.layers * self.layer_linears + norms


def read_shapes(config: Mapping[str, Any]) -> Shapes:
    """Read a model's sizes.

    Args:
        config: what its config.json holds, or `to_dict()` of transformers' configuration. Models of several kinds of
            input keep that of their text model under "text_config".

    Returns:
        The sizes. A kind of model that is not known here is taken to be built as Llama is.

    Raises:
        KeyError: a size is missing.
    """
    config = config.get("text_config") or config
    kind = str(config.get("model_type", ""))
    hidden, heads = int(_get(config, "hidden_size")), int(_get(config, "num_attention_heads"))
    width = int(config.get("head_dim") or hidden // heads)
    keys = width * int(_get(config, "num_key_value_heads", heads) or heads)
    count = int(config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0)
    per_token = int(config.get("num_experts_per_tok") or 1) if count else 1
    inner = _get(config, "intermediate_size", 4 * hidden) or 4 * hidden
    inner = int(config.get("moe_intermediate_size") or inner) if count else int(inner)
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    if config.get("n_shared_experts"):
        shared = inner * int(config["n_shared_experts"])
    gated = kind not in UNGATED
    sizes = {"q": (hidden, heads * width), "k": (hidden, keys), "v": (hidden, keys), "o": (heads * width, hidden)}
    if not count:
        sizes |= ({"gate": (hidden, inner)} if gated else {}) | {"up": (hidden, inner), "down": (inner, hidden)}
    return Shapes(
        layers=int(_get(config, "num_hidden_layers")),
        hidden=hidden,
        heads=heads,
        queries=heads * width,
        keys=keys,
        feed_forward=inner * per_token + shared,
        gated=gated,
        experts=count,
        experts_per_token=per_token,
        expert_parameters=(3 * hidden * (inner * count + shared) + hidden * count) if count else 0,
        norms=NORMS.get(kind, 2),
        head_norms=kind in HEAD_NORMS,
        softcap=bool(config.get("attn_logit_softcapping")),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", kind in TIED)),
        linears=_linears(sizes, JOINED.get(kind)),
    )


def _get(config: Mapping[str, Any], key: str, *default: Any) -> Any:
    found = [config[name] for name in (key, *OTHER_KEYS.get(key, ())) if config.get(name) is not None]
    if not found and not default:
        raise KeyError(key)
    return found[0] if found else default[0]


def _linears(sizes: dict[str, tuple[int, int]], joined: dict[str, tuple[str, ...]] | None) -> tuple[Linear, ...]:
    names = joined or {f"{part}_proj": (part,) for part in sizes}
    found = []
    for name, parts in names.items():
        parts = tuple(part for part in parts if part in sizes)
        same_input = len({sizes[part][0] for part in parts}) == 1
        groups = [parts] if same_input else [(part,) for part in parts]
        found += [
            Linear(name, sizes[group[0]][0], sum(sizes[part][1] for part in group), group[0] in ("gate", "up", "down"))
            for group in groups
        ]
    return tuple(found)
