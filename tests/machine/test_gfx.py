from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.machine.gfx import base_name, decode_target, encode_target, is_gfx, parse_override, split_targets
from surefoot.machine.table import load_table

ROWS = list(load_table().gpus.values())


@given(st.sampled_from(ROWS))
def test_every_row_decodes_and_encodes(row):
    assert decode_target(row.target_version) == row.gfx
    assert encode_target(row.gfx) == row.target_version
    assert decode_target(encode_target(row.gfx)) == row.gfx


@pytest.mark.parametrize(
    ("number", "name"),
    [(90010, "gfx90a"), (90402, "gfx942"), (110501, "gfx1151"), (120001, "gfx1201"), (0, ""), (1, "")],
)
def test_steps_are_hex(number, name):
    assert decode_target(number) == name


@given(st.integers(-(10**12), 10**12))
def test_decoding_never_raises_and_only_names_what_encodes_back(number):
    name = decode_target(number)
    assert name == "" or encode_target(name) == number


@given(st.integers(0, 70), st.integers(0, 300), st.integers(0, 300))
def test_override_follows_the_runtime_rule(major, minor, step):
    valid = major <= 63 and minor <= 255 and step <= 255
    assert bool(parse_override(f"{major}.{minor}.{step}")) == valid


@pytest.mark.parametrize(
    "text", ["gfx1103", "11.0", "11.0.0 ", "11.0.0a", "", " 11.0.0", "11,0,0", "-1.0.0", "9" * 400 + ".0.0"]
)
def test_overrides_that_the_runtime_calls_invalid(text):
    assert parse_override(text) == ""


def test_override_step_is_decimal():
    assert parse_override("9.0.10") == "gfx90a"


def test_old_spellings_and_features_are_stripped():
    assert base_name("gfx9010") == "gfx90a"
    assert base_name("gfx942:sramecc+:xnack-") == "gfx942"
    assert base_name("amdgcn-amd-amdhsa--gfx1100") == "gfx1100"
    assert base_name("gfx1010") == "gfx1010"
    assert not is_gfx("gfx10-3-generic")


@given(
    st.lists(st.sampled_from([r.gfx for r in ROWS]), min_size=1, max_size=6),
    st.sampled_from([";", ",", " ", "; ", ", "]),
)
def test_any_separator_splits(names, separator):
    assert split_targets(separator.join(names)) == names
