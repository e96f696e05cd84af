"""A run on DeepSpeed's engine: ZeRO cuts the optimizer's state, and in stage 3 the weights, into one part a rank.

The passes of a step are Surefoot's and so is the verdict on it. DeepSpeed is held back from reducing gradients in the
backward pass (`coalesce_grad_reduction`, its own word for one reduction a step): each rank looks at its own share
first, the flags of all are summed, and a step that is bad anywhere is dropped by all before DeepSpeed hears of it. What
is left is reduced, clipped and applied by the engine.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from surefoot.config.zero import engine_settings, offloads, read_deepspeed, stage_of
from surefoot.errors import UserError

if TYPE_CHECKING:
    import torch

    from surefoot.config import Config
    from surefoot.train.loop import Run
    from surefoot.train.ranks import Ranks

REQUIREMENT = "deepspeed>=0.19.8"
REQUIRES = "einops hjson msgpack ninja psutil py-cpuinfo"


def prepare(cfg: Config, ranks: Ranks, device: str, tell: Callable[[str], None]) -> Config:
    """Look before anything is loaded whether DeepSpeed is there and understands its settings.

    Args:
        cfg: the YAML.
        ranks: of the run.
        device: of this process, as torch names it.
        tell: called with a sentence for the person.

    Returns:
        The YAML as the run takes it: without `deepspeed` where nothing is cut.

    Raises:
        UserError: it is not installed, or a setting is unknown to it.
    """
    assert cfg.deepspeed is not None
    settings = read_deepspeed(cfg.deepspeed)
    stage = stage_of(settings)
    if stage == 0 or ranks.alone:
        why = "ZeRO stage 0 cuts nothing" if stage == 0 else "one process has nobody to share with"
        too = " and without its offload" if offloads(settings) else ""
        tell(f"DeepSpeed: {why}; the run goes on without it{too}.")
        return cfg.model_copy(update={"deepspeed": None})
    deepspeed = import_deepspeed(device.partition(":")[0])
    filled = engine_settings(settings, dict(cfg), ranks.place.world, 1)
    try:
        deepspeed.DeepSpeedConfig(filled)
    except (ValueError, AssertionError, TypeError) as error:  # what pydantic and DeepSpeed's own checks raise
        raise UserError(_said(error), hint="mend the file that `deepspeed` names", key="deepspeed") from error
    words = {1: "the optimizer's state is cut", 2: "the optimizer's state is cut", 3: "weights and moments are cut"}
    tell(f"DeepSpeed {deepspeed.__version__}: ZeRO stage {stage}, {words[stage]} into {ranks.place.world} parts.")
    if cfg.fp16:
        tell("DeepSpeed: the loss scale is Surefoot's own; the other settings of `fp16` are not used.")
    return cfg.model_copy(update={"compile": False}) if stage == 3 else cfg


def import_deepspeed(device: str) -> Any:
    """Import DeepSpeed, which is slow and talks.

    Args:
        device: "cpu" or "cuda": what it shall run on.

    Returns:
        The package.

    Raises:
        UserError: it is not installed, cannot be imported, or is too old.
    """
    hint = f'DS_BUILD_OPS=0 {sys.executable} -m pip install --no-deps "{REQUIREMENT}" {REQUIRES}'  # no other torch
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("the YAML asks for DeepSpeed, which is not installed", hint=hint, key="deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", device)  # else it takes a card that the YAML does not want, or warns
    try:
        import deepspeed
    # Whatever a package that does not fit this torch raises while it is imported.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UserError(f"DeepSpeed cannot be imported: {_said(error)}", hint=hint, key="deepspeed") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not hasattr(deepspeed.DeepSpeedEngine, "coalesce_grad_reduction"):
        message = f"DeepSpeed {deepspeed.__version__} cannot hold a step's reduction back until it is judged"
        raise UserError(message, hint=hint, key="deepspeed")
    return deepspeed


def load_on_host(optimizer: torch.optim.Optimizer, cfg: Config, ranks: Ranks) -> None:
    """Keep a checkpoint's optimizer state in the host's memory until it is cut: it may be too large for one card.

    Args:
        optimizer: of a run; if it goes onto DeepSpeed's engine, its `load_state_dict` is replaced.
        cfg: the YAML.
        ranks: of the run.
    """
    if not _cuts(cfg, ranks):
        return

    def load(state: dict[str, Any]) -> None:
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                if number in state["state"]:
                    optimizer.state[parameter] = state["state"][number]
            group.update({key: value for key, value in saved.items() if key != "params"})

    optimizer.load_state_dict = load  # type: ignore[method-assign]


def take_over(run: Run) -> None:
    """Put DeepSpeed's engine under a run that is ready for its first step.

    Args:
        run: assembled, restored and looked at; its runner, gate and optimizer are replaced, unless there is nothing
            to cut.
    """
    if not _cuts(run.cfg, run.ranks):
        return
    from surefoot.train.zero_engine import ZeroGate, ZeroOptimizer, ZeroRun
    from surefoot.train.zero_step import ZeroRunner

    zero = ZeroRun(run, import_deepspeed(run.runner.device.partition(":")[0]))
    runner = ZeroRunner(**{f.name: getattr(run.runner, f.name) for f in fields(run.runner) if f.init}, zero=zero)
    runner.tokens_per_pass = min(run.ranks.gather(runner.tokens_per_pass))
    run.runner = runner
    run.optimizer = ZeroOptimizer(zero)  # type: ignore[assignment]
    run.gate = ZeroGate(runner)  # type: ignore[assignment]
    run.gathered = zero.gathered
    points = run.guard.points
    if zero.stage == 3:  # no rank holds a weight: nothing can be looked at, computed again or put back on one
        run.guard.frozen = run.guard.integrity = run.guard.points = None
        if run.guard.mode == "heal":
            run.guard.mode = "watch"
            run.tell("Guard: in ZeRO stage 3 it watches: a bad step ends the run with rank and tensors named.")
        run.alike = True
        run.looks_ahead = False
        run.runner.forward.chunked = False  # the head's weight is there while the head itself runs
    elif points is not None:
        points.points = [zero.flattened(point) for point in points.points]


def _cuts(cfg: Config, ranks: Ranks) -> bool:
    return cfg.deepspeed is not None and not ranks.alone and stage_of(read_deepspeed(cfg.deepspeed)) > 0


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return "; ".join(line.strip() for line in lines[:3]) or type(error).__name__
