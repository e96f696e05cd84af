"""The tokenizer and the template of a job: the same two for training, checking, chatting and exporting."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefoot.config import Config
    from surefoot.data.template import Template


def load_prompts(cfg: Config) -> tuple[PreTrainedTokenizerBase, Template]:
    """Load the tokenizer, find the template, and make the one fit the other.

    Args:
        cfg: the settings.

    Returns:
        The tokenizer, with the eos, pad and stop tokens and the chat template that the template needs; the template.

    Raises:
        UserError: there is no such tokenizer or template, or the two do not belong together.
    """
    from surefoot.data.chat_template import set_chat_template
    from surefoot.data.template import get_template
    from surefoot.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(cfg)
    # Pre-training reads documents, not turns: a base model needs no chat format for it.
    name = cfg.template or ("empty" if cfg.stage == "pt" else None)
    template = get_template(
        name,
        tokenizer,
        default_system=cfg.default_system,
        tool_format=cfg.tool_format,
        enable_thinking=cfg.enable_thinking,
        preserve_thinking=cfg.preserve_thinking,
    )
    template.fix_tokenizer(tokenizer, missing="add" if cfg.resize_vocab else "refuse")
    set_chat_template(template, tokenizer)
    return tokenizer, template
