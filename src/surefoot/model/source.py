"""Where a model's files are, and what they say of themselves before any weight is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import UserError
from surefoot.model.demo import resolve_model_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from surefoot.config import Config

UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
FLOAT_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def hub_arguments(cfg: Config) -> dict[str, Any]:
    """Collect what every `from_pretrained` call needs to find and trust the files."""
    return {
        "cache_dir": cfg.cache_dir,
        "revision": cfg.model_revision,
        "token": cfg.hf_hub_token,
        "trust_remote_code": cfg.trust_remote_code,
    }


def model_path(cfg: Config) -> str:
    """Name the folder or hub id of the YAML's model; a demo model is prepared in the cache first."""
    assert cfg.model_name_or_path, "load_config requires it"
    return resolve_model_path(cfg.model_name_or_path)


def model_config(cfg: Config) -> PretrainedConfig:
    """Read a model's config.json.

    Args:
        cfg: the YAML; `model_name_or_path` names the folder, the hub id or the demo model.

    Returns:
        transformers' configuration object.

    Raises:
        UserError: there is no such folder or hub id, or its configuration cannot be used.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = model_path(cfg)
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        hint = "name the folder that config.json lies in"
        if (folder / "adapter_config.json").is_file():
            hint = "this folder holds an adapter: name its base model here, and this folder as adapter_name_or_path"
        raise UserError(f"{path} has no config.json", hint=hint, key="model_name_or_path")
    if not folder.exists() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise UserError(f"there is no folder {path}", hint="check the path", key="model_name_or_path")
    try:
        return AutoConfig.from_pretrained(path, **hub_arguments(cfg))
    # As transformers reports missing and malformed files, and values of a wrong type.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UserError(
            f"the configuration of {path} cannot be read: {' '.join(str(error).split())[:300]}",
            hint="is it a folder with a transformers model, or a hub id that this machine can reach?",
            key="model_name_or_path",
        ) from error


def weight_files(path: str) -> list[Path]:
    """List the safetensors files of a local model folder.

    Args:
        path: a folder; anything else (a hub id) gives an empty list.

    Returns:
        The files, sorted by name.

    Raises:
        UserError: the folder holds weights, but not as safetensors, or none at all.
    """
    folder = Path(path)
    if not folder.is_dir():
        return []
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    if (folder / "surefoot" / "shards").is_dir():
        raise UserError(
            f"{folder} is a sharded checkpoint: its weights lie in pieces, as the ranks that trained it held them",
            hint=f"to have them whole, run its YAML with `resume_from_checkpoint: {folder}`, its step as `max_steps`, "
            "`resume_anyway: true` and another output_dir",
            key="model_name_or_path",
        )
    unsafe = sorted(f.name for f in folder.iterdir() if f.suffix in UNSAFE_SUFFIXES)
    if unsafe:
        raise UserError(
            f"{folder} holds its weights as {unsafe[0]}, a format that can run code when it is read",
            hint="convert them once: load the model where you trust it and save_pretrained() it as safetensors",
            key="model_name_or_path",
        )
    raise UserError(f"{folder} has no *.safetensors weights", hint="finish the download", key="model_name_or_path")


def weights_folder(path: str) -> Path:
    """Find the local folder of a model's weights.

    Args:
        path: a folder, or a hub id whose files were downloaded before.

    Returns:
        The folder.

    Raises:
        UserError: it is not on this machine.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise UserError(f"{path} is not on this machine", hint="download it first", key="model_name_or_path") from error


def safetensors_header(file: Path) -> dict[str, dict[str, Any]]:
    """Read the table of tensors at the head of a safetensors file.

    Args:
        file: the file.

    Returns:
        For each tensor name its dtype, shape and data_offsets (bytes).

    Raises:
        UserError: the file is cut short or not safetensors.
    """
    try:
        with file.open("rb") as handle:
            (size,) = struct.unpack("<Q", handle.read(8))
            if size > 100_000_000:
                raise ValueError("its header length makes no sense")
            header = json.loads(handle.read(size))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if file.stat().st_size != 8 + size + end:
            raise ValueError(f"it is {file.stat().st_size} bytes, but its header speaks of {8 + size + end}")
    except (ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a whole safetensors file: {error}", hint="download or copy it again") from error
    return header


def checkpoint_dtype(config: PretrainedConfig, cfg: Config) -> str:
    """Name the dtype that a model's weights are stored in.

    Args:
        config: its configuration.
        cfg: the YAML; with `train_from_scratch` there are no stored weights, and the configuration decides.

    Returns:
        "float32", "bfloat16", "float16" or "float64": as most stored values are where the files are at hand,
        else as the configuration says.
    """
    sizes: dict[str, int] = {}
    for file in [] if cfg.train_from_scratch else weight_files(model_path(cfg)):
        for entry in safetensors_header(file).values():
            name = FLOAT_NAMES.get(entry["dtype"])
            if name:
                start, end = entry["data_offsets"]
                sizes[name] = sizes.get(name, 0) + end - start
    if sizes:
        return max(sizes, key=lambda name: sizes[name])
    return str(config.dtype or "float32").removeprefix("torch.")
