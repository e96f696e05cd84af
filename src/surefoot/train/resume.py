"""Is this the run that the checkpoint came from, and where does it go on?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import UserError, WorkError
from surefoot.train.checkpoint import Checkpoint, find_checkpoints, read_checkpoint

if TYPE_CHECKING:
    from surefoot.config import Config

# Keys that change what is computed. Others (logging, saving, where files go) may differ in a resumed run.
TRAJECTORY_KEYS = (
    "stage", "finetuning_type", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora", "use_dora",
    "additional_target", "freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules",
    "use_llama_pro", "learning_rate", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "num_train_epochs", "max_steps",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "optim", "optim_args", "seed",
    "data_seed", "bf16", "fp16", "compute_dtype", "label_smoothing_factor", "neftune_noise_alpha",
    "disable_shuffling", "rope_scaling", "upcast_layernorm", "upcast_lmhead_output", "packing_mode",
    "emulate", "compile", "fp8",
)  # fmt: skip


SAMPLED = 4096  # numbers of a tensor that identify it


def fingerprint(cfg: Config, data: str, model: str, ranks: int = 1) -> dict[str, str]:
    """Digest what a run's numbers depend on, part by part, so that a difference can be named.

    Args:
        cfg: the YAML.
        data: fingerprint of the encoded training data.
        model: what identifies the base model, from `model_identity`.
        ranks: that train together. What counts is how many samples make a step, not who computes them.

    Returns:
        A value for each setting and for "data" and "model".
    """
    settings = {key: json.dumps(getattr(cfg, key), default=str, sort_keys=True) for key in TRAJECTORY_KEYS}
    return settings | {"samples_per_step": str(samples_per_step(cfg, ranks)), "data": data, "model": model}


def samples_per_step(cfg: Config, ranks: int) -> int:
    """Return how many samples make an optimizer step, counted as LLaMA-Factory counts them.

    Args:
        cfg: the YAML.
        ranks: that train together.

    Returns:
        Samples of all ranks together.
    """
    return cfg.per_device_train_batch_size * cfg.gradient_accumulation_steps * ranks


def model_identity(base: Any) -> str:
    """Digest a freshly loaded base model: its configuration, and some numbers of its embeddings and last norm.

    Args:
        base: a transformers model with its weights as they were loaded.

    Returns:
        A SHA-256 in hexadecimal; two models of the same shape with other weights differ in it.
    """
    sample = base.get_input_embeddings().weight.detach().flatten()[:SAMPLED].float().cpu()
    last = list(base.parameters())[-1].detach().flatten()[:SAMPLED].float().cpu()
    digest = hashlib.sha256(base.config.to_json_string().encode())
    digest.update(sample.numpy().tobytes() + last.numpy().tobytes())
    return digest.hexdigest()


def choose_checkpoint(cfg: Config, output_dir: Path, tell: Callable[[str], None]) -> Checkpoint | None:
    """Decide where a run starts: at a checkpoint, or from nothing.

    As in LLaMA-Factory, a run whose `output_dir` holds checkpoints goes on from the last one unless
    `overwrite_output_dir` is set or `resume_from_checkpoint` is false. A damaged checkpoint is passed over for the
    one before, and said.

    Args:
        cfg: the YAML; `resume_from_checkpoint` and `overwrite_output_dir` are read.
        output_dir: of the run.
        tell: called with a sentence for the person.

    Returns:
        The verified checkpoint to go on from, or None.

    Raises:
        UserError: the named checkpoint does not exist or is damaged, or weights stand there that nobody wants
            overwritten.
    """
    wanted = cfg.resume_from_checkpoint
    if isinstance(wanted, str):
        return _named(Path(wanted))
    folders = find_checkpoints(output_dir)
    if wanted is False or (wanted is not True and (cfg.overwrite_output_dir or not folders)):
        if not cfg.overwrite_output_dir and (folders or any(output_dir.glob("*.safetensors"))):
            why = ", which a new run would replace" if wanted is False else " and no checkpoint to go on from"
            raise UserError(
                f"{output_dir} already holds {'checkpoints' if folders else 'trained weights'}{why}",
                hint="name another output_dir, or set `overwrite_output_dir: true`",
                key="output_dir",
            )
        return None
    for folder in reversed(folders):
        try:
            return read_checkpoint(folder)
        except WorkError as error:
            tell(f"Passing over {folder.name}: {error.problems[0].message}.")
    raise UserError(
        f"{output_dir} has no whole checkpoint to go on from",
        hint="set `overwrite_output_dir: true` to start again, or `resume_from_checkpoint: FOLDER`",
        key="resume_from_checkpoint",
    )


def refuse_other_run(checkpoint: Checkpoint, now: dict[str, str], *, anyway: bool) -> list[str]:
    """Compare a checkpoint's fingerprint with this run's.

    Args:
        checkpoint: to go on from.
        now: this run's fingerprint.
        anyway: the YAML's `resume_anyway`.

    Returns:
        The names of what differs; not empty only with `anyway`.

    Raises:
        UserError: something differs and nobody said to go on all the same.
    """
    before: dict[str, Any] = checkpoint.state.get("fingerprint", {})
    differing = sorted(key for key in now if before.get(key) != now[key])
    if differing and not anyway:
        shown = ", ".join(
            key if key in ("data", "model") else f"{key} ({before.get(key)} then, {now[key]} now)" for key in differing
        )
        raise UserError(
            f"{checkpoint.folder} belongs to another run: it differs in {shown}",
            hint="restore the setting, name another output_dir, or set `resume_anyway: true` to go on all the same",
            key="resume_from_checkpoint",
        )
    return differing


def _named(folder: Path) -> Checkpoint:
    if not folder.is_dir():
        raise UserError(f"there is no checkpoint folder {folder}", hint="check the path", key="resume_from_checkpoint")
    try:
        return read_checkpoint(folder)
    except WorkError as error:
        raise UserError(
            error.problems[0].message, hint="name a folder that Surefoot wrote", key="resume_from_checkpoint"
        ) from error
