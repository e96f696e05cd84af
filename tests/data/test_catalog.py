"""dataset_info.json: what is found, what keeps its default, and what a wrong entry is told."""

from __future__ import annotations

import json

import pytest

from surefoot.data.catalog import find_datasets
from surefoot.errors import UserError


@pytest.fixture
def catalog(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("USE_MODELSCOPE_HUB", raising=False)

    def write(**entries) -> str:
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(entries))
        return "data"

    return write


def test_defaults_are_those_of_alpaca(catalog):
    [entry] = find_datasets(["a"], catalog(a={"file_name": "a.json"}))
    assert (entry.kind, entry.place, entry.formatting) == ("file", "data/a.json", "alpaca")
    assert (entry.columns.prompt, entry.columns.query, entry.columns.response) == ("instruction", "input", "output")
    assert entry.columns.system is None and entry.columns.history is None


def test_omitted_columns_and_tags_keep_their_defaults(catalog):
    folder = catalog(
        a={"file_name": "a.json", "columns": {"prompt": "q"}},
        s={"file_name": "s.json", "formatting": "sharegpt", "tags": {"role_tag": "role"}},
    )
    alpaca, sharegpt = find_datasets(["a", "s"], folder)
    assert (alpaca.columns.prompt, alpaca.columns.response) == ("q", "output")
    assert alpaca.written_columns == ("prompt",)
    assert (sharegpt.tags.role_tag, sharegpt.tags.content_tag, sharegpt.tags.user_tag) == ("role", "value", "human")
    assert sharegpt.columns.messages == "conversations"


def test_null_takes_a_column_away(catalog):
    [entry] = find_datasets(["a"], catalog(a={"file_name": "a.json", "columns": {"query": None}}))
    assert entry.columns.query is None and entry.written_columns == ()


def test_openai_starts_from_its_own_names(catalog):
    [entry] = find_datasets(["o"], catalog(o={"file_name": "o.json", "formatting": "openai"}))
    assert entry.columns.messages == "messages"
    assert (entry.tags.role_tag, entry.tags.content_tag, entry.tags.observation_tag) == ("role", "content", "tool")
    [entry] = find_datasets(
        ["o"], catalog(o={"file_name": "o", "formatting": "openai", "tags": {"user_tag": "customer"}})
    )
    assert (entry.tags.user_tag, entry.tags.assistant_tag) == ("customer", "assistant")


@pytest.mark.parametrize(
    ("entry", "modelscope", "kind", "place"),
    [
        ({"hf_hub_url": "h/h", "ms_hub_url": "m/m", "file_name": "f.json"}, "0", "hub", "h/h"),
        ({"hf_hub_url": "h/h", "ms_hub_url": "m/m"}, "1", "modelscope", "m/m"),
        ({"hf_hub_url": "h/h"}, "true", "hub", "h/h"),
        ({"ms_hub_url": "m/m"}, "0", "modelscope", "m/m"),
        ({"cloud_file_name": "s3://b/x.json", "file_name": "f.json"}, "0", "cloud", "s3://b/x.json"),
    ],
)
def test_source_priority(catalog, monkeypatch, entry, modelscope, kind, place):
    monkeypatch.setenv("USE_MODELSCOPE_HUB", modelscope)
    [found] = find_datasets(["x"], catalog(x=entry))
    assert (found.kind, found.place) == (kind, place)


def test_online_takes_every_name_as_a_hub_id(catalog):
    [entry] = find_datasets(["someone/rows"], "ONLINE")
    assert (entry.kind, entry.place) == ("hub", "someone/rows")


def test_a_path_needs_no_catalogue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    [entry] = find_datasets(["./rows.jsonl"], "no_such_folder")
    assert (entry.name, entry.kind) == ("./rows.jsonl", "file")


def test_a_name_twice_counts_once(catalog):
    assert len(find_datasets(["a", "a"], catalog(a={"file_name": "a.json"}))) == 1


def test_every_unknown_name_is_told_with_the_nearest(catalog):
    with pytest.raises(UserError) as error:
        find_datasets(["alpaca_en_dem", "zzz"], catalog(alpaca_en_demo={"file_name": "a.json"}))
    first, second = error.value.problems
    assert "alpaca_en_dem" in first.message and "data/dataset_info.json" in first.message
    assert "alpaca_en_demo" in first.hint and "alpaca_en_demo" in second.hint
    assert first.key == "dataset"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"file_name": "a.json", "formatting": "alpacca"}, "formatting"),
        ({"file_name": "a.json", "columns": {"promt": "q"}}, "did you mean prompt"),
        ({"file_name": "a.json", "tags": {"user_tags": "q"}}, "did you mean user_tag"),
        ({"file_name": "a.json", "columns": ["q"]}, "columns"),
        ({"file_name": "a.json", "colums": {}}, "did you mean columns"),
        ({"file_name": 3}, "file_name"),
        ({"file_name": "a.json", "num_samples": 0}, "num_samples"),
        ({"script_url": "s"}, "script"),
        ({"om_hub_url": "s"}, "OpenMind"),
        ({}, "where its rows are"),
        ("a.json", "JSON object"),
    ],
)
def test_a_wrong_entry_is_explained(catalog, entry, said):
    with pytest.raises(UserError) as error:
        find_datasets(["a"], catalog(a=entry))
    assert said in str(error.value) and "'a'" in str(error.value)


def test_an_unknown_key_without_a_near_name_is_a_warning(catalog):
    [entry] = find_datasets(["a"], catalog(a={"file_name": "a.json", "licence_note": "x"}))
    assert "licence_note" in entry.warnings[0]


def test_missing_folder_missing_file_and_broken_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="folder data does not exist"):
        find_datasets(["a"], "data")
    with pytest.raises(UserError, match=r"data file \./no.jsonl does not exist"):
        find_datasets(["./no.jsonl"], "data")
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match=r"data/dataset_info.json does not exist"):
        find_datasets(["a"], "data")
    (tmp_path / "data" / "dataset_info.json").write_text('{\n "a": {,}\n}')
    with pytest.raises(UserError, match="line 2"):
        find_datasets(["a"], "data")
    with pytest.raises(UserError, match=r"data file \./no.jsonl does not exist"):
        find_datasets(["./no.jsonl"], _with_catalog(tmp_path))


def _with_catalog(tmp_path) -> str:
    (tmp_path / "data" / "dataset_info.json").write_text("{}")
    return "data"
