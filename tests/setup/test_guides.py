"""The pages on setup say what the planner says today."""

from __future__ import annotations

import pytest
import write_guides as guides


@pytest.mark.parametrize("page", guides.PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_the_planner_prints_today(page):
    """Write them anew with `PYTHONPATH=src python tests/setup/write_guides.py`, and read the difference."""
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- / -->") == len(guides.blocks(text)) > 0
    assert guides.fill(text, guides.language_of(page)) == text


@pytest.mark.parametrize("suffix", [".md", ".zh.md"])
@pytest.mark.parametrize("name", guides.WHOLE)
def test_a_guide_shows_its_whole_plan_in_order(name, suffix):
    text = (guides.DOCS / f"{name}{suffix}").read_text(encoding="utf-8")
    ids = list(guides.parts(guides.WHOLE[name]))
    shown = [(b.first, b.last) for b in guides.blocks(text) if b.name == guides.WHOLE[name]]
    assert [part for first, last in shown for part in ids[ids.index(first) : ids.index(last) + 1]] == ids


def test_both_languages_show_the_same_blocks_and_no_run_is_left_over():
    kept = set()
    for page in guides.PAGES[::2]:
        english, chinese = (guides.blocks(p.read_text(encoding="utf-8")) for p in (page, page.with_suffix(".zh.md")))
        plain = [(b.kind, b.name.removesuffix("-zh"), b.first, b.last) for b in chinese]
        assert plain == [(b.kind, b.name, b.first, b.last) for b in english]
        kept |= {b.name for b in (*english, *chinese)}
    assert kept - {""} == set(guides.RUNS)


def test_a_plan_that_changed_is_seen():
    page = guides.PAGES[2]
    text = page.read_text(encoding="utf-8")
    assert guides.fill(text.replace("python3.12 -m venv .venv", "python3.9 -m venv .venv"), "en") == text
