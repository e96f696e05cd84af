"""Reads the table of templates."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.resources import files
from typing import Any

Keys = dict[str, Any]
"""One template's keys, as templates.toml explains them, those of the templates it is like included."""


def read_template_table() -> dict[str, Keys]:
    """Read templates.toml.

    Returns:
        The keys of every template, by its name.
    """
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # the same, before it was built in
    written = tomllib.loads(files("surefoot.data").joinpath("templates.toml").read_text(encoding="utf-8"))
    return {name: _with_inherited(name, written) for name in written}


def _with_inherited(name: str, written: dict[str, Keys]) -> Keys:
    keys = dict(written[name])
    parent = keys.pop("like", None)
    return {**_with_inherited(parent, written), **keys} if parent else keys
