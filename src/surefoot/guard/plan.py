"""The precision plan: what of a model computes otherwise than its YAML says, kept with the run and usable by the next.

A plan is read and checked without torch; only applying one needs it.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from surefoot.errors import UserError
from surefoot.files import write_json

if TYPE_CHECKING:
    import torch

    from surefoot.model.forward import LossForward

ChangeKind = Literal[
    "attention_fused", "attention_eager", "scores", "island", "region", "loss_reference", "logits_float32",
    "plain_lora", "compile_off", "float32",
]  # fmt: skip
VERSION = 1
DTYPES = ("float32", "bfloat16")
_NEEDS_MODULE = ("scores", "island", "region")
_UNDO = "_surefoot_undo"  # in the forward's own __dict__: what each change in force found, to be put back
_WORDS = {
    "attention_fused": "fused attention in {where}",
    "attention_eager": "attention written out in {where}",
    "scores": "attention scores of {where} in {dtype}",
    "island": "{where} in {dtype}",
    "region": "residual stream in {dtype} from {where} to the final norm",
    "loss_reference": "loss from the model's own logits",
    "logits_float32": "logits in float32",
    "plain_lora": "PEFT's own LoRA forward in {where}",
    "compile_off": "no compile for {where}",
    "float32": "whole model in float32",
}


@dataclass(frozen=True)
class Change:
    """One way in which a run computes otherwise than its YAML says.

    Attributes:
        kind: what is done; "scores" makes the attention scores of a module in `dtype`, "island" all of a module,
            "region" the residual stream from a decoder layer on.
        module: Hugging Face name without PEFT's wrappers, as "model.layers.2.self_attn"; "" for the whole model.
        dtype: "float32" or "bfloat16".
        keep_output: an island's output stays in `dtype`.
    """

    kind: ChangeKind
    module: str = ""
    dtype: str = "float32"
    keep_output: bool = False

    def __str__(self) -> str:
        words = _WORDS[self.kind].format(where=self.module or "the whole model", dtype=self.dtype)
        return f"{words}, its output too" if self.keep_output else words


@dataclass(frozen=True)
class Plan:
    """All that a run does otherwise than its YAML says.

    Attributes:
        changes: in the order in which they are applied.
        skipped_rows: ids of dataset rows that are left out wherever they come up.
        skipped_at: ids of rows that are left out of one step only, by step, counted from 1.
    """

    changes: tuple[Change, ...] = ()
    skipped_rows: tuple[str, ...] = ()
    skipped_at: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON holds it."""
        return {
            "version": VERSION,
            "changes": [asdict(change) for change in self.changes],
            "skipped_rows": list(self.skipped_rows),
            "skipped_at": {str(step): list(rows) for step, rows in self.skipped_at.items()},
        }

    @classmethod
    def from_json(cls, content: Any) -> Plan:
        """Check a plan and build it.

        Args:
            content: parsed JSON.

        Returns:
            The plan.

        Raises:
            UserError: naming the entry that is wrong.
        """
        if not isinstance(content, dict) or "changes" not in content:
            raise _bad('it has no list "changes"')
        if content.get("version", VERSION) != VERSION:
            raise _bad(f"it has version {content['version']!r}, this Surefoot reads version {VERSION}")
        unknown = sorted(set(content) - {"version", "changes", "skipped_rows", "skipped_at"})
        if unknown:
            raise _bad(f"it has an unknown entry {unknown[0]!r}")
        rows = content.get("skipped_rows", [])
        at = content.get("skipped_at", {})
        if not _are_rows(rows):
            raise _bad('"skipped_rows" must be a list of row ids')
        if not isinstance(at, dict) or not all(step.isdigit() and _are_rows(ids) for step, ids in at.items()):
            raise _bad('"skipped_at" must give a list of row ids for each step')
        if not isinstance(content["changes"], list):
            raise _bad('"changes" must be a list')
        changes = tuple(_change(entry, place) for place, entry in enumerate(content["changes"]))
        return cls(changes, tuple(rows), {int(step): tuple(ids) for step, ids in at.items()})


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, str) for row in value)


def read_plan(path: Path | str) -> Plan:
    """Read a plan from its file.

    Args:
        path: of a JSON file that `write_plan` wrote.

    Returns:
        The plan; whether its modules exist is found out when it is applied.

    Raises:
        UserError: no such file, no JSON, or no plan.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}",
            hint="a run writes its plan to surefoot/precision_plan.json in its output_dir",
            key="precision_plan",
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", hint="copy it again", key="precision_plan") from error
    try:
        return Plan.from_json(content)
    except UserError as error:
        raise UserError(
            f"{path}: {error.problems[0].message}", hint=error.problems[0].hint, key="precision_plan"
        ) from None


def write_plan(path: Path | str, plan: Plan) -> None:
    """Write a plan whole; see `files.write_json`."""
    write_json(Path(path), plan.to_json())


def find_module(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Find a module by its Hugging Face name, looking through PEFT's wrappers.

    Args:
        model: the model, wrapped by PEFT or not.
        name: as "model.layers.2.self_attn"; "" for the model inside PEFT's wrapper.

    Returns:
        The module; where PEFT has put an adapter on one, that adapter's layer.

    Raises:
        UserError: the model has no such module; the nearest name is told.
    """
    from surefoot.model.forward import base_of

    base = base_of(model)
    module = base
    for part in name.split(".") if name else ():
        found = _child(module, part)
        if found is None:
            near = difflib.get_close_matches(name, [n for n, _ in base.named_modules()], n=1)
            hint = f"did you mean {near[0]}?" if near else "the plan belongs to another model"
            raise UserError(f"{type(base).__name__} has no module {name}", hint=hint, key="precision_plan")
        module = found
    return module


