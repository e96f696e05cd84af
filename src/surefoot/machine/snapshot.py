"""One JSON document that holds what a machine showed, and a reader that never trusts its shape.

Every piece of evidence is one of three: *yes* (here is its content), *no* (we looked, it is not there: `null`), or
*could not look* (an `{"error": "EACCES"}` entry, or no entry at all). The reader keeps them apart: `present` and
`absent` are both false when nobody could look. docs/cases.md describes every section.
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.errors import UserError

SCHEMA = "surefoot.snapshot/1"
#: Last entry of a folder's listing that leaves names out.
PARTIAL = "..."
_TREE = ("files", "dirs", "links", "nodes")


@dataclass(frozen=True)
class Node:
    """A device node.

    Attributes:
        mode: permission bits.
        uid: owner's number.
        gid: group's number.
        group: group's name as this machine's group file has it, empty when it has none.
        open: `ok`, an errno name such as `EACCES` from really opening it read-write, or empty if not tried.
    """

    mode: int
    uid: int
    gid: int
    group: str
    open: str


@dataclass(frozen=True)
class Command:
    """What a command answered: exit code, output and error text; `error` names why there is no answer (`timeout`)."""

    rc: int
    out: str
    err: str
    error: str = ""


@dataclass(frozen=True)
class Dist:
    """One installed Python distribution, read from its metadata without importing it.

    Attributes:
        name: normalised name (lower case, dashes).
        version: as its metadata says, local tag included.
        summary: its one-line summary.
        requires: its Requires-Dist lines.
        top: import names whose files it owns.
        installer: pip, uv, conda or empty.
        modified: when its metadata was written, seconds since 1970; 0 if unknown.
        origin: where it was installed from, if the installer wrote that down.
    """

    name: str
    version: str
    summary: str = ""
    requires: tuple[str, ...] = ()
    top: tuple[str, ...] = ()
    installer: str = ""
    modified: float = 0.0
    origin: str = ""


def as_dict(value: object) -> dict[str, Any]:
    """Take a mapping with text keys as it is; anything else counts as empty."""
    return {k: v for k, v in value.items() if isinstance(k, str)} if isinstance(value, dict) else {}


def as_text(value: object) -> str:
    """Take text as it is and numbers as text; anything else counts as empty."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def as_int(value: object, default: int = 0) -> int:
    """Take a whole number, also one written as text; anything else gives the default."""
    if isinstance(value, bool):
        return default
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value == value and abs(value) < 2**63 else default
    text = value.strip() if isinstance(value, str) else ""
    try:
        return int(text, 0) if text[:2].lower() == "0x" else int(text)
    except ValueError:
        return default


def as_mode(value: object, default: int = 0o660) -> int:
    """Take permission bits as people write them: `"0660"`, `660`, `0o660`, YAML's octal 0660 (432), `crw-rw----`."""
    if isinstance(value, str):
        text = value.strip().lower()
        if re.fullmatch(r"(0o)?[0-7]{3,7}", text):
            return int(text.removeprefix("0o"), 8) & 0o7777
        if re.fullmatch(r".?([r-][w-][xst-]){3}[+.@]?", text):
            letters = text.rstrip("+.@")[-9:]
            return sum(1 << (8 - i) for i, letter in enumerate(letters) if letter != "-")
        return default
    number = as_int(value, default)
    if number > 0o777 and re.fullmatch(r"[0-7]{3}", str(number)):  # digits that were meant as octal
        return int(str(number), 8)
    return number & 0o7777 if number >= 0 else default


