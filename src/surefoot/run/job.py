"""A training job from settings to a finished run directory: every room's work, in order."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.run.folder import RunFolder
from surefoot.run.link_test import test_links
from surefoot.run.preprocessing import PreprocessingProgress
from surefoot.run.progress import Progress
from surefoot.run.prompts import load_prompts
from surefoot.run.record import RunRecord, log_window
from surefoot.run.trackers import Trackers, start_trackers, wanted_trackers
from surefoot.run.workarounds import apply_plan, environment_record, plan_for
from surefoot.train.events import TrainResult

if TYPE_CHECKING:
    from rich.console import Console

    from surefoot.config import Config
    from surefoot.train.ranks import Ranks


@dataclass(frozen=True, slots=True)
class JobResult:
    """A finished run.

    Attributes:
        result: how it ended.
        folder: the run directory.
        plots: PNGs, the training loss first.
        is_adapter: True when the directory holds an adapter, False when a whole model.
        overwrites: True when the same command would start anew instead of going on (`overwrite_output_dir`).
    """

    result: TrainResult
    folder: Path
    plots: tuple[Path, ...]
    is_adapter: bool
    overwrites: bool

    def summary(self) -> list[str]:
        """Where everything is, and the commands that work now."""
        plots = [f"Plot: {path}" for path in self.plots]
        if self.result.stopped_by == "signal":
            how = "the same command with overwrite_output_dir=false" if self.overwrites else "the same command"
            return [f"Stopped at step {self.result.steps}: {how} goes on from there.", *plots]
        folder = shlex.quote(str(self.folder))
        lines = [f"{'Adapter' if self.is_adapter else 'Model'}: {self.folder}", *plots]
        lines.append(f"Talk to it: surefoot chat {folder}")
        if self.is_adapter:
            merged = shlex.quote(f"{self.folder}-merged")
            lines.append(f"Merge it: surefoot export {folder} export_dir={merged}")
        return lines


def run_job(cfg: Config, console: Console) -> JobResult:
    """Run a training job. Nothing may have imported torch before: workarounds change what it reads at its start.

    Args:
        cfg: the settings.
        console: on stderr; everything that a person reads while the job runs.

    Returns:
        Where the results are.

    Raises:
        UserError: the request cannot be met; nothing was trained.
        WorkError: the training failed.
    """
    from surefoot.machine.device import choose_device
    from surefoot.machine.network import tie_to_network
    from surefoot.train.place import Place, device_of
    from surefoot.train.ranks import Ranks

    def say(message: str) -> None:
        console.print(message, highlight=False, markup=False, soft_wrap=True)

    folder, place = RunFolder.of(cfg), Place.of(os.environ)
    if place.restarts and folder.checkpoints():
        # A launcher has started this run's processes again: what stands there is the run's own.
        cfg = cfg.model_copy(update={"overwrite_output_dir": False, "resume_from_checkpoint": True})
    tell_settings(cfg, say)
    cfg, applied = apply_plan(plan_for(cfg), cfg, os.environ)
    for entry in applied:
        say(entry["line"])
    trackers_wanted = wanted_trackers(cfg)
    if trackers_wanted:
        say(f"Trackers: {', '.join(trackers_wanted)}.")
    choice = choose_device(device_of(cfg, place))
    tie_to_network(os.environ)
    ranks = Ranks.join(cfg, choice.device, os.environ)
    say(choice.message if ranks.alone else f"{choice.message} {place.world} processes, this is {ranks.names[0]}.")
    try:
        test_links(ranks, choice.device, say)
        if cfg.deepspeed is not None:
            from surefoot.train.zero import prepare

            cfg = prepare(cfg, ranks, choice.device, say)
        done = _run(cfg, ranks, choice.device, console, say, applied)
    except BaseException as error:
        ranks.announce(error)
        raise
    ranks.leave()
    return done


def _run(
    cfg: Config,
    ranks: Ranks,
    device: str,
    console: Console,
    say: Callable[[str], None],
    applied: list[dict[str, Any]],
) -> JobResult:
    """Prepare the data, load the model and train, in this process of the run."""
    from surefoot.config.sharding import sharding_of
    from surefoot.data.prepare import prepare_data
    from surefoot.model.load import load_model
    from surefoot.train.run import run_training

    folder = RunFolder.of(cfg)
    ranks.on(0, lambda: folder.check(cfg))
    tokenizer, template = load_prompts(cfg)
    with PreprocessingProgress(console) as preprocessing:
        # One process a machine reads and encodes; the others find the rows in its cache.
        data = ranks.first_of_host(
            lambda first: prepare_data(
                cfg if first else cfg.model_copy(update={"overwrite_cache": False}),
                tokenizer, template, progress=preprocessing,
            )
        )  # fmt: skip
    data.report.render(console)
    sharded = sharding_of(cfg, os.environ) is not None and not ranks.alone
    loaded = load_model(cfg, tokenizer, device, on_host=sharded)
    for note in loaded.notes:
        say(note)
    is_adapter = cfg.finetuning_type == "lora"
    if not ranks.is_main:
        result = run_training(cfg, loaded, tokenizer, data, [], device, ranks)
        return JobResult(result, folder.path, (), is_adapter, overwrites=cfg.overwrite_output_dir)
    record = RunRecord(cfg, folder, data.report.to_json(), environment_record(applied, os.environ))
    progress = Progress(console)
    trackers = Trackers(start_trackers(cfg, folder.path), log_window(cfg), say)
    try:
        result = run_training(cfg, loaded, tokenizer, data, [record, progress, trackers], device, ranks)
    except BaseException:
        # Ctrl-C and errors alike: the screen, the log and the curves up to here are what a person needs next.
        progress.close()
        trackers.close()
        record.failed()
        raise
    return JobResult(result, folder.path, tuple(record.plots), is_adapter, overwrites=cfg.overwrite_output_dir)


def tell_settings(cfg: Config, say: Callable[[str], None]) -> None:
    """Show the warnings about the settings, and what was filled in for what the YAML leaves out."""
    for warning in cfg.warnings:
        say(f"warning: {warning}")
    if cfg.filled:
        say("Filled in: " + ", ".join(f"{key}={_written(value)}" for key, value in cfg.filled.items()))


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
