"""Where rows come from: local files, a folder, a hub, a cloud address. Read in order, never all at once."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from surefoot.data.catalog import ROW_FILES, DatasetEntry
from surefoot.data.json_rows import read_json_rows
from surefoot.errors import UserError

PIECE = 1 << 20  # bytes read at a time
ROWS = 1000  # rows taken at a time from formats that store them in blocks


class RowSource(Protocol):
    """The rows of one dataset."""

    def rows(self) -> Iterator[Any]:
        """Every row from the first on, as the file has it; what is not a dict is for the converter to refuse."""
        ...

    def share(self) -> float | None:
        """How much of the source the rows handed out so far are, from 0 to 1; None = cannot tell."""
        ...

    def fingerprint(self, *, whole: bool = True) -> str:
        """A text that changes when any row changes.

        Args:
            whole: False looks at the sizes, beginnings and ends of files alone: for rows that are to be streamed.

        Returns:
            The text.
        """
        ...


def open_source(entry: DatasetEntry, cfg: Any) -> RowSource:
    """Find the rows of a dataset, without reading them yet.

    Args:
        entry: the dataset.
        cfg: the run's settings: `streaming`, `cache_dir`, `hf_hub_token`, `ms_hub_token`.

    Returns:
        The source.

    Raises:
        UserError: the file or folder is missing or of a kind that holds no rows, or the hub cannot be reached.
    """
    if entry.kind == "file":
        return FileSource(entry.name, _find_files(entry))
    if entry.kind == "cloud":
        return CloudSource(entry.name, entry.place)
    return HubSource(entry, _load_hub(entry, cfg), bool(cfg.streaming))


class FileSource:
    """Local files of one kind, one after the other.

    Args:
        name: the dataset's name.
        files: the files in reading order.
    """

    def __init__(self, name: str, files: tuple[Path, ...]) -> None:
        self.name, self.files = name, files
        self._bytes_before = 0
        self._handle: BinaryIO | None = None

    def rows(self) -> Iterator[Any]:
        """Every row of every file."""
        self._bytes_before, self._handle = 0, None
        for path in self.files:
            try:
                with path.open("rb") as self._handle:
                    yield from READERS[ROW_FILES[path.suffix.lower()]](self._handle, path)
                self._bytes_before, self._handle = self._bytes_before + path.stat().st_size, None
            except OSError as error:
                raise _unreadable(str(path), error) from error

    def share(self) -> float:
        """The share of the files' bytes that has been read."""
        here = 0 if self._handle is None or self._handle.closed else self._handle.tell()
        return min((self._bytes_before + here) / max(sum(path.stat().st_size for path in self.files), 1), 1.0)

    def fingerprint(self, *, whole: bool = True) -> str:
        """A hash of the files' contents; their names and dates do not matter.

        Args:
            whole: False looks at each file's size, first and last piece alone.

        Returns:
            32 hexadecimal digits.

        Raises:
            UserError: a file cannot be read.
        """
        digest = hashlib.blake2b(digest_size=16)
        for path in self.files:
            try:
                size = path.stat().st_size
                with path.open("rb") as handle:
                    digest.update(handle.read(PIECE))
                    if not whole:
                        handle.seek(max(size - PIECE, 0))
                    while piece := handle.read(PIECE):
                        digest.update(piece)
            except OSError as error:
                raise _unreadable(str(path), error) from error
            digest.update(f"|{path.suffix.lower()}|{size}|".encode())
        return digest.hexdigest()


def _unreadable(what: str, error: OSError) -> UserError:
    reason = error.strerror or error
    return UserError(
        f"{what} cannot be read: {reason}", hint="check that it is there and readable for you", key="dataset"
    )


