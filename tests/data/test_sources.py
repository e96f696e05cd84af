"""Rows read from every kind of file, and what a damaged file is told."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data import json_rows
from surefoot.data.catalog import DatasetEntry
from surefoot.data.json_rows import read_json_rows
from surefoot.data.sources import open_source
from surefoot.errors import UserError

CFG = SimpleNamespace(streaming=False, cache_dir=None, hf_hub_token=None, ms_hub_token=None)
MIXED = [{"a": "text", "b": 1}, {"a": ["list"], "c": None}, {"a": {"x": 2}}, "no object", {"a": "é🙂\n"}]


def read(path, **entry):
    return list(open_source(DatasetEntry(name="d", kind="file", place=str(path), **entry), CFG).rows())


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_list_and_lines_with_rows_of_different_shapes(tmp_path, name, indent, encoding):
    (tmp_path / name).write_text(json.dumps(MIXED, indent=indent, ensure_ascii=False), encoding=encoding)
    assert read(tmp_path / name) == MIXED
    lines = "\n".join(json.dumps(row, indent=indent, ensure_ascii=False) for row in [MIXED[0], *MIXED])
    (tmp_path / name).write_text(f"\n{lines}\n\n", encoding=encoding)
    assert read(tmp_path / name) == [MIXED[0], *MIXED]


@pytest.mark.parametrize("content", ["", "  \n", "[]", " [ ] "])
def test_json_without_rows(tmp_path, content):
    (tmp_path / "rows.json").write_text(content)
    assert read(tmp_path / "rows.json") == []


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(rows=st.lists(values, max_size=6), piece=st.integers(1, 40), listed=st.booleans(), ascii_only=st.booleans())
def test_the_size_of_a_piece_does_not_matter(rows, piece, listed, ascii_only):
    if listed:
        text = json.dumps(rows, ensure_ascii=ascii_only, indent=piece % 3 or None)
    else:
        # Only a line that starts as a list would be taken for the whole list.
        rows = [{"row": row} for row in rows]
        text = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    before, json_rows.PIECE = json_rows.PIECE, piece
    try:
        assert list(read_json_rows(io.BytesIO(text.encode()), "x")) == rows
    finally:
        json_rows.PIECE = before


@given(cut=st.integers(1, 60), listed=st.booleans(), piece=st.integers(4, 50))
def test_every_truncation_is_noticed_or_leaves_whole_rows(cut, listed, piece):
    rows = [{"q": "what é", "n": -1.5e3, "t": True}, {"q": "why\\n", "l": [1, None]}]
    text = (json.dumps(rows) if listed else "\n".join(json.dumps(row) for row in rows)).encode()[:-cut]
    before, json_rows.PIECE = json_rows.PIECE, piece
    try:
        read = list(read_json_rows(io.BytesIO(text), "rows.json"))
        assert not listed and read == rows[: len(read)]
        assert text.decode().strip() == "\n".join(json.dumps(row) for row in read)
    except UserError as error:
        assert "rows.json" in str(error) and "line" in str(error)
    finally:
        json_rows.PIECE = before


def test_truncated_json_names_file_line_and_byte(tmp_path):
    text = '[\n{"a": "one"},\n{"a": "tw'
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(UserError) as error:
        read(tmp_path / "rows.json")
    assert f"rows.json, line 3: the file is cut off: it ends at byte {len(text)}" in str(error.value)


@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_broken_json_names_line_column_and_byte(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(json_rows, "PIECE", piece)
    lines = ['{"a": "é"}'] * 50 + ['{"a": oops}'] + ['{"a": "x"}'] * 50
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError) as error:
        read(tmp_path / "rows.jsonl")
    assert f"rows.jsonl, line 51, column 7 (byte {50 * 12 + 6})" in str(error.value)


@pytest.mark.parametrize(
    "content", ['[{"a": 1}] x', '[{"a": 1} {"a": 2}]', '{"a": 1}, {"a": 2}', "hello", "[" * 100000]
)
def test_text_that_is_no_rows_is_refused(tmp_path, content):
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(UserError, match="line 1"):
        read(tmp_path / "rows.json")


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "rows.json").write_bytes(b'[{"a": "caf\xe9"}]')
    with pytest.raises(UserError, match="UTF-8"):
        read(tmp_path / "rows.json")
    (tmp_path / "rows.txt").write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"line 2 \(byte 8\)"):
        read(tmp_path / "rows.txt")
    (tmp_path / "rows.csv").write_bytes(b"a,b\ncaf\xe9,x\n")
    with pytest.raises(UserError, match=r"rows.csv cannot be read as csv"):
        read(tmp_path / "rows.csv")


def test_csv_values_stay_text(tmp_path):
    (tmp_path / "rows.csv").write_text('instruction,output\n"two\nlines",042\n"say ""hi""",\n')
    assert read(tmp_path / "rows.csv") == [
        {"instruction": "two\nlines", "output": "042"},
        {"instruction": 'say "hi"', "output": ""},
    ]