def as_float(value: object, default: float = 0.0) -> float:
    """Take a finite number; anything else gives the default."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    return float(value) if abs(value) < 1e300 else default


def as_texts(value: object) -> tuple[str, ...]:
    """Take the texts (and numbers, as text) of a list; anything else counts as empty."""
    if isinstance(value, str):
        return (value,)
    return tuple(as_text(v) for v in value if as_text(v)) if isinstance(value, (list, tuple)) else ()


def as_numbers(value: object) -> list[int] | None:
    """Take a list of whole numbers, also one written as text (`1000 44`); anything else counts as unknown."""
    if isinstance(value, str) and re.fullmatch(r"\s*(\d{1,10}[\s,]*)*", value):
        value = re.split(r"[\s,]+", value.strip()) if value.strip() else []
    return [as_int(v, -1) for v in value] if isinstance(value, list) else None


def dist_name(name: str) -> str:
    """Normalise a distribution's name as PyPI does: `rocm_sdk_core` gives `rocm-sdk-core`."""
    return name.lower().replace("_", "-").replace(".", "-")


def key_values(text: str) -> dict[str, int]:
    """Read `key value` lines with whole numbers, as KFD's properties files have them."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        key, _, value = line.strip().partition(" ")
        if key and value.strip().lstrip("-").isdigit() and len(value) < 40:
            found[key] = int(value)
    return found


def clean_path(path: str) -> str:
    """Normalise a path; the two spellings of KFD's folder become one."""
    path = posixpath.normpath(path) if path.startswith("/") else path
    for alias, real in (("/sys/class/kfd", "/sys/devices/virtual/kfd"), ("/var/run/", "/run/")):
        if path.startswith(alias):
            return real + path[len(alias) :]
    return path


