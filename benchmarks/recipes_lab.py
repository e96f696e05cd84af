"""What a recipe is planted with: models, rows and runs of one seed, and what is expected of the run."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

import numpy as np
import pytest
import torch
from fault_runs import Job, Outcome, pattern_rows, row, save_model

from conftest import BASE, STD
from surefoot.data.messages import IGNORE_INDEX, Sample
from surefoot.train.loss_scale import LossScale

SINGLE = {"fp16": None, "compute_dtype": "float32"}


@dataclass(frozen=True)
class Expected:
    """What the journal must say first, and how the run must end.

    Attributes:
        classes: any of these; "none": not a word; "told": a message only; "refused": before it starts.
        module: None for outside of every module; "*" for any.
        op: likewise.
        phase: likewise.
        ends: "well", or "stops" before anything is saved.
        told: part of the message of a run that is refused or told of.
        since: step before which nothing is wrong yet: what is said earlier is a false alarm.
    """

    classes: tuple[str, ...]
    module: str | None = "*"
    op: str | None = "*"
    phase: str | None = "*"
    ends: str = "well"
    told: str = ""
    since: int = 0


@dataclass(frozen=True)
class Case:
    """A planted run, ready to go.

    Attributes:
        job: to be trained.
        expected: of it.
        reference: the run that it must come near to; None when it must not end well.
    """

    job: Job
    expected: Expected
    reference: Outcome | None = None


@dataclass
class Lab:
    """Where one recipe is planted for one seed.

    Attributes:
        folder: for models and runs.
        seed: from 0; 0 is the recipe as the tests have it, but for the data.
        patch: taken back afterwards.
        undo: called afterwards.
    """

    folder: Path
    seed: int
    patch: pytest.MonkeyPatch
    undo: list[Callable[[], None]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def pick(self, values: Sequence[Any]) -> Any:
        """Choose by seed."""
        return values[self.seed % len(values)]

    def layer(self, first: int) -> int:
        """Choose one of four layers by seed."""
        return (first + self.seed) % 4

    def model(self, plant: Any = None, kind: str = "qwen2", **changes: Any) -> Path:
        """Save a model with a plant in its weights."""
        folder = self.folder / f"model-{next(self._numbers)}"
        return save_model(folder, kind, plant=plant, seed=self.seed, **({"initializer_range": STD} | changes))

    def rows(self, count: int = 16, **changes: Any) -> list[Sample]:
        """Draw rows."""
        return pattern_rows(count, seed=self.seed, **changes)

    def job(self, model: Path | None = None, rows: Sequence[Sample] | None = None, **changes: Any) -> Job:
        """Load a run."""
        out = self.folder / f"out-{next(self._numbers)}"
        settings = BASE | {
            "seed": 3 + self.seed,
            "model_name_or_path": str(model or self.model()),
            "output_dir": str(out),
        }
        settings = {key: value for key, value in (settings | changes).items() if value is not None}
        return Job(settings, self.rows() if rows is None else rows)

    def healthy(self, *args: Any, **changes: Any) -> Outcome:
        """Train without a guard."""
        return self.job(*args, **changes, guard="off").train()

    def in_float32(self, *args: Any, **changes: Any) -> Outcome:
        """Train in float32 without a guard."""
        return self.healthy(*args, **(changes | SINGLE | {"bf16": None}))


def with_token(rows: Sequence[Sample], index: int, token: int, place: int = 10) -> list[Sample]:
    """Put a token into one of the rows."""
    ids = list(rows[index].input_ids)
    return [*rows[:index], row(index, [*ids[:place], token, *ids[place + 1 :]]), *rows[index + 1 :]]


def without_labels(rows: Sequence[Sample], indices: Sequence[int]) -> list[Sample]:
    """Take all labels from some of the rows."""
    return [
        Sample(s.row_ids, s.input_ids, np.full_like(s.labels, IGNORE_INDEX), s.segments) if i in indices else s
        for i, s in enumerate(rows)
    ]


def once(job: Job, at: int, harm: Callable[[], None]) -> None:
    """Do harm after a step, the first time that it is reached."""
    done: list[int] = []

    def after(step: int) -> None:
        if step == at and not done:
            done.append(step)
            harm()

    job.recorder.after_step.append(after)


def halve_trained(job: Job, dtype: torch.dtype) -> None:
    """Hold the trained parameters in 16 bits, as a wrong loader would."""
    for parameter in job.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def start_scale_at(lab: Lab, value: float) -> None:
    """Let the loss scale stand at a value that somebody else left there."""
    start = classmethod(lambda cls, enabled: cls(value if enabled else 1.0, enabled))
    lab.patch.setattr(LossScale, "for_run", start)


def weight_of(job: Job, name: str) -> torch.Tensor:
    """Return a frozen weight by its module's Hugging Face name."""
    module = job.module(name)
    return (module.get_base_layer() if hasattr(module, "get_base_layer") else module).weight
