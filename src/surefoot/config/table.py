"""The one table of all keys, read off the fields that declare them."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from surefoot.config.key import ALWAYS, TRAIN, USE, Keys, Mark, Purpose, Reason, Status
from surefoot.config.keys_data import DataKeys
from surefoot.config.keys_finetuning import FinetuningKeys
from surefoot.config.keys_generating import GeneratingKeys
from surefoot.config.keys_model import ModelKeys
from surefoot.config.keys_surefoot import SurefootKeys
from surefoot.config.keys_training import TrainingKeys

# Group -> its fields and the commands that they concern unless a key says otherwise.
GROUPS: dict[str, tuple[type[Keys], tuple[Purpose, ...]]] = {
    "model": (ModelKeys, ALWAYS),
    "data": (DataKeys, TRAIN),
    "finetuning": (FinetuningKeys, TRAIN),
    "training": (TrainingKeys, TRAIN),
    "generating": (GeneratingKeys, USE),
    "surefoot": (SurefootKeys, ALWAYS),
}


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One row of the table of keys.

    Attributes:
        name: as it stands in the YAML.
        group: model, data, finetuning, training, generating, or surefoot for our own.
        types: what a value may be: Python types, `Literal`s and lists of them.
        nullable: whether null is a value of its own.
        default: the value of a key that is left out; None where it follows from others.
        status: works, accepted (nothing to do), or not_yet (refused).
        meaning: one line.
        reason: why it has nothing to do or is refused; None for a key that works.
        refused: values of a working key that are refused.
        harmless: values besides the default that a key which is not there yet takes.
        secret: never printed.
        purposes: the commands that it concerns.
    """

    name: str
    group: str
    types: tuple[Any, ...]
    nullable: bool
    default: Any
    status: Status
    meaning: str
    reason: Reason | None
    refused: Mapping[Any, Reason]
    harmless: tuple[Any, ...]
    secret: bool
    purposes: tuple[Purpose, ...]

    @property
    def text_only(self) -> bool:
        """Whether every value is a text or a list of texts, so that `run_name=2024` means the text."""
        return all(kind is str or (get_origin(kind) is list and get_args(kind)[0] is str) for kind in self.types)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Take a type apart into its alternatives, without what `Annotated` adds; None is `NoneType`."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in alternatives(member))
    return (annotation,)


def choices(types_: tuple[Any, ...]) -> list[Any]:
    """Collect the words that a value may be, from all its `Literal`s, those inside lists too."""
    found: list[Any] = []
    for kind in types_:
        if get_origin(kind) is Literal:
            found += get_args(kind)
        elif get_origin(kind) is list:
            found += choices(alternatives(get_args(kind)[0]))
    return found


@cache
def all_keys() -> dict[str, KeyInfo]:
    """The table: every key of LLaMA-Factory's and ours, by name, in the order of the documents."""
    table: dict[str, KeyInfo] = {}
    for group, (keys, purposes) in GROUPS.items():
        for name, info in keys.model_fields.items():
            mark = next(item for item in info.metadata if isinstance(item, Mark))
            parts = alternatives(info.annotation)
            table[name] = KeyInfo(
                name=name,
                group=group,
                types=tuple(part for part in parts if part is not type(None)),
                nullable=type(None) in parts,
                default=info.default,
                status=mark.status,
                meaning=info.description or "",
                reason=mark.reason,
                refused=mark.refused,
                harmless=mark.harmless,
                secret=mark.secret,
                purposes=mark.purposes or purposes,
            )
    return table
