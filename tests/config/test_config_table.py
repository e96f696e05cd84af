from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from surefoot.config import Config, all_keys, make_config
from surefoot.config.docs import keys_page
from surefoot.config.key import Mark
from surefoot.config.meanings_zh import MEANINGS
from surefoot.config.table import GROUPS
from surefoot.errors import UserError

TABLE = all_keys()


def test_every_key_of_llamafactory_is_in_the_table():
    counts = Counter(info.group for info in TABLE.values())
    theirs = {"model": 78, "data": 28, "finetuning": 99, "generating": 10, "training": 154}
    assert {group: counts[group] for group in theirs} == theirs
    assert sum(theirs.values()) == 369


def test_table_and_fields_are_the_same():
    assert set(TABLE) == set(Config.model_fields)
    assert len(TABLE) == sum(len(group.model_fields) for group, _ in GROUPS.values())  # no key in two groups
    for name, field in Config.model_fields.items():
        marks = [item for item in field.metadata if isinstance(item, Mark)]
        assert [mark.status for mark in marks] == [TABLE[name].status]


def test_every_key_that_does_not_work_says_why_in_both_languages():
    for info in TABLE.values():
        reasons = list(info.refused.values()) + ([info.reason] if info.reason else [])
        assert (info.reason is None) == (info.status == "works"), info.name
        assert all(reason.en.endswith(".") and reason.zh.endswith("。") for reason in reasons), info.name


def test_every_key_has_a_meaning_in_both_languages():
    assert set(MEANINGS) == set(TABLE)
    for info in TABLE.values():
        assert info.meaning.endswith((".", "?")) and MEANINGS[info.name].endswith("。"), info.name


def test_defaults_are_valid_values_of_their_keys():
    for info in TABLE.values():
        if info.default is not None:
            assert getattr(Config.model_validate({info.name: info.default}), info.name) == info.default


@pytest.mark.parametrize(
    "info", [info for info in TABLE.values() if info.status == "not_yet"], ids=lambda info: info.name
)
def test_what_is_not_there_yet_is_refused_by_name(info):
    wanted = {bool: not info.default, int: 4, float: 0.5, str: "x"}
    kind = next((kind for kind in info.types if kind in wanted), None)
    words = {"mixture_of_depths": "convert", "quantization_device_map": "auto"}
    value = wanted[kind] if kind else words.get(info.name, "desc_init")
    if info.name in ("accelerator_config", "parallelism_config"):
        value = {"a": 1}
    purpose = info.purposes[0]
    with pytest.raises(UserError) as caught:
        make_config({"model_name_or_path": "m", "dataset": "d", info.name: value}, purpose)
    found = [problem for problem in caught.value.problems if problem.key == info.name]
    assert len(found) == 1
    assert "not supported yet" in found[0].message
    assert found[0].hint == info.reason.en


@pytest.mark.parametrize("info", [info for info in TABLE.values() if info.refused], ids=lambda info: info.name)
def test_values_that_are_not_there_yet_are_refused_by_name(info):
    for value, reason in info.refused.items():
        with pytest.raises(UserError) as caught:
            make_config({"model_name_or_path": "m", "dataset": "d", info.name: value}, info.purposes[0])
        assert [(p.key, p.hint) for p in caught.value.problems if p.key == info.name] == [(info.name, reason.en)]


def test_a_key_that_is_not_there_yet_may_be_given_its_default():
    values = {info.name: info.default for info in TABLE.values() if info.status == "not_yet"}
    make_config({"model_name_or_path": "m", "dataset": "d"} | values)


@pytest.mark.parametrize(("lang", "name"), [("en", "keys.md"), ("zh", "keys.zh.md")])
def test_the_page_of_keys_lists_every_key_and_is_up_to_date(lang, name):
    page = keys_page(lang)
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(TABLE)
    assert all(row.replace("\\|", "").count("|") == 6 for row in rows)
    written = Path(__file__).parents[2] / "docs" / name
    if written.exists() and "<!-- keys:" not in written.read_text(encoding="utf-8"):  # else: filled when docs are built
        hint = f"run `python -m surefoot.config.docs --lang {lang} --write docs/{name}`"
        assert written.read_text(encoding="utf-8") == page, hint


# Keys that work and that no room reads: config/ turns them into others, or takes only one value of theirs.
SETTLED_IN_CONFIG = {"infer_backend", "do_train", "use_cpu", "no_cuda"}
WORKING = [info.name for info in TABLE.values() if info.status == "works" and info.name not in SETTLED_IN_CONFIG]


@pytest.fixture(scope="module")
def other_rooms() -> str:
    rooms = Path(__file__).parents[2] / "src" / "surefoot"
    return "\n".join(path.read_text(encoding="utf-8") for path in rooms.rglob("*.py") if path.parent.name != "config")


@pytest.mark.parametrize("name", WORKING)
def test_every_key_that_works_is_read_somewhere(name, other_rooms):
    assert re.search(rf"\.{name}\b|[\"']{name}[\"']", other_rooms), f"no room reads cfg.{name}; what does it do?"
