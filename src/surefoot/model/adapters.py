"""What is trained: a LoRA adapter, some layers, or everything."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surefoot.errors import UserError
from surefoot.model.quantized import is_quantized
from surefoot.model.source import safetensors_header
from surefoot.model.targets import freeze_patterns, resolve_extra_modules, resolve_targets

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from surefoot.config import Config

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def prepare_trainables(model: Any, cfg: Config, dtype: torch.dtype, resized: bool) -> Any:
    """Mark what is trained and hold it in the masters' dtype; everything else is frozen.

    Args:
        model: the loaded model.
        cfg: the YAML; `finetuning_type` and its keys are read.
        dtype: of the trainable parameters.
        resized: True when the vocabulary grew, so that a LoRA run must train the embeddings too.

    Returns:
        The model, wrapped by PEFT for LoRA.

    Raises:
        UserError: names that match nothing, or an adapter that does not fit.
    """
    if cfg.finetuning_type == "lora":
        model = _with_lora(model, cfg, resized)
    elif cfg.finetuning_type == "freeze":
        patterns = freeze_patterns(
            model,
            cfg.freeze_trainable_layers,
            list(cfg.freeze_trainable_modules),
            list(cfg.freeze_extra_modules or []),
            cfg.use_llama_pro,
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(pattern in name for pattern in patterns))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def load_adapters(model: PreTrainedModel, paths: list[str], cfg: Config, *, trainable: bool) -> Any:
    """Put saved adapters on a base model: all but the last are merged into it.

    Args:
        model: the base model.
        paths: adapter folders or hub ids, in order.
        cfg: the YAML, for `adapter_folder` and hub access.
        trainable: True to go on training the last adapter; False merges nothing of it but freezes it.

    Returns:
        The model with the last adapter active (PEFT).

    Raises:
        UserError: a folder is no adapter, or an adapter of another model.
    """
    from peft import PeftModel

    merged: Any = model
    for place, path in enumerate(paths):
        last = place == len(paths) - 1
        check_adapter_folder(path, cfg.adapter_folder)
        try:
            with warnings.catch_warnings():
                # Missing weights are an error here, and said as one below.
                warnings.filterwarnings("ignore", "Found missing adapter keys")
                wrapped = PeftModel.from_pretrained(
                    merged, path, is_trainable=trainable and last, subfolder=cfg.adapter_folder,
                    cache_dir=cfg.cache_dir, token=cfg.hf_hub_token,
                )  # fmt: skip
        # As PEFT reports missing files, other shapes, and a configuration with parts missing or unknown.
        except (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
            message, hint = (
                f"the adapter {path} does not fit {type(model).__name__}",
                "it must come from this base model",
            )
            if isinstance(error, OSError) and not Path(path).exists():
                message, hint = f"there is no folder {path}, nor a hub id that this machine can reach", "check the path"
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"{message}: {reason}", hint=hint, key="adapter_name_or_path") from error
        refuse_other_modules(wrapped, Path(path) / (cfg.adapter_folder or ""))
        merged = wrapped if last else wrapped.merge_and_unload()
    return merged


def refuse_other_modules(model: Any, folder: Path) -> None:
    """Refuse an adapter that lacks weights of the model that it was put on, or has more: PEFT would only warn.

    Args:
        model: the base model with the adapter on it (PEFT).
        folder: of the adapter; nothing is looked at when it is none (a hub id).

    Raises:
        UserError: naming the first weight that is on one side only.
    """
    from peft import get_peft_model_state_dict

    if not folder.is_dir():
        return
    wanted = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    found = set(safetensors_header(folder / ADAPTER_WEIGHTS))
    # Embeddings may be saved beside an adapter: PEFT puts them in place.
    lost, extra = sorted(wanted - found), sorted(name for name in found - wanted if "lora_" in name)
    if lost or extra:
        which = f"it lacks {lost[0]}" if lost else f"it has {extra[0]}, which this model has no place for"
        raise UserError(
            f"the adapter {folder} does not fit {type(model.get_base_model()).__name__}: {which}",
            hint="it must come from this base model, and be whole",
            key="adapter_name_or_path",
        )


def check_adapter_folder(path: str, subfolder: str | None = None) -> None:
    """Refuse a local folder that is no safetensors adapter.

    Args:
        path: a folder or a hub id (hub ids are not looked at).
        subfolder: the YAML's `adapter_folder`.

    Raises:
        UserError: the folder lacks adapter_config.json or adapter_model.safetensors, or one of them is damaged.
    """
    folder = Path(path) / (subfolder or "")
    if not folder.is_dir():
        if Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise UserError(f"there is no folder {folder}", hint="check the path", key="adapter_name_or_path")
        return
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}", hint="name the folder that a LoRA run wrote", key="adapter_name_or_path"
            )
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        settings = error
    if not isinstance(settings, dict) or "peft_type" not in settings:
        reason = f"is not JSON ({settings})" if isinstance(settings, ValueError) else "does not describe an adapter"
        raise UserError(f"{folder / ADAPTER_CONFIG} {reason}", hint="copy it again", key="adapter_name_or_path")
    safetensors_header(folder / ADAPTER_WEIGHTS)


def _with_lora(model: PreTrainedModel, cfg: Config, resized: bool) -> PeftModel:
    from peft import LoraConfig, TaskType, get_peft_model

    paths = list(cfg.adapter_name_or_path or [])
    if paths and not cfg.create_new_adapter:
        return load_adapters(model, paths, cfg, trainable=True)
    for path in paths:
        model = load_adapters(model, [path], cfg, trainable=False).merge_and_unload()
    extra = list(cfg.additional_target or [])
    _refuse_packed(model, extra)
    if resized:
        # New tokens have new rows in the embeddings and the head; an adapter alone would neither train nor save them.
        extra += [name for name in _vocabulary_modules(model) if name not in extra]
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=cfg.lora_rank,
        lora_alpha=cfg.lora_alpha,
        lora_dropout=cfg.lora_dropout,
        use_rslora=cfg.use_rslora,
        use_dora=cfg.use_dora,
        target_modules=resolve_targets(model, cfg.lora_target),
        modules_to_save=resolve_extra_modules(model, extra) or None,
    )
    try:
        wrapped = get_peft_model(model, config)
    except ValueError as error:  # as PEFT reports a module type that it cannot adapt
        raise UserError(str(error).splitlines()[0], hint="name linear modules", key="lora_target") from error
    base = cfg.model_name_or_path
    wrapped.peft_config["default"].base_model_name_or_path = base
    return wrapped  # type: ignore[return-value]


def _refuse_packed(model: PreTrainedModel, wanted: list[str]) -> None:
    """Refuse to train modules whole whose weights are in 4 or 8 bits."""
    for name, module in model.named_modules():
        named = next((extra for extra in wanted if name == extra or name.endswith(f".{extra}")), None)
        if named and any(is_quantized(part) for part in module.modules()):
            raise UserError(
                f"{named} is quantised, and packed weights cannot be trained whole",
                hint="name it in `lora_target`, or train without `quantization_bit`",
                key="additional_target",
            )


def _vocabulary_modules(model: PreTrainedModel) -> list[str]:
    wanted = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if id(module) in wanted})
