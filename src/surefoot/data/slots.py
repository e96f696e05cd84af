"""The pieces that a template renders to, and how they become token ids.

A turn renders to a list of pieces: texts, each tokenized on its own, and special tokens, each one id. Merges of the
tokenizer never cross the border of a piece, so the ids depend on where the borders are: they are part of a template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTENT = "{{content}}"
TURN_NUMBER = "{{idx}}"


@dataclass(frozen=True, slots=True)
class Special:
    """A piece that is one token id, whatever the tokenizer would make of its text.

    Attributes:
        kind: `bos` and `eos` are the tokenizer's own (no id at all where it has none); `token` is named by its text.
        text: the token's text, for `token`.
    """

    kind: Literal["bos", "eos", "token"]
    text: str = ""


BOS = Special("bos")
EOS = Special("eos")

Piece = str | Special


@dataclass(frozen=True, slots=True)
class Hole:
    """A text slot with the turn's content in it.

    Attributes:
        before: text before the content; may hold `{{idx}}`, the number of the turn pair, from 0.
        after: text after the content.
        numbered: whether `before` or `after` holds `{{idx}}`.
    """

    before: str
    after: str
    numbered: bool

    def fill(self, content: str, turn: int) -> str:
        """Put the content, and the number of the turn pair, into the slot."""
        if self.numbered:
            number = str(turn)
            return self.before.replace(TURN_NUMBER, number) + content + self.after.replace(TURN_NUMBER, number)
        return self.before + content + self.after


@dataclass(frozen=True, slots=True)
class Format:
    """How one role's turn is written: a fixed list of slots."""

    slots: tuple[str | Special | Hole, ...]

    @classmethod
    def parse(cls, written: str | Sequence[str | dict[str, str]]) -> Format:
        """Read a format as the template table writes it.

        Args:
            written: one slot or a list of slots. A slot is a text, with `{{content}}` where the content goes,
                or "{{bos}}", "{{eos}}", or {"token": "<mark>"}.

        Returns:
            The format.
        """
        return cls(tuple(_parse_slot(slot) for slot in ([written] if isinstance(written, str) else written)))

    def render(self, content: str = "", turn: int = 0) -> list[Piece]:
        """Write one turn.

        Args:
            content: what the turn says.
            turn: number of the turn pair, from 0.

        Returns:
            The pieces; an empty text is left out.
        """
        pieces: list[Piece] = []
        for slot in self.slots:
            piece = slot.fill(content, turn) if isinstance(slot, Hole) else slot
            if piece != "":
                pieces.append(piece)
        return pieces


def _parse_slot(slot: str | dict[str, str]) -> str | Special | Hole:
    if isinstance(slot, dict):
        return Special("token", slot["token"])
    if slot == "{{bos}}":
        return BOS
    if slot == "{{eos}}":
        return EOS
    if CONTENT in slot:
        before, after = slot.split(CONTENT, 1)
        return Hole(before, after, TURN_NUMBER in slot)
    return slot


def tokenize_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Tokenize texts in one call, with no special tokens added around them.

    Strings in a text that look like special tokens become those tokens, unless the tokenizer was loaded with
    `split_special_tokens`.

    Args:
        tokenizer: any transformers tokenizer.
        texts: what to tokenize, each on its own.

    Returns:
        The ids of each text.
    """
    if not texts:
        return []
    backend: Any = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
    if backend is None or backend.truncation is not None or backend.padding is not None:
        return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    # The same backend call that the tokenizer makes, without offsets, masks and one dictionary per text: 1.5 times as
    # fast. tests/data/test_encode.py holds it equal to `tokenizer.encode`.
    split = bool(getattr(tokenizer, "split_special_tokens", False))
    if backend.encode_special_tokens != split:
        backend.encode_special_tokens = split
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def tokenize_pieces(tokenizer: PreTrainedTokenizerBase, groups: Sequence[Sequence[Piece]]) -> list[list[int]]:
    """Turn many lists of pieces into ids, tokenizing each distinct text once.

    Args:
        tokenizer: any transformers tokenizer.
        groups: lists of pieces, for instance every turn of a thousand rows.

    Returns:
        The ids of each group. Lists may be shared between groups with the same text: read them, do not change them.
    """
    number_of: dict[str, int] = {}
    for group in groups:
        for piece in group:
            if isinstance(piece, str) and piece not in number_of:
                number_of[piece] = len(number_of)
    text_ids = tokenize_texts(tokenizer, list(number_of))
    special_ids: dict[Special, list[int]] = {}
    result = []
    for group in groups:
        parts = []
        for piece in group:
            if isinstance(piece, str):
                parts.append(text_ids[number_of[piece]])
                continue
            if piece not in special_ids:
                special_ids[piece] = _special_ids(tokenizer, piece)
            parts.append(special_ids[piece])
        result.append(parts[0] if len(parts) == 1 else [token for part in parts for token in part])
    return result


def _special_ids(tokenizer: PreTrainedTokenizerBase, piece: Special) -> list[int]:
    token: Any
    if piece.kind == "bos":
        token = tokenizer.bos_token_id
    elif piece.kind == "eos":
        token = tokenizer.eos_token_id
    else:
        token = tokenizer.convert_tokens_to_ids(piece.text)
    return [] if token is None else [token]
