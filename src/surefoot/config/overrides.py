"""Reading the settings that stand on the command line after the file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from surefoot.config.explain import shown
from surefoot.config.table import all_keys
from surefoot.errors import Problem, UserError

KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")  # a dot leads into a mapping


def parse_overrides(tokens: Sequence[str]) -> Any:
    """Read the settings on the command line.

    Args:
        tokens: what stands after the file, split as the shell does: `key=value`, `--key=value`, `--key value`, or a
            bare `--switch`.

    Returns:
        An OmegaConf mapping; dotted keys nest, and later tokens win.

    Raises:
        UserError: a token is no setting, or its value cannot be read.
    """
    from omegaconf import OmegaConf

    problems: list[Problem] = []
    parts = []
    for key, text in _pairs(tokens, problems):
        part = _read_pair(key, text)
        if isinstance(part, Problem):
            problems.append(part)
        else:
            parts.append(part)
    if problems:
        raise UserError.from_problems(problems)
    return OmegaConf.merge(OmegaConf.create({}), *parts)


def _read_pair(key: str, text: str) -> Any:
    """Read one value by YAML's rules; where only a text will do, a value of another kind is that text as it stands."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    info = all_keys().get(key)
    text_only = info is not None and info.text_only
    try:
        part = OmegaConf.from_dotlist([f"{key}={text}"])
        plain: Any = OmegaConf.to_container(part, resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        if text_only:
            return OmegaConf.create({key: text})
        return Problem(f"{shown(text)} cannot be read: {str(error).splitlines()[0]}", "check brackets and quotes", key)
    if text_only and not isinstance(plain[key], (str, list, type(None))):
        return OmegaConf.create({key: text})
    return part


def _pairs(tokens: Sequence[str], problems: list[Problem]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        name, equals, text = token.removeprefix("--").partition("=")
        if token.startswith("--") and KEY.fullmatch(name):
            if not equals:
                text = rest.pop(0) if rest and not _starts_setting(rest[0]) else "true"
            pairs.append((name.replace("-", "_"), text))
        elif equals and KEY.fullmatch(name) and not token.startswith("-"):
            pairs.append((name, text))
        else:
            message = f"{shown(token)} on the command line is no setting"
            problems.append(Problem(message, "write key=value or --key value"))
    return pairs


def _starts_setting(token: str) -> bool:
    name, equals, _ = token.partition("=")
    return token.startswith("--") or (bool(equals) and name.split(".")[0] in all_keys())
