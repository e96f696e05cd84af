"""A vocabulary that grew, and positions beyond those that the model was trained on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from surefoot.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from surefoot.config import Config

ROWS_MULTIPLE = 64


def resize_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cfg: Config) -> bool:
    """Give every token of the tokenizer a row in the embeddings and the head.

    New rows are drawn around the mean of the old ones (transformers' `mean_resizing`), since untrained random
    rows give losses in the hundreds.

    Args:
        model: the loaded model; changed in place.
        tokenizer: the tokenizer, with all its added tokens.
        cfg: the YAML; `resize_vocab`, or added tokens, ask for it.

    Returns:
        True when rows were added.

    Raises:
        UserError: the tokenizer knows more tokens than the model has rows, and nobody asked to add rows.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr, arg-type]
    wanted = len(tokenizer)
    if wanted <= rows:
        return False
    refuse_missing_rows(rows, wanted, cfg)
    model.resize_token_embeddings(wanted, pad_to_multiple_of=ROWS_MULTIPLE, mean_resizing=True)
    return True


def refuse_missing_rows(rows: int, tokens: int, cfg: Config) -> None:
    """Refuse a tokenizer that knows more tokens than the model has rows, unless the YAML asks for new rows.

    Args:
        rows: of the model's embeddings.
        tokens: that the tokenizer knows.
        cfg: the YAML; `resize_vocab`, or added tokens, ask for rows.

    Raises:
        UserError: there are too few rows.
    """
    if tokens > rows and not (cfg.resize_vocab or cfg.add_tokens or cfg.add_special_tokens):
        raise UserError(
            f"the tokenizer knows {tokens} tokens, but the model has rows for {rows}",
            hint="set `resize_vocab: true`, or use the tokenizer that belongs to the model",
            key="resize_vocab",
        )


def scale_rope(config: PretrainedConfig, kind: str | None, cutoff_len: int, *, training: bool) -> str | None:
    """Stretch rotary positions so that `cutoff_len` tokens fit, as LLaMA-Factory does.

    Args:
        config: the model's configuration; changed in place.
        kind: "linear", "dynamic", "yarn" or "llama3"; None leaves it alone.
        cutoff_len: most tokens in a row.
        training: True takes the factor ceil(cutoff_len / old limit), False takes 2.

    Returns:
        A sentence on what was done, or None.

    Raises:
        UserError: the model has no rotary positions to scale.
    """
    if kind is None:
        return None
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    old = getattr(text, "max_position_embeddings", None)
    if not isinstance(rope, dict) or old is None or "rope_theta" not in rope:
        raise UserError(
            f"{type(config).__name__} has no single set of rotary positions to scale",
            hint="remove the key",
            key="rope_scaling",
        )
    if training and cutoff_len <= old:
        return f"rope_scaling: {kind} is not needed: cutoff_len {cutoff_len} fits the model's {old} positions."
    factor = float(math.ceil(cutoff_len / old)) if training else 2.0
    scaled = {"rope_theta": rope["rope_theta"], "rope_type": kind, "factor": factor}
    if "partial_rotary_factor" in rope:
        scaled["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if kind != "linear":
        scaled["original_max_position_embeddings"] = old
    if kind == "llama3":
        scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    text.rope_parameters = scaled
    text.max_position_embeddings = int(old * factor)
    return f"rope_scaling: {kind} stretches {old} positions to {int(old * factor)} (factor {factor:g})."
