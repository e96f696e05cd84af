"""The results of a run in transformers' files, so that LLaMA-Factory's own tools can read and plot them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from surefoot.files import write_json
from surefoot.train.events import EvalEvent, RunFacts, TrainResult


class Evaluations:
    """Keeps the metrics of the last evaluation; those of one step belong together, each set under its own name.

    Attributes:
        metrics: as `eval_results.json` wants them; empty when there was no evaluation.
    """

    metrics: dict[str, Any]

    def __init__(self, *, stage: str) -> None:
        """Take the YAML's `stage`; "pt" gets a perplexity as well."""
        self.metrics = {}
        self._stage = stage
        self._step = -1

    def add(self, event: EvalEvent) -> None:
        """Keep an evaluation and forget those of earlier steps."""
        if event.step != self._step:
            self.metrics = {}
            self._step = event.step
        self.metrics |= evaluation_metrics(event)
        if self._stage == "pt" and event.loss is not None and not event.name:
            # A float ends near exp(709); JSON has no word for infinity.
            self.metrics["perplexity"] = math.exp(min(event.loss, 700.0))

    def rewound(self, step: int) -> None:
        """Forget an evaluation of a step that was undone."""
        if self._step > step:
            self.metrics, self._step = {}, -1


def write_results(folder: Path, train: dict[str, Any], evaluation: dict[str, Any]) -> None:
    """Write `train_results.json`, `eval_results.json` (if there was an evaluation) and `all_results.json`.

    Args:
        folder: the run directory.
        train: the metrics of the training.
        evaluation: the metrics of the last evaluation; may be empty.
    """
    write_json(folder / "train_results.json", dict(sorted(train.items())))
    if evaluation:
        write_json(folder / "eval_results.json", dict(sorted(evaluation.items())))
    write_json(folder / "all_results.json", dict(sorted((train | evaluation).items())))


def training_metrics(result: TrainResult) -> dict[str, Any]:
    """The end of a run under transformers' names; seconds and per-second rates are of this process."""
    metrics: dict[str, Any] = {
        "epoch": round(result.epoch, 6),
        "num_input_tokens_seen": result.tokens,
        "train_loss": result.loss,
        "train_runtime": round(result.seconds, 4),
        "train_steps": result.steps,
    }
    if result.seconds > 0:
        metrics["train_samples_per_second"] = round(result.samples / result.seconds, 3)
        metrics["train_tokens_per_second"] = round(result.tokens / result.seconds, 3)
    if result.memory_gib is not None:
        metrics["train_memory_gib"] = result.memory_gib
        metrics["train_planned_memory_gib"] = result.planned_memory_gib
    if result.stopped_by:
        metrics["stopped_by"] = result.stopped_by
    return metrics


def evaluation_metrics(event: EvalEvent) -> dict[str, Any]:
    """One evaluation under transformers' names; `eval_<name>_loss` when there are several sets."""
    prefix = f"eval_{event.name}" if event.name else "eval"
    metrics: dict[str, Any] = {
        "epoch": round(event.epoch, 6),
        f"{prefix}_loss": event.loss,
        f"{prefix}_runtime": round(event.seconds, 4),
    }
    if event.accuracy is not None:
        metrics[f"{prefix}_accuracy"] = event.accuracy
    if event.seconds > 0:
        metrics[f"{prefix}_samples_per_second"] = round(event.samples / event.seconds, 3)
    return metrics


def log_history(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn the lines of `trainer_log.jsonl` into transformers' `log_history`.

    Args:
        entries: the lines, in order.

    Returns:
        One dict a line. A number that is not finite is left out of it, beside `"nonfinite": true`, since the tools
        that read this history would take null for a number.
    """
    names = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate", "epoch": "epoch"}
    history = []
    for entry in entries:
        row = {names[key]: value for key, value in entry.items() if key in names}
        prefix = f"eval_{entry['eval_name']}" if "eval_name" in entry else "eval"
        if "eval_loss" in entry:
            row |= {f"{prefix}_loss": entry["eval_loss"], f"{prefix}_accuracy": entry.get("accuracy")}
        row = {key: value for key, value in row.items() if value is not None}
        if entry.get("nonfinite"):
            row["nonfinite"] = True
        history.append({**row, "step": entry["current_steps"]})
    return history


def write_trainer_state(path: Path, facts: RunFacts, entries: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Write `trainer_state.json`, which transformers' TrainerState can load.

    Args:
        path: of the file.
        facts: of the run.
        entries: the lines of `trainer_log.jsonl`.
        settings: `logging_steps`, `eval_steps`, `save_steps` and `train_batch_size`, where the run has them.
    """
    last = entries[-1] if entries else {}
    state = {
        "best_global_step": None,
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": last.get("epoch", 0.0),
        "global_step": last.get("current_steps", facts.resumed_from),
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": log_history(entries),
        "max_steps": facts.total_steps,
        "num_input_tokens_seen": max((entry.get("total_tokens", 0) for entry in entries), default=0),
        "num_train_epochs": math.ceil(facts.epochs),
        "stateful_callbacks": {},
        "total_flos": 0.0,
        "trial_name": None,
        "trial_params": None,
        **settings,
    }
    write_json(path, state)
