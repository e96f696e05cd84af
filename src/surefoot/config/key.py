"""How one key of the YAML is declared: its default, whether it works, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Purpose = Literal["train", "check", "chat", "export"]
Status = Literal["works", "accepted", "not_yet"]

TRAIN: tuple[Purpose, ...] = ("train", "check")
USE: tuple[Purpose, ...] = ("chat", "export")
ALWAYS: tuple[Purpose, ...] = TRAIN + USE


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a key or value has no effect or is refused, and what to use instead.

    Attributes:
        en: in English, one or two sentences.
        zh: the same in Chinese.
    """

    en: str
    zh: str


@dataclass(frozen=True, slots=True)
class Mark:
    """What `works`, `accepted` and `not_yet` attach to a field.

    Attributes:
        status: whether the key works.
        reason: why it does not; None for a key that works.
        refused: values of a working key that are refused, with the reason.
        harmless: values of a key that is not there yet which ask for nothing, besides its default.
        secret: never printed or written to a file.
        purposes: the commands that the key concerns; None means those of its group.
    """

    status: Status
    reason: Reason | None = None
    refused: Mapping[Any, Reason] = field(default_factory=dict)
    harmless: tuple[Any, ...] = ()
    secret: bool = False
    purposes: tuple[Purpose, ...] | None = None


class Keys(BaseModel):
    """A group of keys. Types are strict: a quoted number is not a number."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
        use_attribute_docstrings=False,
    )


def works(
    default: Any,
    meaning: str,
    *,
    refused: Mapping[Any, Reason] | None = None,
    secret: bool = False,
    purposes: tuple[Purpose, ...] | None = None,
    **limits: float,
) -> Any:
    """Declare a key that does what it does in LLaMA-Factory.

    Args:
        default: LLaMA-Factory's default; None where the value follows from other keys.
        meaning: one line for the table of keys.
        refused: values of LLaMA-Factory's that are not there yet.
        secret: never print or write the value.
        purposes: the commands that it concerns, where these differ from the group's.
        **limits: `ge`, `gt`, `le`, `lt` as in pydantic.

    Returns:
        A pydantic field.
    """
    mark = Mark("works", refused=refused or {}, secret=secret, purposes=purposes)
    return _field(default, meaning, mark, limits)


def accepted(default: Any, meaning: str, reason: Reason, *, secret: bool = False, **limits: float) -> Any:
    """Declare a key that may stand in the YAML and has nothing to do here; `reason` says why."""
    return _field(default, meaning, Mark("accepted", reason, secret=secret), limits)


def not_yet(
    default: Any,
    meaning: str,
    reason: Reason,
    *,
    harmless: tuple[Any, ...] = (),
    secret: bool = False,
    purposes: tuple[Purpose, ...] | None = None,
) -> Any:
    """Declare a key that is refused when it asks for something; `reason` says what to use instead."""
    mark = Mark("not_yet", reason, harmless=harmless, secret=secret, purposes=purposes)
    return _field(default, meaning, mark, {})


def _field(default: Any, meaning: str, mark: Mark, limits: dict[str, Any]) -> Any:
    info: Any = Field(default, description=meaning, repr=not mark.secret, **limits)
    info.metadata.append(mark)
    return info
