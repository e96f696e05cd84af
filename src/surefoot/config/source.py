"""Reading the file and the command line into plain values, with the place of every mistake."""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.config.overrides import parse_overrides
from surefoot.errors import Problem, UserError

SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Source:
    """What the person wrote.

    Attributes:
        values: key -> value, interpolations resolved; keys may be misspelt and values wrong.
        lines: key -> its line in the file, counted from 1.
    """

    values: dict[Any, Any]
    lines: dict[str, int] = field(default_factory=dict)


def read_source(path: Path | None, overrides: Sequence[str] = ()) -> Source:
    """Read a YAML or JSON file and the overrides of the command line.

    Args:
        path: the file, or None for overrides alone.
        overrides: `key=value`, `--key=value`, `--key value` or a bare `--switch`.

    Returns:
        The values, not yet checked.

    Raises:
        UserError: the file or an override cannot be read.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values, lines = ({}, {}) if path is None else _read_file(path.expanduser())
    try:
        over = parse_overrides(overrides)
        config = OmegaConf.merge(OmegaConf.create(values), over)
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _omegaconf_error(error) from error
    # A value from the command line must not be blamed on the file's line.
    lines = {key: line for key, line in lines.items() if key not in over}
    return Source(dict(plain), lines)  # type: ignore[arg-type]


def _read_file(path: Path) -> tuple[dict[Any, Any], dict[str, int]]:
    if path.is_dir():
        raise UserError(f"{path} is a folder", hint="name the YAML file inside it")
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path} is not a config file by its name", hint="name a .yaml, .yml or .json file")
    if not path.exists():
        raise UserError(f"there is no file {path}", hint=_near_file(path))
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path} is not UTF-8 text (line {line})", hint="save it as UTF-8") from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", hint="check the file and its permissions"
        ) from error
    read = _read_json if path.suffix.lower() == ".json" else _read_yaml
    return read(path, text)


def _omegaconf_error(error: Any) -> UserError:
    key = error.full_key or error.key
    reason = str(error).splitlines()[0]
    hint = "a literal ${ is written \\${" if type(error).__name__ != "MissingMandatoryValue" else "give it a value"
    return UserError(f"cannot be worked out: {reason}", hint=hint, key=str(key) if key else None)


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} either"
    names = [item.name for item in path.parent.iterdir() if item.suffix.lower() in SUFFIXES]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"did you mean {path.parent / near[0]}?" if near else "check the path, relative to the current folder"


def _read_yaml(path: Path, text: str) -> tuple[dict[Any, Any], dict[str, int]]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise UserError(f"{path} is empty", hint="give at least model_name_or_path and dataset")
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path} holds no settings", hint="write one `key: value` a line")
        _refuse_duplicates(path, root)
        loaded = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = "indent with spaces, not tabs" if "\\t" in str(error.problem) else "check colons, quotes and indentation"
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise UserError(f"{path} is not valid YAML{place}: {reason}", hint=hint) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise UserError(f"{path} has an unprintable character (line {line})", hint="remove it") from error
    except OmegaConfBaseException as error:
        raise _omegaconf_error(error) from error
    lines = {key.value: key.start_mark.line + 1 for key, _ in root.value}
    return OmegaConf.to_container(loaded, resolve=False), lines  # type: ignore[return-value]


def _refuse_duplicates(path: Path, root: Any) -> None:
    """Refuse keys that stand twice, and anchors inside themselves, which nothing can be made of."""
    import yaml

    problems: list[Problem] = []
    done: set[int] = set()

    def visit(node: Any, above: tuple[int, ...]) -> None:
        if id(node) in above:
            raise yaml.constructor.ConstructorError(None, None, "an alias inside its own anchor", node.start_mark)
        if id(node) in done:
            return
        done.add(id(node))
        below = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                visit(item, below)
        elif isinstance(node, yaml.MappingNode):
            problems.extend(_duplicates(path, node))
            for _, value in node.value:
                visit(value, below)

    visit(root, ())
    if problems:
        raise UserError.from_problems(problems)


def _duplicates(path: Path, mapping: Any) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for key, _ in mapping.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in first and key.tag != "tag:yaml.org,2002:merge":
            message = f"stands twice in {path}: in line {first[name]} and in line {line}"
            yield Problem(message, "keep one of them", key=name)
        first.setdefault(name, line)


def _read_json(path: Path, text: str) -> tuple[dict[Any, Any], dict[str, int]]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise UserError(f"stands twice in {path}", hint="keep one of them", key=key)
            seen[key] = value
        return seen

    if not text.strip():
        raise UserError(f"{path} is empty", hint="give at least model_name_or_path and dataset")
    try:
        values = json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path} is not valid JSON at {place}: {error.msg}", hint="check commas and quotes") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no settings", hint='write {"key": value, …}')
    return values, {}
