"""Datasets with planted bad rows, and the way from them to training items, for the tests of this room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers import byte_tokenizer
from surefoot.config import make_config
from surefoot.data.prepare import PreparedData, prepare_data
from surefoot.data.template import get_template


def alpaca(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"instruction": f"question {i}", "input": "", "output": f"answer {i}"} for i in range(start, start + count)]


PLANTED = [
    *alpaca(6),
    {"instruction": "no output"},
    {"instruction": "empty", "output": ""},
    {"instruction": "null", "output": None},
    {"instruction": 7, "output": "x"},
    "no object",
    {"instruction": "broken \ud83d", "output": "x"},
    {"instruction": "bell \x07", "output": "cafÃ©"},
    {"instruction": "\ufffd", "output": "x"},
    {"instruction": "long " * 60, "output": "x"},
    {"instruction": "x", "output": "long " * 60},
]


class Data:
    """Writes datasets with write(name, rows), prepares them with run(**keys)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "data"
        self.folder.mkdir()
        self.catalog: dict[str, Any] = {}
        self.tokenizer = byte_tokenizer()
        self.template = get_template("default", self.tokenizer)
        self.template.fix_tokenizer(self.tokenizer)
        self.heard: list[tuple[str, int, float | None]] = []

    def write(self, name: str, rows: Any, **entry: Any) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
        self.catalog[name] = {"file_name": f"{name}.json", **entry}
        (self.folder / "dataset_info.json").write_text(json.dumps(self.catalog))

    def run(self, dataset: str | None = "d", **keys: Any) -> PreparedData:
        keys = {"cutoff_len": 200, "preprocessing_num_workers": 1, "dataset_dir": str(self.folder), **keys}
        base = {"model_name_or_path": "none", "template": "default", "dataset": dataset or "d"}
        cfg = make_config({**base, **keys})
        if dataset is None:  # the YAML's own checks want a dataset wherever there is training
            cfg = cfg.model_copy(update={"dataset": None})
        hear = lambda what, rows, share: self.heard.append((what, rows, share))  # noqa: E731
        return prepare_data(cfg, self.tokenizer, self.template, progress=hear)

    def ids(self, table: Any) -> list[str]:
        return [row_id for sample in table for row_id in sample.row_ids]

    def text(self, sample: Any) -> str:
        return self.tokenizer.decode(sample.input_ids)
