"""Which dataset a name stands for: `dataset_info.json`, LLaMA-Factory's catalogue of datasets.

Two deviations from LLaMA-Factory, both on purpose. A `columns` or `tags` block that leaves names out keeps their
defaults (there, every omitted name becomes "no such column"). And `formatting: openai` starts from OpenAI's own names
(`messages`, `role`, `content`, `user`, `assistant`, `tool`) instead of ShareGPT's.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from surefoot.errors import Problem, UserError

CATALOG_FILE = "dataset_info.json"
ROW_FILES = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""File extensions that hold rows, and the reader for each."""

Formatting = Literal["alpaca", "sharegpt", "openai"]
SourceKind = Literal["file", "hub", "modelscope", "cloud"]

_OPENAI_COLUMNS = {"messages": "messages"}
_OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
}
_TRUE = ("true", "y", "1")  # the values that LLaMA-Factory takes for yes in an environment variable


class Columns(BaseModel):
    """Which column of a row holds what; None = there is no such column. The names are LLaMA-Factory's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    messages: str | None = "conversations"
    system: str | None = None
    tools: str | None = None
    images: str | None = None
    videos: str | None = None
    audios: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    kto_tag: str | None = None


class Tags(BaseModel):
    """How a turn of a conversation says who speaks and what; None = there is no such speaker."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str | None = "human"
    assistant_tag: str | None = "gpt"
    observation_tag: str | None = "observation"
    function_tag: str | None = "function_call"
    system_tag: str | None = "system"


