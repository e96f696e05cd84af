"""Make a tokenizer fit a template: eos, pad, stop words, and the marks that must be single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from surefoot.data.slots import tokenize_texts
from surefoot.data.template_table import read_template_table
from surefoot.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefoot.data.template import Template

MissingMarks = Literal["refuse", "add", "split"]

LAST_RESORT_EOS = "<|endoftext|>"
"""The eos token of a tokenizer that has none, when the template names none either."""


def fix_tokenizer(template: Template, tokenizer: PreTrainedTokenizerBase, missing: MissingMarks) -> list[str]:
    """Set eos, pad and stop words of a tokenizer as a template needs them.

    Args:
        template: the template.
        tokenizer: changed in place.
        missing: what to do about strings that the tokenizer lacks, see `Template.fix_tokenizer`.

    Returns:
        The tokens that were added to the vocabulary.

    Raises:
        UserError: a stop word or mark is missing, and `missing` is "refuse".
    """
    stop_words = list(template.stop_words)
    eos = stop_words.pop(0) if template.replace_eos else (tokenizer.eos_token or LAST_RESORT_EOS)
    wanted = list(dict.fromkeys([eos, *template.single_tokens()]))
    lacking = [token for token in wanted if not _is_single_token(tokenizer, token)]
    if lacking and missing == "refuse":
        raise _lacking_marks(template, tokenizer, lacking)
    if tokenizer.eos_token != eos:
        tokenizer.add_special_tokens({"eos_token": eos})
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    to_mark = [*stop_words, *(token for token in lacking if token not in template.stop_words and missing == "add")]
    if to_mark:
        tokenizer.add_special_tokens({"extra_special_tokens": to_mark}, replace_extra_special_tokens=False)
    return [token for token in lacking if _is_single_token(tokenizer, token)]


def _is_single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether the tokenizer has this text as one token, and finds it in a text."""
    token = tokenizer.convert_tokens_to_ids(text)
    if token is None or (token == tokenizer.unk_token_id and text != tokenizer.unk_token):
        return False
    # With `split_special_tokens` the person asked for marks to fall into pieces: being in the vocabulary must do.
    return bool(getattr(tokenizer, "split_special_tokens", False)) or token in tokenize_texts(tokenizer, [text])[0]


def fitting_templates(tokenizer: PreTrainedTokenizerBase, most: int = 6) -> list[str]:
    """Name templates whose stop words and marks a tokenizer has.

    Args:
        tokenizer: a transformers tokenizer.
        most: how many to name at most.

    Returns:
        Their names, in the table's order.
    """
    found = []
    for name, keys in read_template_table().items():
        words = [*keys.get("stop", ()), *keys.get("marks", ())]
        # One word alone says little: many tokenizers have "</s>".
        if len(words) > 1 and len(found) < most and all(_is_single_token(tokenizer, word) for word in words):
            found.append(name)
    return found


def _lacking_marks(template: Template, tokenizer: PreTrainedTokenizerBase, lacking: list[str]) -> UserError:
    fitting = ", ".join(fitting_templates(tokenizer))
    own = f"this tokenizer has the marks of: {fitting}" if fitting else "the tokenizer has the marks of no template"
    return UserError(
        f"template {template.name!r} writes {', '.join(lacking)}, which this model's tokenizer does not have as single "
        "tokens: the model would see pieces of text instead of the structure",
        hint=f"choose the template of this model ({own}), or leave `template` out to use the tokenizer's own; or set "
        "`resize_vocab: true` to add them as new tokens",
        key="template",
    )
