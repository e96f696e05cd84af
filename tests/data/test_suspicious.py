"""Characters that a person should look at, and those that only look odd."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.suspicious import CONTROL, INVISIBLE, KINDS, MIXED, REPLACED, find_suspicious, is_unwritable


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("tab\tline\r\nend", ()),
        ("bell\x07", (CONTROL,)),
        ("null\x00é", (CONTROL,)),
        ("del\x7f", (CONTROL,)),
        ("next line\x85", (CONTROL,)),
        ("lost \ufffd", (REPLACED,)),
        ("zero\u200bwidth", (INVISIBLE,)),
        ("right to left \u202e", (INVISIBLE,)),
        ("\ufeffmark", (INVISIBLE,)),
        ("bell\x07 \ufffd cafÃ© \u200b", KINDS),
    ],
)
def test_kinds(text, kinds):
    assert find_suspicious(text) == kinds


@pytest.mark.parametrize("codec", ["cp1252", "latin-1"])
@pytest.mark.parametrize(
    "text", ["café", "naïve", "it’s", "“so”", "5 – 6", "£5", "日本語", "中文字", "😀", "カタカナ", "\xa0x"]
)
def test_utf8_read_as_another_encoding_is_found(text, codec):
    try:
        garbled = text.encode("utf-8").decode(codec)
    except UnicodeDecodeError:
        pytest.skip("Windows-1252 has no such character")
    assert MIXED in find_suspicious(garbled)
    assert find_suspicious(text) == ()


@pytest.mark.parametrize(
    "text",
    [
        "„Ça va, bébé”— oui",
        "NÃO É",
        "Ângela",
        "São Paulo «aqui»",
        "el niño 5° ½",
        "família 👩‍👩‍👧",
        "ÄÖÜ ß",
        "đã…”",
        "हिन्दी",
        "می‌خواهم",
    ],
)
def test_ordinary_text_of_many_languages_passes(text):
    assert find_suspicious(text) == ()


def test_half_a_surrogate_pair():
    assert is_unwritable("x\ud83d") and not is_unwritable("x😀") and not is_unwritable("x")


@given(st.text())
def test_any_text_is_taken(text):
    assert set(find_suspicious(text)) <= set(KINDS)
    text_can_be_written = True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text_can_be_written = False
    assert is_unwritable(text) is not text_can_be_written
