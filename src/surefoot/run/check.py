"""Everything that can be known about a job before its weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.errors import Problem, UserError
from surefoot.run.folder import RunFolder
from surefoot.run.preprocessing import PreprocessingProgress
from surefoot.run.prompts import load_prompts
from surefoot.run.trackers import wanted_trackers

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from surefoot.config import Config


def check_job(cfg: Config, console: Console | None) -> dict[str, Any]:
    """Check a job's machine, folder, trackers, optimizer, tokenizer, template and data, and forecast its memory.

    Args:
        cfg: the settings, already valid by themselves.
        console: where the data report and progress go; None shows nothing.

    Returns:
        {"ok", "errors", "warnings", "data", "plan"}; every error that was found, not only the first.
    """
    errors: list[Problem] = []
    _try(errors, lambda: wanted_trackers(cfg))
    _try(errors, lambda: RunFolder.of(cfg).check(cfg))
    device = _try(errors, lambda: _device(cfg))
    _try(errors, lambda: _start(cfg))
    _try(errors, lambda: _arguments(cfg))
    data = _try(errors, lambda: _data(cfg, console)) or {}
    plan: dict[str, Any] = {}
    if data:
        plan = _try(errors, lambda: _plan(cfg, data, device or "cpu")) or {}
    warnings = [*cfg.warnings, *(Problem(text) for text in data.get("warnings", []))]
    return {
        "ok": not errors,
        "errors": [as_json(problem) for problem in errors],
        "warnings": [as_json(problem) for problem in warnings],
        "data": data,
        "plan": plan,
    }


def as_json(problem: Problem) -> dict[str, Any]:
    """A problem as the document has it."""
    return {"key": problem.key, "message": problem.message, "hint": problem.hint}


def _try(errors: list[Problem], step: Callable[[], Any]) -> Any:
    try:
        return step()
    except UserError as error:
        errors.extend(error.problems)
        return None


def _device(cfg: Config) -> str:
    from surefoot.machine.device import choose_device

    return choose_device(cfg.device).device


def _start(cfg: Config) -> None:
    """Look at what the run starts from beside its model: adapters and a named checkpoint."""
    if cfg.adapter_name_or_path:
        from surefoot.model.adapters import check_adapter_folder

        for path in cfg.adapter_name_or_path:
            check_adapter_folder(path, cfg.adapter_folder)
    if isinstance(cfg.resume_from_checkpoint, str):
        from surefoot.train.resume import choose_checkpoint

        choose_checkpoint(cfg, RunFolder.of(cfg).path, lambda _: None)


def _data(cfg: Config, console: Console | None) -> dict[str, Any]:
    from surefoot.data.prepare import prepare_data
    from surefoot.model.source import model_config
    from surefoot.model.vocabulary import refuse_missing_rows

    tokenizer, template = load_prompts(cfg)
    refuse_missing_rows(model_config(cfg).get_text_config().vocab_size, len(tokenizer), cfg)
    with PreprocessingProgress(console) as preprocessing:
        data = prepare_data(cfg, tokenizer, template, progress=preprocessing)
    if console is not None:
        data.report.render(console)
    return data.report.to_json()


def _arguments(cfg: Config) -> None:
    """Try the optimizer's and the schedule's own arguments on a single weight."""
    import torch

    from surefoot.train.optimizer import build_optimizer, build_scheduler

    build_scheduler(build_optimizer(torch.nn.Linear(1, 1), cfg), cfg, total_steps=10)


def _plan(cfg: Config, data: dict[str, Any], device: str) -> dict[str, Any]:
    from surefoot.model.memory import forecast

    # How long a stream's rows are shows only while it is read: the plan is for the longest that the YAML allows.
    lengths = data["lengths"] or {"max": cfg.cutoff_len, "mean": cfg.cutoff_len}
    return forecast(cfg, {"longest": lengths["max"], "mean": lengths["mean"]}, device)
