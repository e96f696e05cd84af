"""Machines written by hand: a small YAML patch over a named base machine, with the verdict that is expected.

The format is described in docs/cases.md; nothing here is needed to diagnose a live machine.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from surefoot.errors import UserError
from surefoot.machine.consequences import (
    gpu_files,
    merge,
    read_site_files,
    remove_gpus,
    revive,
    sync_access,
    sync_module,
    sync_torch,
    whole_dists,
)
from surefoot.machine.snapshot import SCHEMA, Snapshot, as_dict, as_text

_PATHS = ("files", "dirs", "links", "nodes", "commands", "env")
#: Fields of a device node or a command, which may end a dotted key.
_FIELDS = r"(.+)\.(mode|uid|gid|group|open|rc|out|err|error)"
_CASE_KEYS = {
    "name",
    "about",
    "base",
    "gpus",
    "patch",
    "forget",
    "expect",
    "config",
    "source",
    "synthetic",
    "cases",
    "log",
    "dmesg",
}


@dataclass(frozen=True)
class Expect:
    """The verdict of a case.

    Attributes:
        primary: the id expected as PRIMARY, or None when nothing may be found.
        present: ids that must be among the findings.
        absent: ids that must not be.
        any_primary: whether the PRIMARY does not matter.
    """

    primary: str | None
    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    any_primary: bool = False


@dataclass(frozen=True)
class Case:
    """A hand-written machine, its verdict, and the training YAML that goes with it (empty for none)."""

    name: str
    about: str
    snapshot: Snapshot
    expect: Expect
    config: dict[str, Any] = field(default_factory=dict)


def spread(patch: dict[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into nested ones.

    Args:
        patch: keys such as `env.HSA_XNACK`, `files./proc/cmdline` or `python.torch.version`. Behind the sections that
            are keyed by path or name the rest is one key; elsewhere each dot goes one level down.

    Returns:
        The same patch, nested.
    """
    nested: dict[str, Any] = {}
    for key, value in patch.items():
        section, dot, rest = str(key).partition(".")
        if not dot or str(key).startswith("/"):
            merge(nested, {str(key): value})
            continue
        parts = [section, rest] if section in _PATHS else [section, *rest.split(".")]
        if section in ("nodes", "commands") and (field_of := re.fullmatch(_FIELDS, rest)):
            parts = [section, field_of.group(1), field_of.group(2)]
        if section == "files" and "#" in rest:  # one line of a key-value file
            parts = [section, *rest.split("#", 1)]
        if section == "python" and parts[1] == "dists" and len(parts) > 3:
            parts = ["python", "dists", ".".join(parts[2:-1]), parts[-1]]
        piece: Any = value
        for part in reversed(parts):
            piece = {part: piece}
        merge(nested, piece)
    return nested


def base_names() -> list[str]:
    """Names of the base machines in the package; those with a leading underscore are only building blocks."""
    folder = resources.files("surefoot.machine").joinpath("bases")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _read_yaml(text: str, origin: str) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{origin} is not YAML: {error}", hint="see docs/cases.md for the format") from error
    if isinstance(loaded, list):
        return {"cases": loaded}
    if not isinstance(loaded, dict):
        raise UserError(f"{origin} holds neither a case nor a list of cases", hint="see docs/cases.md for the format")
    return loaded


def base_snapshot(name: str) -> dict[str, Any]:
    """Build a base machine.

    Args:
        name: one of `base_names()`.

    Returns:
        Its raw snapshot, a fresh copy.

    Raises:
        UserError: there is no such base.
    """
    entry = resources.files("surefoot.machine").joinpath("bases").joinpath(f"{name}.yaml")
    if not entry.is_file():
        known = ", ".join(n for n in base_names() if not n.startswith("_"))
        raise UserError(f"there is no base machine {name!r}", hint=f"known ones: {known}", key="base")
    return _build(_read_yaml(entry.read_text(encoding="utf-8"), name))


def _build(spec: dict[str, Any]) -> dict[str, Any]:
    """Lay a case's `gpus`, `patch`, `log` and `forget` over its base."""
    raw = base_snapshot(str(spec["base"])) if spec.get("base") else {"schema": SCHEMA}
    patch = whole_dists(spread(as_dict(spec.get("patch"))))
    gpus = spec["gpus"] if "gpus" in spec else patch.pop("gpus", None)
    if gpus is not None:
        remove_gpus(raw)
        merge(raw, gpu_files(gpus))
    before = copy.deepcopy(as_dict(as_dict(raw.get("python")).get("torch")))
    read_site_files(raw, patch)
    revive(raw, patch)
    merge(raw, patch)
    sync_module(raw, patch)
    sync_torch(raw, before, as_dict(patch.get("python")))
    sync_access(raw, patch)
    for journal in ("log", "dmesg"):
        if journal in spec:
            raw[journal] = spec[journal]
    forget = spec.get("forget") or []
    for address in [forget] if isinstance(forget, str) else forget:
        _forget(raw, str(address))
    return raw


def _forget(raw: dict[str, Any], address: str) -> None:
    """Remove what a machine would not let one look at: `files:/proc/cmdline`, `commands:rocminfo`, `dmesg`."""
    section, colon, key = address.partition(":")
    if not colon:
        raw.pop(section, None)
        return
    entries = raw.get(section)
    if isinstance(entries, dict):
        for name in [n for n in entries if n == key or n.startswith(key.rstrip("/") + "/")]:
            del entries[name]


def load_cases(path: Path) -> list[Case]:
    """Read a YAML file with one case, or with a list of them, under `cases` or by itself.

    Args:
        path: the file.

    Returns:
        The cases, built.

    Raises:
        UserError: the file cannot be read, has unknown keys, or names an unknown base.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    loaded = _read_yaml(text, str(path))
    specs = loaded["cases"] if isinstance(loaded.get("cases"), list) else [loaded]
    if not specs:
        raise UserError(f"{path} holds no case", hint="see docs/cases.md for the format")
    for number, spec in enumerate(specs):
        if not isinstance(spec, dict):
            raise UserError(f"{path}: case {number + 1} is no mapping", hint="see docs/cases.md for the format")
    return [build_case(spec, f"{path.stem}[{number}]") for number, spec in enumerate(specs)]


def build_case(spec: dict[str, Any], name: str) -> Case:
    """Build one case from its mapping.

    Args:
        spec: the mapping; docs/cases.md has its keys.
        name: used when it names none.

    Returns:
        The case.

    Raises:
        UserError: an unknown key or base.
    """
    unknown = set(spec) - _CASE_KEYS
    if unknown:
        raise UserError(
            f"case {name}: unknown key {sorted(unknown)[0]!r}", hint=f"known keys: {', '.join(sorted(_CASE_KEYS))}"
        )
    expect = {"primary": spec["expect"]} if isinstance(spec.get("expect"), str) else as_dict(spec.get("expect"))
    primary = expect.get("primary")
    verdict = Expect(
        None if primary in (None, "none", "") else str(primary),
        tuple(str(i) for i in expect.get("present") or ()),
        tuple(str(i) for i in expect.get("absent") or ()),
        any_primary="primary" not in expect,
    )
    snapshot = Snapshot(_build(spec))
    return Case(
        as_text(spec.get("name")) or name, as_text(spec.get("about")), snapshot, verdict, as_dict(spec.get("config"))
    )
