"""Texts of the findings in the reader's language."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Stands between the English and the Chinese of a piece of evidence that brings both.
BOTH = " ||| "


@lru_cache(maxsize=1)
def load_texts() -> dict[str, dict[str, Any]]:
    """Read every text file; once a process, since they never change."""
    found: dict[str, dict[str, Any]] = {}
    for entry in resources.files("surefoot.doctor").joinpath("texts").iterdir():
        if entry.name.endswith(".toml"):
            found.update(tomllib.loads(entry.read_text(encoding="utf-8")))
    return found


def in_language(text: str, language: str) -> str:
    """Take one language out of an `English || 中文` text; a text without `||` serves both."""
    english, bar, chinese = text.partition(" || ")
    if language == "zh" and bar:
        return f"# {chinese}" if english.startswith("#") and not chinese.startswith("#") else chinese
    return english


def fill(text: str, values: Mapping[str, str]) -> str:
    """Fill `{name}` placeholders; a name without a value and any other brace stay as they are."""
    for name in sorted(values, key=len, reverse=True):
        text = text.replace("{" + name + "}", values[name])
    return text


def sentence(text: str, values: Mapping[str, str], language: str) -> str:
    """Fill a text and take one language out of it, also where a value brings both languages itself."""
    bilingual = {k: in_language(v, language) if " || " in v else v for k, v in values.items()}
    return fill(in_language(text, language), defaultdict(str, bilingual)).strip()


@lru_cache(maxsize=1)
def _phrases() -> tuple[list[list[str]], list[tuple[re.Pattern[str], str]]]:
    raw = tomllib.loads(resources.files("surefoot.doctor").joinpath("evidence_zh.toml").read_text(encoding="utf-8"))
    return raw["prefixes"], [(re.compile(pattern), words) for pattern, words in raw["phrases"]]


def evidence_in(text: str, language: str) -> str:
    """Put the doctor's own words in a piece of evidence into a language; what is quoted stays as it was."""
    english, both, chinese = text.partition(BOTH)
    if language != "zh":
        return english
    if both:
        return chinese
    prefixes, phrases = _phrases()
    for prefix, words in prefixes:
        if text.startswith(prefix):
            return words + text.removeprefix(prefix)
    for pattern, words in phrases:
        text = pattern.sub(words, text)
    return text
