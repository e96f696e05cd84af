"""`report_to`: experiment trackers, through accelerate's tracker classes."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import UserError
from surefoot.run.quiet import QuietListener
from surefoot.run.window import LogPoint, LogWindow
from surefoot.train.events import EvalEvent, RunFacts, StepEvent, TrainResult

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

    from surefoot.config import Config

# Tracker -> the packages of which one must be there (accelerate's own probes).
PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "swanlab": ("swanlab",),
    "trackio": ("trackio",),
}


def wanted_trackers(cfg: Config) -> list[str]:
    """Read `report_to` (and `use_swanlab`) and check that what it names is installed; imports none of them.

    Args:
        cfg: the run's settings.

    Returns:
        Names of trackers; for "all" those that are installed.

    Raises:
        UserError: a name is unknown or its package is missing.
    """
    raw = cfg.report_to
    names = [raw] if isinstance(raw, str) else list(raw or [])
    names = [name for name in names if name != "none"]
    if cfg.use_swanlab:
        names.append("swanlab")
    if "all" in names:
        names = [name for name in PACKAGES if is_installed(name)]
    for name in names:
        if name not in PACKAGES:
            known = ", ".join(PACKAGES)
            raise UserError(f"no tracker is called {name!r}", hint=f"use one of {known}, all, none", key="report_to")
        if not is_installed(name):
            package = PACKAGES[name][0]
            raise UserError(
                f"the tracker {name} is not installed",
                hint=f"run `pip install {package}`, or set `report_to: none`",
                key="report_to",
            )
    return list(dict.fromkeys(names))


def is_installed(name: str) -> bool:
    """Say whether a tracker's package can be found."""
    return any(importlib.util.find_spec(package) is not None for package in PACKAGES[name])


def start_trackers(cfg: Config, folder: Path) -> list[GeneralTracker]:
    """Start what `report_to` asks for.

    Args:
        cfg: the run's settings.
        folder: the run directory; files of local trackers go to its `runs/`.

    Returns:
        The running trackers.

    Raises:
        UserError: a tracker is unknown, missing, or refuses to start (no login, no network, ...).
    """
    names = wanted_trackers(cfg)
    if not names:
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

    settings = flat_settings(cfg)
    trackers: list[GeneralTracker] = []
    for tracker in filter_trackers(list(names), logging_dir=str(folder / "runs")):
        name = str(tracker)
        try:
            running = LOGGER_TYPE_TO_CLASS[name](*_arguments(name, cfg, folder), **_options(name, cfg))
            running.start()
            running.store_init_configuration(settings)
        # Each tracker raises errors of its own library's making; whichever it is, the run must not start without it.
        except Exception as error:
            raise UserError(
                f"the tracker {name} did not start: {error}",
                hint=f"log in to {name} or mend its settings, or take it out of report_to",
                key="report_to",
            ) from error
        trackers.append(running)
    return trackers


def _arguments(name: str, cfg: Config, folder: Path) -> tuple[Any, ...]:
    """Positional arguments of accelerate's tracker class: the project's name, for TensorBoard run name and folder."""
    if name == "tensorboard":
        run_name = cfg.run_name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        return (run_name.replace(os.sep, "_"), cfg.logging_dir or str(folder / "runs"))
    if name == "swanlab" and cfg.swanlab_project:
        return (cfg.swanlab_project,)
    # "huggingface" is only transformers' default for the key.
    project = cfg.project if cfg.project != "huggingface" else None
    return (os.environ.get(f"{name.upper()}_PROJECT") or project or "surefoot",)


def _options(name: str, cfg: Config) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if name in ("wandb", "trackio"):
        options["name"] = cfg.run_name
    elif name == "mlflow":
        options["run_name"] = cfg.run_name
    elif name == "swanlab":
        options["experiment_name"] = cfg.swanlab_run_name or cfg.run_name
        options["workspace"] = cfg.swanlab_workspace
        options["mode"] = cfg.swanlab_mode
        options["logdir"] = cfg.swanlab_logdir
    return {option: value for option, value in options.items() if value is not None}


def flat_settings(cfg: Config) -> dict[str, Any]:
    """The resolved settings as names and plain values, secrets masked, for a tracker's table of settings."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.create(cfg.to_yaml()))
    assert isinstance(values, dict)
    plain = (bool, int, float, str)
    return {str(key): value if isinstance(value, plain) else str(value) for key, value in values.items()}


class Trackers(QuietListener):
    """Sends each logged stretch of steps and each evaluation to the trackers, under transformers' names."""

    def __init__(self, trackers: list[GeneralTracker], window: LogWindow, say: Callable[[str], None]) -> None:
        """Take running trackers.

        Args:
            trackers: from `start_trackers`.
            window: this listener's own.
            say: shows a sentence to the person.
        """
        self._trackers = list(trackers)
        self._window = window
        self._say = say

    def started(self, facts: RunFacts) -> None:
        """Settle when to log."""
        self._window.start(facts)

    def stepped(self, event: StepEvent) -> None:
        """Send the stretch that this step ends, if it ends one."""
        for point in self._window.push(event):
            self._send(point)

    def rewound(self, step: int) -> None:
        """Forget what is waiting of undone steps; a tracker keeps what it was sent."""
        self._window.rewound(step)

    def evaluated(self, event: EvalEvent) -> None:
        """Send an evaluation."""
        prefix = f"eval/{event.name}_" if event.name else "eval/"
        values = {f"{prefix}loss": event.loss, f"{prefix}accuracy": event.accuracy, f"{prefix}runtime": event.seconds}
        self._log({**values, "train/epoch": event.epoch}, event.step)

    def finished(self, result: TrainResult) -> None:
        """Send what is waiting and the totals, and close the trackers."""
        for point in self._window.flush():
            self._send(point)
        self._log({"train/train_loss": result.loss, "train/train_runtime": result.seconds}, result.steps)
        self.close()

    def close(self) -> None:
        """End every tracker, also after a failure."""
        self._each(lambda tracker: tracker.finish())
        self._trackers = []

    def _send(self, point: LogPoint) -> None:
        values = {
            "train/loss": point.loss,
            "train/grad_norm": point.grad_norm,
            "train/learning_rate": point.learning_rate,
            "train/epoch": point.epoch,
            "train/num_input_tokens_seen": point.tokens,
        }
        if point.nonfinite:
            values["train/nonfinite"] = 1
        self._log(values, point.step)

    def _log(self, values: dict[str, Any], step: int) -> None:
        finite = {key: value for key, value in values.items() if value is not None and math.isfinite(value)}
        self._each(lambda tracker: tracker.log(finite, step=step))

    def _each(self, act: Callable[[GeneralTracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                act(tracker)
            # A tracker talks to a service of its own; whatever goes wrong there must not end the training.
            except Exception as error:  # noqa: BLE001
                self._trackers.remove(tracker)
                self._say(f"The tracker {type(tracker).__name__} failed ({error}); the run goes on without it.")
