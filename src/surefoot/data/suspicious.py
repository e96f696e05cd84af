"""Characters that rarely belong into training text, found before a model learns them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from surefoot.data.messages import Example

CONTROL = "control characters"
REPLACED = "U+FFFD replacement characters"
MIXED = "mixed encodings"
INVISIBLE = "invisible or direction-changing characters"
KINDS = (CONTROL, REPLACED, MIXED, INVISIBLE)

# Tab, line feed and carriage return are text. C1 (U+0080 to U+009F) is what bytes of another encoding turn into.
_ASCII_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")
# Byte order marks inside text, zero-width space, and marks that override the reading direction. Joiners (U+200C and
# U+200D) and the plain direction marks belong to several scripts and to emoji, so they pass.
_INVISIBLE = re.compile(r"[\ufeff\u200b\u202a-\u202e\u2060\u2066-\u2069]")

# UTF-8 read as Latin-1 or Windows-1252: a lead byte's letter, then the letter of a continuation byte (0x80 to 0xBF).
_AFTER = (
    "[\x80-\xbf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d\u2018\u2019\u201c\u201d"
    "\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e\u0178]"
)
# A letter such as é with two closing marks behind it also ends a quoted French word, so one such group proves nothing
# unless its marks are those of common text (â€™, ã‚¢, ï»¿); two groups in a row do.
_MIXED = re.compile(
    f"[ÂÃ]{_AFTER}|â[€„†ˆ‰\x80-\x8f]{_AFTER}|ã[€‚ƒ\x80-\x83]{_AFTER}|ï(?:»¿|¿½|¼{_AFTER})"
    f"|(?:[àáâãäåæçèéêëìíîï]{_AFTER}{{2}}){{2}}|ð{_AFTER}{{3}}"
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def find_suspicious(text: str) -> tuple[str, ...]:
    """Name the kinds of suspicious characters in a text.

    Args:
        text: any text.

    Returns:
        Those of KINDS that occur in it, in that order.
    """
    if text.isascii():  # fast, and most text is
        return (CONTROL,) if _ASCII_CONTROL.search(text) else ()
    found = []
    mixed = _MIXED.search(text)
    if _CONTROL.search(_MIXED.sub("", text) if mixed else text):  # a C1 that mojibake explains is not reported twice
        found.append(CONTROL)
    if "\ufffd" in text:
        found.append(REPLACED)
    if mixed:
        found.append(MIXED)
    if _INVISIBLE.search(text):
        found.append(INVISIBLE)
    return tuple(found)


def is_unwritable(text: str) -> bool:
    """Tell whether a text holds half of a surrogate pair, which UTF-8 and so every tokenizer cannot take."""
    return not text.isascii() and _SURROGATE.search(text) is not None


def texts_of(example: Example) -> Iterable[str]:
    """Every text of a row that reaches the model."""
    for message in (*example.prompt, *example.response):
        yield message.content
    if example.system:
        yield example.system
    if example.tools:
        yield example.tools