@dataclass
class Snapshot:
    """Typed access to a snapshot; whatever has the wrong type counts as never captured."""

    raw: dict[str, Any]
    _kinds: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    _absent: set[str] = field(default_factory=set, repr=False)
    _errors: dict[str, str] = field(default_factory=dict, repr=False)
    _names: dict[str, set[str]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for section in _TREE:
            kept: dict[str, Any] = {}
            for path, value in as_dict(self.raw.get(section)).items():
                path = clean_path(path)
                if value is None:
                    self._absent.add(path)
                elif isinstance(value, dict) and isinstance(value.get("error"), str):
                    self._errors[path] = value["error"]
                else:
                    kept[path] = value
            self._kinds[section] = kept
        self._index_names()

    def _index_names(self) -> None:
        """Let every captured path also count as an entry of the folders above it."""
        for section in _TREE:
            for path in self._kinds[section]:
                if self._gone(path):
                    continue
                while path != "/" and path.startswith("/"):
                    parent, name = posixpath.split(path)
                    names = self._names.setdefault(parent, set())
                    if name in names:
                        break
                    names.add(name)
                    path = parent

    def _gone(self, path: str) -> bool:
        """Tell whether a path or a folder above it is known to be missing."""
        while path.startswith("/"):
            if path in self._absent:
                return True
            if path == "/":
                return False
            path = posixpath.dirname(path)
        return False

    # ---- the file tree ----
    def text(self, path: str) -> str:
        """Content of a text file, stripped at the end; empty when it is missing or could not be read."""
        path = clean_path(path)
        value = self._kinds["files"].get(path)
        if value is None or self._gone(path):
            return ""
        if isinstance(value, dict):  # hand-written `key: value` lines
            return "\n".join(f"{k} {as_text(v)}" for k, v in value.items() if isinstance(k, str))
        return as_text(value).rstrip()

    def link(self, path: str) -> str:
        """Target of a symbolic link, or an empty string."""
        path = clean_path(path)
        return "" if self._gone(path) else as_text(self._kinds["links"].get(path))

    def node(self, path: str) -> Node | None:
        """A device node, or None when it is missing or was not looked at."""
        path = clean_path(path)
        value = self._kinds["nodes"].get(path)
        if not isinstance(value, dict) or self._gone(path):
            return None
        return Node(
            as_mode(value.get("mode", "0660")),
            as_int(value.get("uid")),
            as_int(value.get("gid"), -1),
            as_text(value.get("group")),
            as_text(value.get("open")),
        )

    def present(self, path: str) -> bool:
        """Tell whether a path is known to exist."""
        path = clean_path(path)
        if self._gone(path):
            return False
        if any(path in self._kinds[section] for section in _TREE):
            return True
        parent, name = posixpath.split(path)
        return path in self._names or name in self._names.get(parent, ()) or name in self.listing(parent)

    def absent(self, path: str) -> bool:
        """Tell whether a path is known not to exist: looked for and missing, or not in its folder's listing."""
        path = clean_path(path)
        if self._gone(path):
            return True
        if path in self._errors or self.present(path):
            return False
        parent, name = posixpath.split(path)
        if parent in self._errors:
            return False
        listing = self._kinds["dirs"].get(parent)
        return isinstance(listing, list) and PARTIAL not in listing and name not in as_texts(listing)

    def error(self, path: str) -> str:
        """Why a path could not be looked at (an errno name), or an empty string."""
        return self._errors.get(clean_path(path), "")

    def listing(self, path: str) -> tuple[str, ...]:
        """Names in a folder: those it was listed with and those captured below it, sorted."""
        path = clean_path(path)
        if self._gone(path):
            return ()
        listed = set(as_texts(self._kinds["dirs"].get(path))) | self._names.get(path, set())
        return tuple(sorted(name for name in listed - {PARTIAL} if posixpath.join(path, name) not in self._absent))

    def listed(self, path: str) -> bool:
        """Tell whether a folder's own list of names was captured, be it empty."""
        path = clean_path(path)
        return isinstance(self._kinds["dirs"].get(path), list) and not self._gone(path)

    def glob(self, pattern: str) -> Iterator[str]:
        """Captured files, folders, links and nodes whose whole path matches a shell pattern, in sorted order."""
        pattern = clean_path(pattern)
        found = {p for section in _TREE for p in self._kinds[section] if fnmatch.fnmatchcase(p, pattern)}
        yield from sorted(p for p in found if not self._gone(p))

    # ---- the other sections ----
    def section(self, name: str) -> dict[str, Any]:
        """A section that is a mapping; empty when it is missing or something else."""
        return as_dict(self.raw.get(name))

    def has(self, name: str) -> bool:
        """Tell whether a section was captured at all."""
        return isinstance(self.raw.get(name), dict)

    def env(self, name: str) -> str | None:
        """An environment variable, or None when it is not set (or the environment was not captured)."""
        value = self.section("env").get(name)
        if isinstance(value, bool):  # YAML reads an unquoted TRUE so
            return "1" if value else "0"
        return as_text(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None

    def command(self, name: str) -> Command | None:
        """What a command answered, or None when it was not run; its key may be the whole command line."""
        commands = self.section("commands")
        value = commands.get(name) or next(
            (v for k, v in sorted(commands.items()) if k.split(" ")[0] == name and v), None
        )
        if isinstance(value, str):
            return Command(0, value, "")
        if not isinstance(value, dict):
            return None
        return Command(
            as_int(value.get("rc")), as_text(value.get("out")), as_text(value.get("err")), as_text(value.get("error"))
        )

    def missing_command(self, name: str) -> bool:
        """Tell whether a command was looked for and is not installed."""
        commands = self.section("commands")
        return name in commands and commands[name] is None and self.command(name) is None

    def journal(self, name: str) -> str:
        """The text of `dmesg` or `log`; empty when there is none."""
        value = self.raw.get(name)
        return "\n".join(as_texts(value)) if isinstance(value, (list, tuple)) else as_text(value)


def load_snapshot(path: Path) -> Snapshot:
    """Read a snapshot file.

    Args:
        path: a JSON file that `surefoot doctor --capture` wrote.

    Returns:
        The snapshot.

    Raises:
        UserError: the file cannot be read or holds no snapshot.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", hint="name a file that `surefoot doctor --capture FILE` wrote"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not JSON: {error}", hint="a snapshot is JSON; a hand-written case ends in .yaml"
        ) from error
    if not isinstance(raw, dict) or not str(raw.get("schema", "")).startswith("surefoot.snapshot/"):
        raise UserError(
            f"{path} is no snapshot: it has no `schema: {SCHEMA}`",
            hint="write one with `surefoot doctor --capture FILE`",
        )
    return Snapshot(raw)
