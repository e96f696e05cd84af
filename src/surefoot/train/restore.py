"""Back to an earlier step: from a checkpoint, from memory, or from the very start, bit for bit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surefoot.data.batch import digest
from surefoot.errors import UserError
from surefoot.model.randomness import set_random_state
from surefoot.train.checkpoint import PIECES
from surefoot.train.loss_scale import LossScale
from surefoot.train.sharded import Whole, load_pieces

if TYPE_CHECKING:
    from surefoot.train.checkpoint import Checkpoint
    from surefoot.train.loop import Run
    from surefoot.train.shards import Shards


def restore(run: Run, checkpoint: Checkpoint, *, same_process: bool = False) -> None:
    """Put a run where its checkpoint was made: weights, optimizer, schedule, loss scale, random numbers, counters.

    Args:
        run: freshly assembled; changed in place.
        checkpoint: verified.
        same_process: the guard goes back with what it has learned, instead of taking up what the checkpoint knew.

    Raises:
        UserError: the checkpoint holds weights only.
    """
    if checkpoint.state["weights_only"]:
        raise UserError(
            f"{checkpoint.folder} was saved with save_only_model and cannot be gone on from exactly",
            hint="start a new run with it as adapter_name_or_path or model_name_or_path",
            key="resume_from_checkpoint",
        )
    load_weights(run, checkpoint.folder, run.optimizer)

    def read(name: str) -> Any:
        # Where each rank takes a part only, the file is mapped: the ranks of a machine share its pages.
        mapped = run.cfg.deepspeed is not None
        return torch.load(checkpoint.folder / name, map_location="cpu", weights_only=True, mmap=mapped)

    if not is_sharded(checkpoint.folder):
        if run.runner.shards is None:
            run.optimizer.load_state_dict(read("optimizer.pt"))
        else:
            run.runner.shards.load_optimizer(run.optimizer, read("optimizer.pt"))
    run.scheduler.load_state_dict(read("scheduler.pt"))
    run.runner.scale = LossScale(**checkpoint.state["loss_scale"])
    if run.runner.forward.packs:
        run.runner.tokens_per_pass = checkpoint.state["tokens_per_pass"]
    run.state = type(run.state)(**{f.name: checkpoint.state[f.name] for f in fields(run.state)})
    _refuse_lost_state(run, checkpoint)
    if same_process:
        run.guard.went_back(checkpoint.state["guard"])
    else:
        run.guard.resume(run, checkpoint.state["guard"])
    set_random_state(read("rng_state.pth"), run.runner.device)


def load_weights(run: Run, folder: Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Copy a checkpoint's weights into a run's model, whether they lie there in one piece or in shards.

    Args:
        run: changed in place; all ranks must call it.
        folder: a verified checkpoint.
        optimizer: takes its state from the shards with them; left alone where the weights are in one piece.
    """
    if is_sharded(folder):
        load_pieces(run.shards or Whole(run.runner.trained), folder, optimizer)
    else:
        load_trained_weights(run.model, folder, run.runner.shards)


def is_sharded(folder: Path) -> bool:
    """Say whether a checkpoint's weights lie in shards."""
    return (folder / PIECES).is_dir()


def _refuse_lost_state(run: Run, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose data position or optimizer is not what its steps have made.

    Args:
        run: with everything restored but the guard.
        checkpoint: that it was restored from.

    Raises:
        UserError: the last step's samples are others now, or the moments are missing.
    """
    step = run.state.step
    if step and digest(run.order.samples_of(step - 1)) != checkpoint.state["last_batch"]:
        raise UserError(
            f"{checkpoint.folder}: step {step} had other samples than this run would give it",
            hint="the data or its order has changed; start again, or restore the data",
            key="resume_from_checkpoint",
        )
    moments = [state.get("exp_avg_sq") for state in run.optimizer.state.values()]
    lost = [m for m in moments if m is not None and not bool(m.any())]
    adam = isinstance(run.optimizer, torch.optim.AdamW)
    if step > checkpoint.state["guard"]["steps_lost"] and adam and (not moments or len(lost) == len(moments)):
        raise UserError(
            f"{checkpoint.folder} has lost its optimizer state: every second moment is zero after {step} steps",
            hint="going on would spike; resume from another checkpoint, or start a new run from its weights",
            key="resume_from_checkpoint",
        )


@torch.no_grad()
def load_trained_weights(model: Any, folder: Path, shards: Shards | None = None) -> None:
    """Copy a checkpoint's weights into a model's own parameters.

    The parameters stay the same objects, since the optimizer holds them.

    Args:
        model: a transformers or PEFT model of the same shape.
        folder: a verified checkpoint.
        shards: of a sharded model: each rank takes its pieces.

    Raises:
        UserError: a tensor is missing there or has another shape.
    """
    if hasattr(model, "peft_config"):
        _load_adapter(model, folder)
    else:
        _load_whole(model, folder, shards)


def _load_adapter(model: Any, folder: Path) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    result = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    _refuse(folder, sorted(trained & set(result.missing_keys)) + sorted(result.unexpected_keys))


def _load_whole(model: Any, folder: Path, shards: Shards | None) -> None:
    """Read a whole model through transformers, which undoes what saving did to names and layouts."""
    # float32 holds every 16-bit value exactly, and copying it back into 16 bits restores it.
    fresh = type(model).from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    saved = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    _refuse(folder, sorted(name for name, p in own.items() if name not in saved or saved[name].shape != p.shape))
    for name, tensor in own.items():
        if shards is None or name not in shards.model.pieces:
            tensor.copy_(saved[name])
    if shards is not None:
        shards.load_weights(saved)


def _refuse(folder: Path, names: list[str]) -> None:
    if names:
        raise UserError(
            f"{folder} does not fit this run: {names[0]} is on one side only, or has another shape",
            hint="resume with the settings that it was made with",
            key="resume_from_checkpoint",
        )