def test_csv_with_a_ragged_row_names_it(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(UserError, match=r"Row #3: Expected 2 columns, got 3"):
        read(tmp_path / "rows.csv")


def test_parquet_and_both_arrow_layouts(tmp_path):
    rows = [{"a": f"row {i}", "l": [{"x": i}]} for i in range(2500)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    assert read(tmp_path / "rows.parquet") == rows
    for layout in (pa.ipc.new_file, pa.ipc.new_stream):
        with layout(str(tmp_path / "rows.arrow"), table.schema) as writer:
            writer.write_table(table)
        assert read(tmp_path / "rows.arrow") == rows
    for name in ("bad.parquet", "bad.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 nothing of the kind")
        with pytest.raises(UserError, match=name):
            read(tmp_path / name)


def test_text_lines(tmp_path):
    (tmp_path / "rows.txt").write_text("one\n\ntwo", encoding="utf-8-sig")
    assert read(tmp_path / "rows.txt") == [{"text": "one"}, {"text": ""}, {"text": "two"}]


def test_a_folder_is_read_in_name_order_and_must_hold_one_kind(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"n": name}))
    (tmp_path / ".hidden").write_text("")
    assert read(tmp_path) == [{"n": "a"}, {"n": "b"}]
    (tmp_path / "c.csv").write_text("n\nc\n")
    with pytest.raises(UserError, match=r"mixes \.csv, \.jsonl"):
        read(tmp_path)


def test_missing_unknown_and_split(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "no.json")
    (tmp_path / "rows.xlsx").write_text("x")
    with pytest.raises(UserError, match="of no kind that holds rows"):
        read(tmp_path / "rows.xlsx")
    (tmp_path / "rows.json").write_text("[]")
    with pytest.raises(UserError, match="split 'test'"):
        read(tmp_path / "rows.json", split="test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no files"):
        read(tmp_path / "empty")


def test_fingerprint_follows_the_content_alone(tmp_path):
    def print_of(name, text):
        (tmp_path / name).write_text(text)
        return open_source(DatasetEntry(name="d", kind="file", place=str(tmp_path / name)), CFG).fingerprint()

    assert print_of("a.json", "[1]") == print_of("b.json", "[1]") != print_of("a.json", "[2]")


def test_a_cloud_address_is_read_through_fsspec():
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://rows.jsonl", "w") as handle:
        handle.write('{"a": 1}\n{"a": 2}')
    source = open_source(DatasetEntry(name="c", kind="cloud", place="memory://rows.jsonl"), CFG)
    assert list(source.rows()) == [{"a": 1}, {"a": 2}]
    assert source.fingerprint() == source.fingerprint()
    with pytest.raises(UserError, match=r"nowhere\.jsonl cannot be read"):
        list(open_source(DatasetEntry(name="c", kind="cloud", place="memory://nowhere.jsonl"), CFG).rows())
    with pytest.raises(UserError, match="cannot be opened"):
        list(open_source(DatasetEntry(name="c", kind="cloud", place="nosuch://x.jsonl"), CFG).rows())


def test_the_hub_out_of_reach_is_one_clear_error(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"nobody/nothing could not be loaded from the Hugging Face hub"):
        open_source(DatasetEntry(name="h", kind="hub", place="nobody/nothing"), CFG)


def test_modelscope_missing_is_said():
    with pytest.raises(UserError, match="modelscope is not installed"):
        open_source(DatasetEntry(name="m", kind="modelscope", place="x/y"), CFG)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_datasets_library_loads_what_is_not_a_file(tmp_path, streaming):
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "train.jsonl").write_text('{"a": "1"}\n{"a": "2"}')
    cfg = SimpleNamespace(**{**vars(CFG), "streaming": streaming, "cache_dir": str(tmp_path / "cache")})
    source = open_source(DatasetEntry(name="h", kind="hub", place=str(tmp_path / "repo")), cfg)
    assert list(source.rows()) == list(source.rows()) == [{"a": "1"}, {"a": "2"}]
    assert source.fingerprint() and source.share() is None
    with pytest.raises(UserError, match="could not be loaded"):
        open_source(DatasetEntry(name="h", kind="hub", place=str(tmp_path / "repo"), split="no"), cfg)