class _Entry(BaseModel):
    """One entry of dataset_info.json as it is written, keys and types only."""

    model_config = ConfigDict(extra="allow")

    hf_hub_url: str | None = None
    ms_hub_url: str | None = None
    om_hub_url: str | None = None
    script_url: str | None = None
    cloud_file_name: str | None = None
    file_name: str | None = None
    file_sha1: str | None = None  # written by old catalogues, never read by LLaMA-Factory either
    formatting: Formatting = "alpaca"
    ranking: bool = False
    revision: str | None = None
    subset: str | None = None
    split: str = "train"
    folder: str | None = None
    num_samples: int | None = None
    columns: Columns = Columns()
    tags: Tags = Tags()


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset, ready to be read.

    Attributes:
        name: the name in the YAML; it starts every row id.
        kind: where the rows are.
        place: a local path, a hub id, or a cloud address.
        formatting: the shape of the rows.
        ranking: True when a row holds a chosen and a rejected answer.
        revision: branch, tag or commit on the hub.
        subset: the hub dataset's configuration.
        split: which split of a hub dataset.
        folder: a folder inside the hub dataset.
        hub_file: the one file of the hub dataset to read; None = all of them.
        num_samples: draw this many rows at random (with replacement beyond the dataset's size); None = all rows.
        columns: which column holds what.
        tags: how turns name their speakers.
        written_columns: the keys of `columns` that the catalogue spells out; a row must have them.
        by_path: True when the YAML names the file itself, and no catalogue says how its rows look.
        warnings: what is odd about the entry but does not stop it.
    """

    name: str
    kind: SourceKind
    place: str
    formatting: Formatting = "alpaca"
    ranking: bool = False
    revision: str | None = None
    subset: str | None = None
    split: str = "train"
    folder: str | None = None
    hub_file: str | None = None
    num_samples: int | None = None
    columns: Columns = Columns()  # noqa: RUF009  # frozen
    tags: Tags = Tags()  # noqa: RUF009  # frozen
    written_columns: tuple[str, ...] = ()
    by_path: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[object, ...]:
        """All that decides what a raw row becomes; its `repr` tells it apart from others."""
        return (self.name, self.formatting, self.columns, self.tags, self.written_columns)


def find_datasets(names: Sequence[str], dataset_dir: str, *, key: str = "dataset") -> list[DatasetEntry]:
    """Look up every dataset of the YAML.

    A name is looked up in `dataset_dir`/dataset_info.json; `ONLINE` takes every name as a hub id; `REMOTE:repo` reads
    the catalogue from a hub dataset. A path to a file with rows (`./rows.jsonl`) needs no catalogue.

    Args:
        names: the names, as split from the YAML's `dataset` or `eval_dataset`.
        dataset_dir: the YAML's `dataset_dir`.
        key: the YAML key to name in errors.

    Returns:
        One entry a name, in order; a name written twice counts once, as in LLaMA-Factory.

    Raises:
        UserError: the catalogue cannot be read, a name is not in it, or an entry is wrong. All wrong names at once.
    """
    catalog: dict[str, Any] | None = None
    entries: list[DatasetEntry] = []
    problems: list[Problem] = []
    for name in dict.fromkeys(names):
        try:
            if dataset_dir == "ONLINE":
                kind: SourceKind = "modelscope" if _wants_modelscope() else "hub"
                entries.append(DatasetEntry(name=name, kind=kind, place=name))
                continue
            has_catalog = (Path(dataset_dir) / CATALOG_FILE).exists()
            if catalog is None and (has_catalog or not _looks_like_path(name)):
                catalog = read_catalog(dataset_dir)
            entries.append(_find_one(name, catalog or {}, dataset_dir, key))
        except UserError as error:
            problems += error.problems
            if catalog is None:
                break  # without a catalogue every further name would repeat the same message
    if problems:
        raise UserError.from_problems(problems)
    return entries


def read_catalog(dataset_dir: str) -> dict[str, Any]:
    """Read dataset_info.json from a folder or, for `REMOTE:repo`, from a hub dataset.

    Args:
        dataset_dir: the YAML's `dataset_dir`.

    Returns:
        The catalogue: name -> entry as written.

    Raises:
        UserError: there is no such folder or file, or it is not a JSON object.
    """
    path = _download_catalog(dataset_dir[len("REMOTE:") :]) if dataset_dir.startswith("REMOTE:") else Path(dataset_dir)
    if path.is_dir():
        path = path / CATALOG_FILE
    elif not path.exists():
        raise UserError(
            f"the folder {dataset_dir} does not exist (looked in {Path.cwd()})",
            hint=f"name the folder that holds {CATALOG_FILE}, or name a file with rows as the dataset: ./rows.jsonl",
            key="dataset_dir",
        )
    try:
        catalog = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist",
            hint="write one that lists your datasets, or name a file with rows as the dataset: ./rows.jsonl",
            key="dataset_dir",
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {error.lineno}, column {error.colno}: not valid JSON ({error.msg})",
            hint="check commas, quotes and brackets there",
            key="dataset_dir",
        ) from None
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{path} cannot be read: {error}", hint="save it as UTF-8, readable for you", key="dataset_dir"
        ) from None
    if not isinstance(catalog, dict):
        hint = 'write {"my_data": {"file_name": "my_data.json"}}'
        raise UserError(f"{path} must hold a JSON object: dataset name -> entry", hint=hint, key="dataset_dir")
    return catalog


def _find_one(name: str, catalog: dict[str, Any], dataset_dir: str, key: str) -> DatasetEntry:
    if name in catalog:
        return _read_entry(name, catalog[name], dataset_dir)
    if _looks_like_path(name):
        found = _find_file(name, dataset_dir)
        if found is None:
            message = f"the data file {name} does not exist (looked in {Path.cwd()} and {dataset_dir})"
            raise UserError(message, hint="check the path, or set `dataset_dir` to its folder", key=key)
        return DatasetEntry(name=name, kind="file", place=str(found), by_path=True)
    where = f"{dataset_dir.removeprefix('REMOTE:')}/{CATALOG_FILE}"
    near = difflib.get_close_matches(name, list(catalog), n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        listed = ", ".join(list(catalog)[:10]) + (", ..." if len(catalog) > 10 else "")
        hint = f"it has: {listed}" if catalog else "it is empty"
    raise UserError(f"dataset '{name}' is not in {where}", hint=hint, key=key)


def _looks_like_path(name: str) -> bool:
    return Path(name).suffix.lower() in ROW_FILES


def _find_file(name: str, dataset_dir: str) -> Path | None:
    for candidate in (Path(name).expanduser(), Path(dataset_dir) / name):
        if candidate.is_file():
            return candidate
    return None


def _read_entry(name: str, written: Any, dataset_dir: str) -> DatasetEntry:
    place = f"{dataset_dir}/{CATALOG_FILE}, dataset '{name}'"
    if not isinstance(written, dict):
        hint = 'write {"file_name": "my_data.json"}'
        raise UserError(f"{place}: an entry must be a JSON object", hint=hint, key="dataset_dir")
    filled = dict(written)
    if written.get("formatting") == "openai":
        for block, names in (("columns", _OPENAI_COLUMNS), ("tags", _OPENAI_TAGS)):
            given = written.get(block) or {}
            filled[block] = {**names, **given} if isinstance(given, dict) else given
    try:
        entry = _Entry.model_validate({key: value for key, value in filled.items() if value is not None})
    except ValidationError as error:
        raise UserError.from_problems(_explain(place, error)) from None
    warnings = _check_extra_keys(place, entry)
    kind, where = _source(place, entry, dataset_dir)
    if entry.num_samples is not None and entry.num_samples < 1:
        hint = "give a number of rows, or remove num_samples to take them all"
        raise UserError(
            f"{place}: num_samples must be at least 1, not {entry.num_samples}", hint=hint, key="dataset_dir"
        )
    return DatasetEntry(
        name=name,
        kind=kind,
        place=where,
        warnings=warnings,
        hub_file=entry.file_name if kind == "hub" and not entry.hf_hub_url else None,
        written_columns=tuple(name for name, value in (written.get("columns") or {}).items() if value is not None),
        **entry.model_dump(
            include={"formatting", "ranking", "revision", "subset", "split", "folder", "num_samples"},
        ),
        columns=entry.columns,
        tags=entry.tags,
    )


def _explain(place: str, error: ValidationError) -> list[Problem]:
    known = {"columns": Columns.model_fields, "tags": Tags.model_fields}
    problems = []
    for found in error.errors():
        path = [str(part) for part in found["loc"]]
        hint = ""
        expected = str(found.get("ctx", {}).get("expected", ""))
        if found["type"] == "extra_forbidden":
            names = known[path[0]]
            near = difflib.get_close_matches(path[-1], list(names), n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
            message = "is not a name that this block knows"
        else:
            message = f"{found['msg'][:1].lower()}{found['msg'][1:]}, but it is {found['input']!r}"
            near = difflib.get_close_matches(str(found["input"]), re.findall(r"'(\w+)'", expected), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"mend {path[-1]} there"
        problems.append(Problem(f"{place}: {'.'.join(path)}: {message}", hint, "dataset_dir"))
    return problems


def _check_extra_keys(place: str, entry: _Entry) -> tuple[str, ...]:
    warnings = []
    for extra in entry.model_extra or {}:
        near = difflib.get_close_matches(extra, list(_Entry.model_fields), n=1, cutoff=0.75)
        if near:
            raise UserError(f"{place}: unknown key '{extra}'", hint=f"did you mean {near[0]}?", key="dataset_dir")
        warnings.append(f"{place}: the key '{extra}' is not known and has no effect")
    return tuple(warnings)


def _source(place: str, entry: _Entry, dataset_dir: str) -> tuple[SourceKind, str]:
    """Choose where to read from, in LLaMA-Factory's order: hubs, script, cloud, file."""
    if entry.ms_hub_url and (_wants_modelscope() or not entry.hf_hub_url):
        return "modelscope", entry.ms_hub_url
    if entry.hf_hub_url:
        return "hub", entry.hf_hub_url
    if entry.om_hub_url:
        raise UserError(
            f"{place}: the OpenMind hub (om_hub_url) is not supported",
            hint="download the dataset and use file_name",
            key="dataset_dir",
        )
    if entry.script_url:
        raise UserError(
            f"{place}: dataset scripts (script_url) cannot be run any more",
            hint="run the script once, save its rows as .jsonl or .parquet, and use file_name",
            key="dataset_dir",
        )
    if entry.cloud_file_name:
        return "cloud", entry.cloud_file_name
    if entry.file_name:
        if dataset_dir.startswith("REMOTE:"):
            return "hub", dataset_dir.removeprefix("REMOTE:")
        return "file", str(Path(dataset_dir) / entry.file_name)
    raise UserError(
        f"{place}: it does not say where its rows are", hint="add file_name or hf_hub_url", key="dataset_dir"
    )


def _wants_modelscope() -> bool:
    return os.environ.get("USE_MODELSCOPE_HUB", "0").lower() in _TRUE


def _download_catalog(repo: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(repo, CATALOG_FILE, repo_type="dataset"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(
            f"{CATALOG_FILE} of the hub dataset {repo} could not be fetched: {error}",
            hint="check the name and the network, or download the dataset and name its folder",
            key="dataset_dir",
        ) from None
