"""The model's tokenizer, with the YAML's extra tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.errors import UserError
from surefoot.model.source import hub_arguments, model_config, model_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefoot.config import Config


def load_tokenizer(cfg: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer and add the YAML's `add_tokens` and `add_special_tokens`.

    Args:
        cfg: the YAML; `model_name_or_path` names the folder, the hub id or the demo model.

    Returns:
        The tokenizer, padding on the right.

    Raises:
        UserError: there is no tokenizer at that place, or it cannot be read.
    """
    from transformers import AutoTokenizer

    path = model_path(cfg)
    # The model's own configuration comes first: its errors say more than the tokenizer's do.
    config = model_config(cfg)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            path,
            config=config,
            use_fast=cfg.use_fast_tokenizer,
            split_special_tokens=cfg.split_special_tokens,
            padding_side="right",
            **hub_arguments(cfg),
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:  # as transformers reports bad files
        raise UserError(
            f"no usable tokenizer in {path}: {str(error).splitlines()[0]}",
            hint="the folder needs tokenizer.json (or the files of its tokenizer class) beside config.json",
            key="model_name_or_path",
        ) from error
    if cfg.add_tokens:
        tokenizer.add_tokens(list(cfg.add_tokens))
    if cfg.add_special_tokens:
        tokenizer.add_tokens(list(cfg.add_special_tokens), special_tokens=True)
    return tokenizer
