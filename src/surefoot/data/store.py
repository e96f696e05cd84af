"""Encoded training items on disk: flat arrays in a folder, memory mapped when read.

- ids.bin, labels.bin: int32 [tokens], all items end to end
- items.npy: int64 [items + 1], where each item's tokens begin; the last entry is the total
- segments.npy: int64 [items + 1], where each item's segments begin in the two arrays below
- lengths.npy: int32 [segments], tokens of each segment
- origins.npy: int64 [segments, 4], a segment's first and last row, each as (which of meta["names"], position)
- meta.json: format, fingerprint, names, joined, max_token_id, and what the report needs
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from surefoot.data.messages import Sample
from surefoot.files import explain_disk_errors, write_json

FORMAT = 1
META_FILE = "meta.json"
SPAN = ".."
"""Stands between the first and the last row id of a segment that was cut out of several rows."""
_SPANNED = re.compile(r"(.+:\d+)\.\.(.+:\d+)")


class TokenStore:
    """The items of one folder.

    Args:
        folder: what a StoreWriter has filled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        self.items = np.load(folder / "items.npy")
        self.segments = np.load(folder / "segments.npy")
        self.segment_lengths = np.load(folder / "lengths.npy")
        self.origins = np.load(folder / "origins.npy")
        self._ids = _map(folder / "ids.bin", int(self.items[-1]))
        self._labels = _map(folder / "labels.bin", int(self.items[-1]))

    def __len__(self) -> int:
        return len(self.items) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item, int64 [items]."""
        return np.diff(self.items)

    def sample(self, item: int) -> Sample:
        """Read one item.

        Args:
            item: its position.

        Returns:
            The item; its arrays are copies in memory.
        """
        start, stop = self.items[item], self.items[item + 1]
        first, last = self.segments[item], self.segments[item + 1]
        return Sample(
            row_ids=tuple(self._row_id(*origin) for origin in self.origins[first:last].tolist()),
            input_ids=np.array(self._ids[start:stop]),
            labels=np.array(self._labels[start:stop]),
            segments=tuple(self.segment_lengths[first:last].tolist()),
            joined=bool(self.meta["joined"]),
        )

    def _row_id(self, first_source: int, first_row: int, last_source: int, last_row: int) -> str:
        names = self.meta["names"]
        first, last = f"{names[first_source]}:{first_row}", f"{names[last_source]}:{last_row}"
        return first if first == last else f"{first}{SPAN}{last}"


def is_store(folder: Path) -> bool:
    """Tell whether a folder holds items that this version can read."""
    try:
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return isinstance(meta, dict) and meta.get("format") == FORMAT


class StoreWriter:
    """Fills a folder with items, a block at a time; only the small arrays stay in memory until the end.

    Args:
        folder: an empty folder, usually one of `surefoot.files.whole_folder`.
        names: the datasets that the rows come from.
        joined: see `Sample.joined`.
    """

    def __init__(self, folder: Path, names: Sequence[str], *, joined: bool = False) -> None:
        self.folder, self.names, self.joined = folder, list(names), joined
        self._tokens: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._origins: list[np.ndarray] = []
        self.max_token_id = -1
        self._files: list[BinaryIO] = []

    def __enter__(self) -> StoreWriter:
        with explain_disk_errors(self.folder):
            self._files = [(self.folder / name).open("wb") for name in ("ids.bin", "labels.bin")]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with explain_disk_errors(self.folder):
            for file in self._files:
                file.close()

    def add_rows(self, ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> None:
        """Add items of one row each, of the first of `names`.

        Args:
            ids: token ids of all the rows end to end, int32 [tokens].
            labels: the same for labels.
            lengths: tokens of each row, int [rows].
            rows: each row's position in its dataset, int [rows].
        """
        self._write(ids, labels)
        self._tokens.append(lengths.astype(np.int64))
        self._counts.append(np.ones(len(rows), dtype=np.int64))
        self._lengths.append(lengths.astype(np.int32))
        origin = np.stack([np.zeros_like(rows), rows], axis=1)
        self._origins.append(np.concatenate([origin, origin], axis=1, dtype=np.int64))

    def add_sample(self, sample: Sample) -> None:
        """Add one item with its row ids, whose names must be among `names`."""
        self._write(sample.input_ids, sample.labels)
        self._tokens.append(np.array([len(sample.input_ids)], dtype=np.int64))
        self._counts.append(np.array([len(sample.segments)], dtype=np.int64))
        self._lengths.append(np.array(sample.segments, dtype=np.int32))
        self._origins.append(np.array([self._origin(row_id) for row_id in sample.row_ids], dtype=np.int64))

    def _origin(self, row_id: str) -> list[int]:
        span = _SPANNED.fullmatch(row_id)
        origin = []
        for end in span.groups() if span else (row_id, row_id):
            name, row = end.rsplit(":", 1)
            origin += [self.names.index(name), int(row)]
        return origin

    def finish(self, meta: dict[str, Any]) -> None:
        """Write the small arrays and `meta`.

        Args:
            meta: what else to keep; must be JSON.
        """
        with explain_disk_errors(self.folder):
            _save(self.folder / "items.npy", _starts(self._tokens))
            _save(self.folder / "segments.npy", _starts(self._counts))
            _save(self.folder / "lengths.npy", _join(self._lengths, np.int32))
            _save(self.folder / "origins.npy", _join(self._origins, np.int64).reshape(-1, 4))
        known = {
            "format": FORMAT,
            "names": self.names,
            "joined": self.joined,
            "max_token_id": self.max_token_id,
        }
        write_json(self.folder / META_FILE, {**known, **meta})

    def _write(self, ids: np.ndarray, labels: np.ndarray) -> None:
        if len(ids):
            self.max_token_id = max(self.max_token_id, int(ids.max()))
        with explain_disk_errors(self.folder):
            for file, array in zip(self._files, (ids, labels), strict=True):
                file.write(array.astype(np.int32, copy=False).tobytes())  # unlike tofile, it says why it fails


def _map(path: Path, tokens: int) -> np.ndarray:
    if tokens == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=np.int32)
    return np.memmap(path, dtype=np.int32, mode="r", shape=(tokens,))


def _save(path: Path, array: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, array)
    path.write_bytes(content.getvalue())


def _starts(counts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(_join(counts, np.int64), dtype=np.int64)])


def _join(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
