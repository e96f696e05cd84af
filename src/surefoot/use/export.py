"""Merge an adapter into its base model, save the result, and prove by its logits that nothing was lost on the way."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.data.messages import Message
from surefoot.errors import UserError, WorkError
from surefoot.files import whole_folder, write_json, write_text
from surefoot.use.chat import encode_prompt
from surefoot.use.merge_check import PROBES, SAVED, MergeCheck, compare_logits, logits_of
from surefoot.use.modelfile import write_modelfile
from surefoot.use.target import RESOLVED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefoot.config import Config
    from surefoot.data.template import Template

REPORT = Path("surefoot/export.json")
"""The check's findings in the exported folder; also the mark by which a later export may replace it."""

MEMORY_SHARE = 0.7
"""Of the free memory, what the weights of one float32 copy may take."""


@dataclass(frozen=True, slots=True)
class Export:
    """An export that passed its check.

    Attributes:
        folder: the exported model.
        check: what the comparison found.
    """

    folder: Path
    check: MergeCheck

    def summary(self) -> list[str]:
        """Where it is, what was checked, and the command that works now."""
        folder = shlex.quote(str(self.folder))
        return [
            f"Model: {self.folder}",
            f"Checked: {self.check}.",
            f"Talk to it: surefoot chat {folder}",
        ]


def export_model(cfg: Config, say: Callable[[str], None]) -> Export:
    """Export a model: base and adapter merged, or the base alone in another dtype or number of shards.

    Args:
        cfg: the settings; `export_dir`, `export_size`, `export_device` and `infer_dtype` are read.
        say: shows a sentence to the person.

    Returns:
        The export, checked.

    Raises:
        UserError: the request cannot be met.
        WorkError: the merged model does not say what the adapter says; nothing is left behind.
    """
    folder = check_export_dir(cfg)

    from transformers.utils import logging

    from surefoot.machine.device import choose_device
    from surefoot.model.load import load_for_inference
    from surefoot.run.prompts import load_prompts

    refuse_quantized_base(cfg)
    device = "cpu" if cfg.export_device == "cpu" else choose_device(cfg.device).device
    tokenizer, template = load_prompts(cfg)
    logging.disable_progress_bar()
    model = load_for_inference(cfg, tokenizer, device, work_dtype(cfg, device), original=True)
    prompts = [encode_prompt(template, tokenizer, [Message("user", text)]) for text in PROBES]
    stored, computed = stored_dtype(cfg), dtype_name(model)
    wanted = stored if cfg.infer_dtype == "auto" else cfg.infer_dtype
    if cfg.quantization_bit:
        say(f"The base is taken as its files hold it, not in the {cfg.quantization_bit} bits of the training.")
    say(f"Merging on {device}: stored as {stored}, merged and compared in {computed}, saved as {wanted}.")

    reference = logits_of(model, prompts)
    base = base_logits(model, prompts)
    merged = merge(model)
    del model
    with whole_folder(folder) as temporary:
        save(merged, tokenizer, template, cfg, temporary, wanted)
        del merged
        saved, finite = reload(temporary, device, cfg, computed)
        check = compare_logits(reference, logits_of(saved, prompts), base, saved=wanted, computed=computed)
        if not finite:
            raise WorkError(
                "weights of the merged model are not finite (NaN or infinity)",
                hint="nothing was exported. The adapter or its base model is damaged: use an earlier checkpoint",
            )
        if not check.ok:
            raise WorkError(
                f"the exported model is not the model that was trained: {check}",
                hint="nothing was exported. Try `infer_dtype: float32`; if that fails too, please report it",
            )
        write_json(temporary / REPORT, {"merge_check": check.to_json()})
        write_text(temporary / RESOLVED, cfg.to_yaml())
    if not check.conclusive:
        say("warning: the adapter changes so little that rounding could hide a wrong merge: the check could not tell")
    if cfg.export_hub_model_id:
        push(cfg, folder, say)
    return Export(folder, check)


