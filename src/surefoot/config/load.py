"""From a YAML to a checked and final `Config`, or to one error that lists everything that is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from surefoot.config.checks import contradictions, deviations
from surefoot.config.explain import empty_value, shown, type_problems, unknown_key
from surefoot.config.key import Purpose
from surefoot.config.resolve import filled_values, resolve
from surefoot.config.schema import Config
from surefoot.config.source import read_source
from surefoot.config.table import KeyInfo, all_keys
from surefoot.errors import Problem, UserError

Values = dict[str, Any]


def load_config(path: Path | None, overrides: Sequence[str] = (), purpose: Purpose = "train") -> Config:
    """Read a LLaMA-Factory YAML (or JSON) and the settings on the command line.

    Args:
        path: the file, or None for the command line alone.
        overrides: `key=value`, `--key=value`, `--key value` or a bare `--switch`, which win over the file.
        purpose: the command that the settings are for; chat and export take a training YAML too.

    Returns:
        The settings, checked and final.

    Raises:
        UserError: something is wrong; the error lists all of it.
    """
    source = read_source(path, overrides)
    return make_config(source.values, purpose, path, source.lines)


def make_config(
    values: Mapping[Any, Any],
    purpose: Purpose = "train",
    source: Path | None = None,
    lines: Mapping[str, int] | None = None,
) -> Config:
    """Check and complete settings that are in memory.

    Args:
        values: key -> value as they would stand in a YAML.
        purpose: the command that they are for.
        source: the file that they come from.
        lines: key -> its line there, counted from 1, for messages.

    Returns:
        The settings, checked and final.

    Raises:
        UserError: something is wrong; the error lists all of it.
    """
    lines = lines or {}
    problems: list[Problem] = []
    warnings: list[Problem] = []
    known = _known(values, problems, warnings)
    typed = _typed(known, problems)
    problems += _refusals(typed, purpose)
    wrong = {problem.key for problem in problems}
    given = {key: value for key, value in typed.items() if key in known}
    warnings += resolve(typed, given, purpose, source)
    problems += [found for found in contradictions(typed, given, purpose) if found.key not in wrong]
    if problems:
        raise UserError.from_problems(_in_order(problems, lines))
    warnings += deviations(typed, given, purpose)
    warnings += _nothing_to_do(typed, known, purpose)
    config = Config.model_construct(**typed)
    config._source, config._purpose, config._given = source, purpose, dict(values)
    config._filled, config._warnings = filled_values(typed, given, purpose), warnings
    return config


def _in_order(problems: list[Problem], lines: Mapping[str, int]) -> list[Problem]:
    """Add the lines and put the problems in their order; those of keys that are not in the file come last."""
    placed = sorted(problems, key=lambda problem: lines.get(problem.key or "", len(lines) + 10**6))
    return [
        replace(found, message=f"{found.message} (line {lines[found.key]})") if found.key in lines else found
        for found in placed
    ]


def _known(values: Mapping[Any, Any], problems: list[Problem], warnings: list[Problem]) -> Values:
    """Keep the keys that there are and that have a value."""
    known: Values = {}
    tolerant = os.environ.get("ALLOW_EXTRA_ARGS", "0").lower() in ("true", "y", "1")
    for key, value in values.items():
        info = all_keys().get(key) if isinstance(key, str) else None
        if info is None and tolerant:
            warnings.append(Problem("there is no such key; ignored because ALLOW_EXTRA_ARGS is set", "", key=str(key)))
        elif info is None:
            problems.append(unknown_key(key))
        elif value is not None or (info.nullable and info.default is not None):
            known[info.name] = value
        elif info.default is not None:
            problems.append(empty_value(info))
    return known


def _typed(known: Values, problems: list[Problem]) -> Values:
    """Check the types; wrong values are noted and give way to their defaults, so that more can be checked."""
    try:
        return dict(Config.model_validate(known))
    except ValidationError as error:
        found = type_problems(error)
        problems += found
    wrong = {problem.key for problem in found}
    return dict(Config.model_validate({key: value for key, value in known.items() if key not in wrong}))


def _refusals(typed: Values, purpose: Purpose) -> Iterator[Problem]:
    """Refuse by name what is not there yet."""
    for info in all_keys().values():
        value = typed[info.name]
        if value == info.default or purpose not in info.purposes:
            continue
        if info.status == "not_yet" and value not in info.harmless and info.reason:
            wanted = "" if info.secret else f" ({shown(value)})"
            yield Problem(f"is not supported yet{wanted}", info.reason.en, key=info.name)
        for item in value if isinstance(value, list) else [value]:
            if info.refused and item in info.refused:
                yield Problem(f"{shown(item)} is not supported yet", info.refused[item].en, key=info.name)


def _nothing_to_do(typed: Values, known: Values, purpose: Purpose) -> Iterator[Problem]:
    """Tell which keys were set and have no effect, one line a reason."""
    by_reason: dict[str, list[KeyInfo]] = {}
    for info in all_keys().values():
        set_here = info.name in known and typed[info.name] != info.default and purpose in info.purposes
        if info.status == "accepted" and info.reason and set_here:
            by_reason.setdefault(info.reason.en, []).append(info)
    for reason, infos in by_reason.items():
        yield Problem(f"nothing to do. {reason}", "", key=", ".join(info.name for info in infos))
