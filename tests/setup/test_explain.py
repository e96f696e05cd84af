"""Catalogue entries, filled for a machine."""

from __future__ import annotations

import re

import pytest

from surefoot.doctor.texts import load_texts
from surefoot.errors import UserError
from surefoot.machine.case import base_snapshot, build_case
from surefoot.machine.snapshot import Snapshot
from surefoot.setup.explain import explain


def test_a_fault_that_is_here_is_explained_with_its_evidence():
    outside = build_case({"base": "rx7900xtx-ubuntu", "patch": {"process.groups": [1000]}}, "outside").snapshot
    page = explain("F22", outside)
    assert page.startswith("F22  ") and "found on this machine" in page
    assert "this process's groups: 1000" in page
    assert all(f"\n{title}\n" in page for title in ("Why", "How it is seen", "Fix", "Confirms it"))


def test_a_fault_that_is_not_here_is_filled_with_what_is_known():
    page = explain("f35", Snapshot(base_snapshot("mi300x-8")))
    assert "not found on this machine" in page and "whl/rocm7.2" in page
    other = explain("35", Snapshot(base_snapshot("r9700-pip")))
    assert "whl-next" in other and "device-gfx1201" in other
    assert "X.yaml" in explain("F133", Snapshot(base_snapshot("mi300x-8")))


def test_chinese():
    page = explain("F35", Snapshot(base_snapshot("mi300x-8")), "zh")
    assert "安装的 torch 不是 ROCm 版本" in page and "本机未发现" in page and "Why" not in page


@pytest.mark.parametrize(
    ("wanted", "near"),
    [("F200", "F137"), ("F0", "F01"), ("G35", "F35"), ("flash attention", "F97"), ("torch not built", "F35")],
)
def test_an_unknown_id_names_near_ones(wanted, near):
    with pytest.raises(UserError, match=f"the catalogue has no '{wanted}'") as error:
        explain(wanted, Snapshot(base_snapshot("cpu-only")))
    assert near in error.value.problems[0].hint


@pytest.mark.parametrize("base", ["cpu-only", "podman-w7800"])
def test_every_entry_can_be_written_in_both_languages(base):
    snapshot = Snapshot(base_snapshot(base))
    for rule_id in load_texts():
        for language in ("en", "zh"):
            page = explain(rule_id, snapshot, language)
            assert "||" not in page and not re.search(r"\{\w+\}", page)