def check_export_dir(cfg: Config) -> Path:
    """Refuse a place that an export would destroy.

    Args:
        cfg: the settings.

    Returns:
        The folder to write.

    Raises:
        UserError: `export_dir` is missing, or names a folder with something else in it.
    """
    if not cfg.export_dir:
        raise UserError("no export_dir: where shall the model go?", hint="add export_dir=FOLDER", key="export_dir")
    folder = Path(cfg.export_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", hint="name a folder", key="export_dir")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / REPORT).is_file():
        raise UserError(
            f"{folder} is not empty and not an earlier export; an export replaces the whole folder",
            hint="name a new folder",
            key="export_dir",
        )
    return folder


def refuse_quantized_base(cfg: Config) -> None:
    """Refuse a base model whose files are quantised: an adapter cannot be merged into packed weights.

    Args:
        cfg: the settings.

    Raises:
        UserError: the checkpoint holds packed weights.
    """
    from surefoot.model.quantized import quantized_bits
    from surefoot.model.source import model_config

    bits = quantized_bits(model_config(cfg))
    if bits:
        raise UserError(
            f"{cfg.model_name_or_path} holds {bits} bit weights, which an adapter cannot be merged into",
            hint="name the 16 bit weights that it was made from: model_name_or_path=FOLDER",
            key="model_name_or_path",
        )


def base_path(cfg: Config) -> str:
    """Folder or hub id of the base model."""
    from surefoot.model.demo import resolve_model_path

    assert cfg.model_name_or_path, "load_config asks for it"
    return resolve_model_path(cfg.model_name_or_path)


def stored_dtype(cfg: Config) -> str:
    """The dtype of the base model's weights; float32 for the rare ones that export knows no other name for."""
    from surefoot.model.source import checkpoint_dtype, model_config

    name = checkpoint_dtype(model_config(cfg), cfg)
    return name if name in SAVED else "float32"


def work_dtype(cfg: Config, device: str) -> str:
    """Choose what to merge and compare in: float32 where it fits, since half precision hides what is compared.

    Args:
        cfg: the settings.
        device: where the model will live.

    Returns:
        "float32", or "auto" for the checkpoint's own dtype.
    """
    from surefoot.model.memory import free_memory
    from surefoot.model.source import weight_files

    stored = sum(file.stat().st_size for file in weight_files(base_path(cfg)))
    grows = 1 if stored_dtype(cfg) == "float32" else 2
    # A hub id shows no files before it is downloaded: its own dtype never needs more than the checkpoint.
    return "float32" if stored and stored * grows < MEMORY_SHARE * free_memory(device) else "auto"


def base_logits(model: Any, prompts: list[list[int]]) -> list[Any] | None:
    """Logits with the adapter switched off; None when there is no adapter."""
    if not hasattr(model, "disable_adapter"):
        return None
    with model.disable_adapter():
        return logits_of(model, prompts)


def merge(model: Any) -> Any:
    """Fold the adapter into the base weights; a model without an adapter stays as it is."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def save(
    model: Any, tokenizer: PreTrainedTokenizerBase, template: Template, cfg: Config, folder: Path, dtype: str
) -> None:
    """Write weights, configuration, tokenizer, generation settings and Modelfile.

    Args:
        model: merged.
        tokenizer: as the template left it; saved with left padding, as generation in batches needs.
        template: of the training.
        cfg: the settings.
        folder: an empty one.
        dtype: to save the weights in.
    """
    import torch

    model = model.to(getattr(torch, dtype))
    model.config.use_cache = True
    generation = model.generation_config
    generation.eos_token_id = template.stop_ids(tokenizer)
    if tokenizer.pad_token_id is not None:
        generation.pad_token_id = tokenizer.pad_token_id
    if not generation.do_sample and any(getattr(generation, key, None) for key in ("temperature", "top_p", "top_k")):
        # transformers refuses to save sampling settings beside do_sample=False; the base model meant to sample.
        generation.do_sample = True
    model.save_pretrained(folder, max_shard_size=f"{cfg.export_size}GB")
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    write_text(folder / "Modelfile", write_modelfile(template, tokenizer))


def reload(folder: Path, device: str, cfg: Config, dtype: str) -> tuple[Any, bool]:
    """Load an exported model as anyone else would.

    Args:
        folder: of the export.
        device: where to.
        cfg: the settings; only `trust_remote_code` is read.
        dtype: to compute in.

    Returns:
        The model in evaluation mode, and whether all its weights are finite.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), trust_remote_code=cfg.trust_remote_code
    )
    finite = all(bool(torch.isfinite(weight).all()) for weight in model.parameters() if weight.is_floating_point())
    return model.to(device).eval(), finite


def dtype_name(model: Any) -> str:
    """The dtype that most of a model's base weights are in, as "bfloat16"."""
    sizes: dict[str, int] = {}
    for name, weight in model.named_parameters():
        if "lora_" not in name and weight.is_floating_point():
            key = str(weight.dtype).removeprefix("torch.")
            sizes[key] = sizes.get(key, 0) + weight.numel()
    return max(sizes, key=lambda key: sizes[key])


def push(cfg: Config, folder: Path, say: Callable[[str], None]) -> None:
    """Upload an export to the hub.

    Args:
        cfg: `export_hub_model_id` and `hf_hub_token` are read.
        folder: of the export.
        say: shows a sentence to the person.

    Raises:
        WorkError: the hub could not be reached or refused; the local folder is whole.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    assert cfg.export_hub_model_id
    api = HfApi(token=cfg.hf_hub_token)
    try:
        api.create_repo(cfg.export_hub_model_id, exist_ok=True)
        api.upload_folder(repo_id=cfg.export_hub_model_id, folder_path=str(folder))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise WorkError(
            f"the upload to {cfg.export_hub_model_id} failed: {str(error).strip().splitlines()[0]}",
            hint=f"the model is whole in {folder}; log in with `hf auth login` and try again",
        ) from error
    say(f"Uploaded to {cfg.export_hub_model_id}.")
