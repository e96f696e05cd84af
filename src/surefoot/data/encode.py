"""From rows to token ids and labels: what is trained, and what is cut off.

`encode_batch` is the way in: it tokenizes the texts of many rows in one call. One row alone gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from surefoot.data.messages import IGNORE_INDEX, Example, Message, RowProblem
from surefoot.data.slots import tokenize_pieces
from surefoot.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefoot.data.template import Template, TurnPair

TokenPair = tuple[list[int], list[int]]
"""The ids of a prompt and of the answer to it."""


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """The YAML's keys that decide what a row becomes.

    Attributes:
        cutoff_len: most tokens that a row may have.
        train_on_prompt: train every token, not the answers alone.
        mask_history: train the last answer alone; the last turns are kept when the row is too long.
    """

    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A row as token ids.

    Attributes:
        row_id: the row's.
        input_ids: int32 [tokens].
        labels: int32 [tokens]; the id at each trained position, -100 elsewhere.
        cut: whether tokens or turns were left out because of `cutoff_len`.
        trained: number of tokens that are trained: labels that are not -100, the first position aside, since nothing
            comes before it that could predict it.
    """

    row_id: str
    input_ids: np.ndarray
    labels: np.ndarray
    cut: bool
    trained: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that cannot be used.

    Attributes:
        row_id: the row's.
        reason: why, in the words under which such rows are counted.
        detail: what is wrong in this one.
    """

    row_id: str
    reason: str
    detail: str = ""


def check_settings(template: Template, settings: EncodeSettings) -> None:
    """Refuse settings that a template cannot serve.

    Args:
        template: the run's.
        settings: the run's.

    Raises:
        UserError: `train_on_prompt` with a template that learns eos where the next prompt begins.
    """
    if settings.train_on_prompt and template.efficient_eos:
        raise UserError(
            f"template {template.name!r} cannot be used with `train_on_prompt`: it learns the end of an answer on the "
            "first token of the next prompt",
            hint="set `train_on_prompt: false`",
            key="train_on_prompt",
        )


def split_budget(source_len: int, target_len: int, cutoff: int) -> tuple[int, int]:
    """Share `cutoff` tokens between a prompt and its answer, as LLaMA-Factory does.

    An answer under half of the budget stays whole, else a prompt under half of it does, else each gives in proportion.

    Args:
        source_len: tokens of the prompt.
        target_len: tokens of the answer.
        cutoff: tokens that the two may have together, 0 or more.

    Returns:
        Tokens to keep of the prompt, and of the answer.
    """
    if target_len * 2 < cutoff:
        answer_room = cutoff
    elif source_len * 2 < cutoff:
        answer_room = cutoff - source_len
    else:
        # In floating point on purpose: exact division would round some rows differently.
        answer_room = int(cutoff * (target_len / (source_len + target_len))) if source_len + target_len else 0
    target_kept = min(answer_room, target_len)
    return min(max(cutoff - target_kept, 0), source_len), target_kept


def encode_batch(
    examples: Sequence[Example],
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    settings: EncodeSettings,
) -> list[EncodedRow | Dropped]:
    """Turn rows into ids and labels for supervised training.

    Args:
        examples: rows; about a thousand at a time is fast and needs little memory.
        template: the run's.
        tokenizer: the run's, with `template.fix_tokenizer` applied.
        settings: what is trained, and how long a row may be.

    Returns:
        One entry for each row, in order: what it became, or why it cannot be used.

    Raises:
        UserError: the settings do not go with the template.
    """
    check_settings(template, settings)
    drop_thoughts = settings.mask_history and not template.preserve_thinking
    rendered: list[list[TurnPair] | Dropped] = []
    for example in examples:
        try:
            messages = _conversation(example)
            rendered.append(
                template.render_turns(messages, example.system, example.tools, drop_history_thoughts=drop_thoughts)
            )
        except RowProblem as problem:
            rendered.append(Dropped(example.row_id, problem.reason, problem.detail))
    sides = [side for pairs in rendered if not isinstance(pairs, Dropped) for pair in pairs for side in pair]
    ids = iter(tokenize_pieces(tokenizer, sides))
    rows: list[EncodedRow | Dropped] = []
    for example, pairs in zip(examples, rendered, strict=True):
        if isinstance(pairs, Dropped):
            rows.append(pairs)
        else:
            turns = [(next(ids), next(ids)) for _ in pairs]
            rows.append(label_turns(example.row_id, turns, settings, tokenizer.eos_token_id, template.efficient_eos))
    return rows


def encode_example(
    example: Example, template: Template, tokenizer: PreTrainedTokenizerBase, settings: EncodeSettings
) -> EncodedRow | Dropped:
    """`encode_batch` for one row."""
    return encode_batch([example], template, tokenizer, settings)[0]


def label_turns(
    row_id: str, turns: Sequence[TokenPair], settings: EncodeSettings, eos_id: int, efficient_eos: bool
) -> EncodedRow:
    """Cut a row to length and say which tokens are trained.

    Turns are taken in order (from the last one with `mask_history`) while there is room; see `split_budget`.

    Args:
        row_id: the row's.
        turns: its (prompt, answer) ids.
        settings: what is trained, and how long a row may be.
        eos_id: the tokenizer's eos.
        efficient_eos: the template's.

    Returns:
        The row.
    """
    used = 1 if efficient_eos else 0  # room for the eos that ends the row
    kept: list[tuple[int, TokenPair, bool]] = []  # tokens of the prompt, the pair, whether any other was kept before
    cut = False
    for source, target in reversed(turns) if settings.mask_history else turns:
        if used >= settings.cutoff_len:
            cut = True
            break
        source_kept, target_kept = split_budget(len(source), len(target), settings.cutoff_len - used)
        cut = cut or source_kept < len(source) or target_kept < len(target)
        used += source_kept + target_kept
        kept.append((source_kept, (source[:source_kept], target[:target_kept]), bool(kept)))
    if settings.mask_history:
        kept.reverse()

    tokens = [token for _, pair, _ in kept for side in pair for token in side]
    if efficient_eos:
        tokens.append(eos_id)
    input_ids = np.array(tokens, dtype=np.int32)
    labels = input_ids.copy() if settings.train_on_prompt else np.full(len(tokens), IGNORE_INDEX, dtype=np.int32)
    start = 0
    for source_kept, (source, target), later in kept:
        end = start + len(source) + len(target)
        middle = start + source_kept
        if settings.mask_history and later:
            labels[middle:end] = IGNORE_INDEX
        else:
            labels[middle:end] = input_ids[middle:end]
        # What the answer before is followed by: eos. With `mask_history` LLaMA-Factory counts "later" from the last
        # turn backwards: the first turn's beginning is marked, and the last one's is not. Kept, for equal labels.
        if efficient_eos and later and source_kept:
            labels[start] = eos_id
        start = end
    if efficient_eos:
        labels[-1] = eos_id
    return EncodedRow(row_id, input_ids, labels, cut, int(np.count_nonzero(labels[1:] != IGNORE_INDEX)))


def _conversation(example: Example) -> tuple[Message, ...]:
    """The row's turns, or the problem that makes it no conversation."""
    if len(example.response) != 1:
        raise RowProblem("more than one answer" if example.response else "no answer")
    if len(example.prompt) % 2 == 0:
        raise RowProblem("its turns do not alternate", f"{len(example.prompt)} turns before the answer")
    return example.prompt + example.response
