"""Everything that can be known about a job before its weights are loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Wanted:
    """What a forecast shall be for, beside the YAML.

    Attributes:
        gpu: a card that is not here; None for this machine.
        cards: how many of it.
        speed: tokens/s that one card was measured to train; None for not measured.
        price: of a card for an hour; None for not asked.
    """

    gpu: str | None = None
    cards: int = 1
    speed: float | None = None
    price: float | None = None


def check_job(cfg: Config, console: Console | None, wanted: Wanted) -> dict[str, Any]:
    """Check a job's machine, folder, trackers, optimizer, tokenizer, template and data, and forecast its memory.

    Args:
        cfg: the settings, already valid by themselves.
        console: where the data report and progress go; None shows nothing.
        wanted: what the memory is planned for.

    Returns:
        {"ok", "errors", "warnings", "data", "plan"}, with several cards `plan` has "cards"; every error that was found,
        not only the first.
    """
    errors: list[Problem] = []
    _try(errors, lambda: wanted_trackers(cfg))
    _try(errors, lambda: RunFolder.of(cfg).check(cfg))
    memory = _try(errors, lambda: _memory(cfg, wanted.gpu))
    _try(errors, lambda: _start(cfg))
    _try(errors, lambda: _arguments(cfg))
    data = _try(errors, lambda: _data(cfg, console)) or {}
    plan: dict[str, Any] = {}
    numbers = _try(errors, lambda: _trainables(cfg, weights=wanted.gpu is None)) if data else None
    if numbers and memory:
        if wanted.cards > 1:
            plan = _try(errors, lambda: {"cards": _cards(cfg, data, memory, numbers, wanted)}) or {}
            _try(errors, lambda: _refuse_misfit(cfg, plan))
        else:
            plan = _try(errors, lambda: _plan(cfg, data, memory, numbers)) or {}
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


def _memory(cfg: Config, gpu: str | None) -> tuple[str, float, bool]:
    """Return where the run would be, the bytes that are free there, and whether that is a CPU."""
    if gpu is not None:
        from surefoot.machine.cards import find_card

        card = find_card(gpu)
        return f"{card.name} ({card.gfx}, {card.memory_gib} GiB)", card.free_bytes, False
    from surefoot.machine.device import choose_device
    from surefoot.model.memory import free_memory

    device = choose_device(cfg.device).device
    return f"this machine ({device})", free_memory(device), device == "cpu"


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


def _trainables(cfg: Config, *, weights: bool) -> tuple[int, int]:
    """Put adapters on a model without storage; return how many numbers would be trained, and how many there are.

    Args:
        cfg: the settings.
        weights: whether its weights must be there.

    Returns:
        Both counts.

    Raises:
        UserError: the model's weights or its adapter targets do not exist.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from surefoot.model.adapters import prepare_trainables
    from surefoot.model.source import model_config, model_path, weight_files

    if weights and not cfg.train_from_scratch:
        weight_files(model_path(cfg))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(cfg), trust_remote_code=cfg.trust_remote_code)
        fresh = cfg.model_copy(update={"adapter_name_or_path": None})
        wrapped = prepare_trainables(model, fresh, torch.float32, resized=False)
    sizes = [(p.numel(), p.requires_grad) for p in wrapped.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def _plan(
    cfg: Config, data: dict[str, Any], memory: tuple[str, float, bool], numbers: tuple[int, int]
) -> dict[str, Any]:
    from surefoot.model.forecast import forecast

    where, free_bytes, cpu = memory
    lengths = _lengths(cfg, data)
    plan = forecast(cfg, lengths, free_bytes=free_bytes, cpu=cpu, numbers=numbers)
    per_step = cfg.per_device_train_batch_size * cfg.gradient_accumulation_steps
    return {
        "where": where,
        "passes": max(1, math.ceil(per_step * lengths["mean"] / plan.tokens_per_pass)),
        **plan.to_json(),
        "trainable_parameters": numbers[0],
        "parameters": numbers[1],
    }


def _lengths(cfg: Config, data: dict[str, Any]) -> dict[str, float]:
    # How long a stream's rows are shows only while it is read: the plan is for the longest that the YAML allows.
    lengths = data["lengths"] or {"max": cfg.cutoff_len, "mean": cfg.cutoff_len}
    return {"longest": lengths["max"], "mean": lengths["mean"]}


def _cards(
    cfg: Config, data: dict[str, Any], memory: tuple[str, float, bool], numbers: tuple[int, int], wanted: Wanted
) -> dict[str, Any]:
    from surefoot.machine.cards import find_card
    from surefoot.model.forecast import model_of
    from surefoot.model.scale import Known, spread_run, to_json

    _, free_bytes, cpu = memory
    lengths = _lengths(cfg, data)
    model = model_of(cfg, cpu=cpu, numbers=numbers)
    per_card = cfg.per_device_train_batch_size * cfg.gradient_accumulation_steps
    run_tokens = data["tokens"] * cfg.num_train_epochs
    if cfg.max_steps > 0:
        run_tokens = cfg.max_steps * wanted.cards * per_card * lengths["mean"]
    known = Known(
        wanted.cards, find_card(wanted.gpu).bus_gbs(wanted.cards) if wanted.gpu else None, wanted.speed, wanted.price,
        step_tokens=per_card * lengths["mean"], run_tokens=run_tokens,
    )  # fmt: skip
    found = spread_run(cfg, model, lengths, wanted.cards, free_bytes=free_bytes, cpu=cpu)
    return {"rows_per_step": per_card * wanted.cards, **to_json(found, known)}


def _refuse_misfit(cfg: Config, plan: dict[str, Any]) -> None:
    """Refuse several cards that do not hold the run in the way that the YAML asks for."""
    cards = plan.get("cards")
    asked, other = ("sharded", "replicas") if cfg.fsdp else ("replicas", "sharded")
    if not cards or cards[asked]["fits"]:
        return
    hint = "take more cards, or larger ones"
    if cards[other]["fits"]:
        way = "leave `fsdp` out" if cfg.fsdp else "divide the weights among the cards with `fsdp: full_shard auto_wrap`"
        hint = f"{way}: {cards[other]['memory_gib']:.1f} GiB a card"
    raise UserError(f"on each of {cards['number']} cards: {cards[asked]['missing']}", hint=hint, key="fsdp")