def apply_change(model: torch.nn.Module, forward: LossForward, change: Change) -> None:
    """Let a model compute as a change says, while no graph lives.

    Args:
        model: the model, wrapped by PEFT or not; changed in place.
        forward: how its loss is computed; changed in place.
        change: not in force already.

    Raises:
        ValueError: it cannot be done to this model, or is done already; nothing is changed then. A `UserError` when
            the module does not exist.
    """
    from surefoot.guard.plan_steps import STEPS

    undo = forward.__dict__.setdefault(_UNDO, {})
    if change in undo:
        raise ValueError(f"{change}: already in force")
    undo[change] = STEPS[change.kind](model, forward, change)


def undo_change(model: torch.nn.Module, forward: LossForward, change: Change) -> None:
    """Take a change back, while no graph lives: outputs are bitwise those of before.

    Args:
        model: as it was given to `apply_change`.
        forward: likewise.
        change: likewise; the last one applied is taken back first.

    Raises:
        ValueError: the change is not in force.
    """
    undo = forward.__dict__.get(_UNDO, {})
    if change not in undo:
        raise ValueError(f"{change}: not in force")
    undo.pop(change)()


def apply_plan(model: torch.nn.Module, forward: LossForward, changes: Iterable[Change]) -> None:
    """Apply changes in order and hold the weights that they need; all or none.

    Args:
        model: the model, wrapped by PEFT or not; changed in place.
        forward: how its loss is computed; changed in place.
        changes: of a plan.

    Raises:
        ValueError: one of them cannot be applied.
    """
    done: list[Change] = []
    try:
        for change in changes:
            apply_change(model, forward, change)
            done.append(change)
    except ValueError:
        for change in reversed(done):
            undo_change(model, forward, change)
        raise
    for change in done:
        hold_change(model, change)


@contextlib.contextmanager
def applied(model: torch.nn.Module, forward: LossForward, changes: Iterable[Change]) -> Generator[None]:
    """Run with changes applied, and take them back.

    Args:
        model: the model, wrapped by PEFT or not.
        forward: how its loss is computed.
        changes: in order.

    Yields:
        Nothing.
    """
    done: list[Change] = []
    try:
        for change in changes:
            apply_change(model, forward, change)
            done.append(change)
        yield
    finally:
        for change in reversed(done):
            undo_change(model, forward, change)


def hold_change(model: torch.nn.Module, change: Change) -> None:
    """Cast the frozen weights of a change that is kept once and for all, instead of at every use.

    Weights that another module shares stay, as a tied embedding's. Nothing happens for changes without such weights.

    Args:
        model: the model, wrapped by PEFT or not; changed in place.
        change: in force.
    """
    from surefoot.guard.plan_steps import hold

    hold(model, change)


def _child(module: Any, part: str) -> Any:
    children = module._modules
    if part in children:
        return children[part]
    for wrapper in ("base_layer", "original_module"):  # an adapter's layer; a module that is trained whole
        inner = children.get(wrapper)
        if inner is not None and part in inner._modules:
            copies = children.get("modules_to_save")
            return next(iter(copies.values()))._modules[part] if copies else inner._modules[part]
    return None


def _change(entry: Any, place: int) -> Change:
    if not isinstance(entry, dict):
        raise _bad(f"change {place} is no mapping")
    unknown = sorted(set(entry) - {"kind", "module", "dtype", "keep_output"})
    if unknown:
        raise _bad(f"change {place} has an unknown entry {unknown[0]!r}")
    kind, module = entry.get("kind"), entry.get("module", "")
    if kind not in get_args(ChangeKind):
        near = difflib.get_close_matches(str(kind), get_args(ChangeKind), n=1)
        raise _bad(f"change {place} has kind {kind!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if not isinstance(module, str) or (kind in _NEEDS_MODULE and not module):
        raise _bad(f'change {place} ({kind}) must name its "module"')
    if entry.get("dtype", "float32") not in DTYPES:
        raise _bad(f"change {place} has dtype {entry['dtype']!r}; it must be one of {', '.join(DTYPES)}")
    if not isinstance(entry.get("keep_output", False), bool):
        raise _bad(f'change {place}: "keep_output" must be true or false')
    return Change(**entry)


def _bad(what: str) -> UserError:
    return UserError(
        f"this is no precision plan: {what}", hint="use a precision_plan.json that a run wrote", key="precision_plan"
    )