@dataclass(frozen=True)
class CloudSource:
    """One JSON file at an address that fsspec knows (s3://, gs://, ...).

    Attributes:
        name: the dataset's name.
        address: where it is.
    """

    name: str
    address: str

    def rows(self) -> Iterator[Any]:
        """Every row of the file, read over the network as they are asked for."""
        filesystem, path = self._open()
        try:
            with filesystem.open(path, "rb") as handle:
                yield from read_json_rows(handle, self.address)
        except OSError as error:
            raise _unreadable(f"dataset '{self.name}': {self.address}", error) from error

    def share(self) -> None:
        """Not known: the store is not asked for the size."""

    def fingerprint(self, *, whole: bool = True) -> str:
        """The address and what the store says of the file's version."""
        filesystem, path = self._open()
        try:
            return f"{self.address}|{filesystem.checksum(path)}"
        except OSError as error:
            raise _unreadable(f"dataset '{self.name}': {self.address}", error) from error

    def _open(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        try:
            return url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"dataset '{self.name}': {self.address} cannot be opened: {error}",
                hint="install the package that it names, or download the file and use file_name",
                key="dataset",
            ) from error


@dataclass(frozen=True)
class HubSource:
    """A dataset that the `datasets` library (or ModelScope) has fetched, or streams.

    Attributes:
        entry: the dataset.
        dataset: a datasets.Dataset or IterableDataset.
        streaming: True when rows come over the network as they are asked for.
    """

    entry: DatasetEntry
    dataset: Any
    streaming: bool

    def rows(self) -> Iterator[Any]:
        """Every row of the split."""
        yield from self.dataset

    def share(self) -> None:
        """Not known."""

    def fingerprint(self, *, whole: bool = True) -> str:
        """The library's own fingerprint of the rows; of a streamed dataset its address."""
        known = "" if self.streaming else str(self.dataset._fingerprint)
        return f"{self.entry.place}|{self.entry.revision}|{self.entry.subset}|{self.entry.split}|{known}"


def _find_files(entry: DatasetEntry) -> tuple[Path, ...]:
    path = Path(entry.place).expanduser()
    if entry.split != "train":
        raise UserError(
            f"dataset '{entry.name}': split '{entry.split}' is for hub datasets; a local file has only 'train'",
            hint="remove split from the entry; max_samples takes the first rows",
            key="dataset_dir",
        )
    if path.is_dir():
        files = tuple(sorted(f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")))
        kinds = sorted({f.suffix.lower() for f in files})
        if not files:
            raise UserError(
                f"dataset '{entry.name}': the folder {path} has no files", hint="put files of rows there", key="dataset"
            )
        if len(kinds) > 1:
            raise UserError(
                f"dataset '{entry.name}': the folder {path} mixes {', '.join(k or 'no extension' for k in kinds)}",
                hint="keep one kind of file in it",
                key="dataset",
            )
    elif path.is_file():
        files = (path,)
    else:
        raise UserError(
            f"dataset '{entry.name}': the file {path} does not exist (looked in {Path.cwd()})",
            hint="mend file_name in dataset_info.json, or dataset_dir",
            key="dataset",
        )
    if files[0].suffix.lower() not in ROW_FILES:
        raise UserError(
            f"dataset '{entry.name}': {files[0].name} is of no kind that holds rows",
            hint=f"known: {', '.join(ROW_FILES)}",
            key="dataset",
        )
    return files


def _load_hub(entry: DatasetEntry, cfg: Any) -> Any:
    if entry.kind == "modelscope":
        return _load_modelscope(entry, cfg)
    from datasets import load_dataset
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return load_dataset(
            entry.place,
            name=entry.subset,
            data_dir=entry.folder,
            data_files=entry.hub_file,
            split=entry.split,
            cache_dir=cfg.cache_dir,
            token=cfg.hf_hub_token,
            revision=entry.revision,
            streaming=bool(cfg.streaming),
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError, RuntimeError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"dataset '{entry.name}': {entry.place} could not be loaded from the Hugging Face hub: {first_line}",
            hint="check the name, the split and the network; a file on this machine is named by file_name in"
            " dataset_info.json, or by its path: ./rows.jsonl",
            key="dataset",
        ) from error


def _load_modelscope(entry: DatasetEntry, cfg: Any) -> Any:
    try:
        from modelscope import MsDataset  # type: ignore[import-not-found]  # optional
    except ImportError:
        raise UserError(
            f"dataset '{entry.name}' is on ModelScope, and the package modelscope is not installed",
            hint="pip install modelscope, or unset USE_MODELSCOPE_HUB where the dataset has a Hugging Face name too",
            key="dataset",
        ) from None
    loaded = MsDataset.load(
        entry.place,
        subset_name=entry.subset,
        data_dir=entry.folder,
        split=entry.split,
        cache_dir=cfg.cache_dir,
        token=cfg.ms_hub_token,
        use_streaming=bool(cfg.streaming),
    )
    return loaded.to_hf_dataset() if isinstance(loaded, MsDataset) else loaded


def _json_file(handle: BinaryIO, path: Path) -> Iterator[Any]:
    yield from read_json_rows(handle, str(path))


def _csv_file(handle: BinaryIO, path: Path) -> Iterator[Any]:
    """Every value is text: a CSV has no types, and a column of numbers is still what the model shall write."""
    import pyarrow as pa
    from pyarrow import csv

    if path.stat().st_size == 0:
        return
    parse = csv.ParseOptions(newlines_in_values=True)
    read = csv.ReadOptions(use_threads=False)  # threads would lose the row numbers in errors
    with _explain_arrow(path):
        with csv.open_csv(path, read_options=read, parse_options=parse) as reader:
            names = reader.schema.names
        convert = csv.ConvertOptions(column_types={name: pa.string() for name in names}, strings_can_be_null=False)
        yield from _batches(csv.open_csv(handle, read_options=read, parse_options=parse, convert_options=convert))


def _parquet_file(handle: BinaryIO, path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with _explain_arrow(path), pq.ParquetFile(handle) as file:
        yield from _batches(file.iter_batches(batch_size=ROWS))


def _arrow_file(handle: BinaryIO, path: Path) -> Iterator[Any]:
    """Both of Arrow's layouts: `datasets` writes the stream, most other tools the file."""
    import pyarrow as pa

    is_file = handle.read(6) == b"ARROW1"
    handle.seek(0)
    with _explain_arrow(path):
        if is_file:
            file = pa.ipc.open_file(handle)
            yield from _batches(file.get_batch(i) for i in range(file.num_record_batches))
        else:
            yield from _batches(pa.ipc.open_stream(handle))


def _text_file(handle: BinaryIO, path: Path) -> Iterator[Any]:
    first = True
    try:
        for line in handle:
            text = line.decode("utf-8-sig" if first else "utf-8")
            first = False
            yield {"text": text.rstrip("\r\n")}
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, {_first_bad_byte(path)}: not valid UTF-8 text ({error.reason})",
            hint="save the file as UTF-8",
            key="dataset",
        ) from None


def _batches(batches: Any) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS):
            yield from batch.slice(start, ROWS).to_pylist()


@contextlib.contextmanager
def _explain_arrow(path: Path) -> Generator[None]:
    """Turn what pyarrow says of a damaged file into an error that names the file."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path} cannot be read as {path.suffix.lower().lstrip('.')}: {first_line}",
            hint="write the file again, or save it as UTF-8 where it is text",
            key="dataset",
        ) from error


def _first_bad_byte(path: Path) -> str:
    """Find the place of the first byte that is not UTF-8; only called once reading has failed."""
    line, before = 1, 0
    with path.open("rb") as handle:
        for text in handle:
            try:
                text.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"line {line} (byte {before + error.start})"
            line, before = line + 1, before + len(text)
    return "at its end"


READERS: dict[str, Callable[[BinaryIO, Path], Iterator[Any]]] = {
    "json": _json_file,
    "csv": _csv_file,
    "parquet": _parquet_file,
    "arrow": _arrow_file,
    "text": _text_file,
}
