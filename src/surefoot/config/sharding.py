"""What `fsdp` and `fsdp_config` ask for, and the variables that `accelerate launch` sets for the same.

LLaMA-Factory hands these keys to transformers and accelerate; the names are theirs. torch's FSDP2 (`fully_shard`) is
the only way here: it shards each decoder layer by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import UserError

if TYPE_CHECKING:
    from surefoot.config.schema import Config

TRUE, FALSE = ("1", "true", "yes", "y", "on"), ("0", "false", "no", "n", "off", "none", "")
# Options of `fsdp`, and whether there is anything to it here.
OPTIONS = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "offload", "auto_wrap")
HONOURED = (
    "version", "reshard_after_forward", "sharding_strategy", "offload_params", "cpu_offload",
)  # fmt: skip
# What each setting that changes nothing would have chosen, and what is done here.
SETTLED = {
    "auto_wrap_policy": "each decoder layer is a group of its own",
    "transformer_layer_cls_to_wrap": "each decoder layer is a group of its own",
    "min_num_params": "each decoder layer is a group of its own",
    "activation_checkpointing": "the memory plan decides what is recomputed",
    "state_dict_type": "Surefoot writes its own checkpoints, and final weights whole",
    "cpu_ram_efficient_loading": "every process reads the model into the host's memory and cuts it layer by layer",
    "sync_module_states": "the ranks compare what they have loaded",
    "use_orig_params": "FSDP2 has no other parameters",
    "backward_prefetch": "FSDP2 gathers the next layer ahead",
    "backward_prefetch_policy": "FSDP2 gathers the next layer ahead",
    "forward_prefetch": "FSDP2 gathers the next layer ahead",
    "limit_all_gathers": "FSDP2 limits them by itself",
    "mixed_precision_policy": "`bf16` and `fp16` decide",
}
REFUSED = {
    "xla": "XLA is not supported",
    "xla_fsdp_v2": "XLA is not supported",
    "xla_fsdp_settings": "XLA is not supported",
    "xla_fsdp_grad_ckpt": "XLA is not supported",
    "ignored_modules": "all modules are sharded",
    "ignored_params": "all modules are sharded",
}
# Optimizers that treat every weight by itself, and so do not mind which of them lie on one process.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
FLAG = "ACCELERATE_USE_FSDP"  # set by `accelerate launch` where its configuration asks for FSDP


@dataclass(frozen=True)
class Sharding:
    """How the run's model is to be sharded.

    Attributes:
        reshard_after_forward: let go of a layer after its forward pass (ZeRO-3), or keep it for the backward (ZeRO-2).
        offload: keep the pieces in the host's memory.
    """

    reshard_after_forward: bool = True
    offload: bool = False


def sharding_of(cfg: Config, environ: Mapping[str, str]) -> Sharding | None:
    """Return how a run's model is to be sharded.

    Args:
        cfg: the YAML.
        environ: of the process; asked where the YAML says nothing.

    Returns:
        How; None for not at all.

    Raises:
        UserError: naming the setting that cannot be met, and what to write.
    """
    found = read_sharding(cfg.fsdp, cfg.fsdp_config)
    if found is None and cfg.fsdp is None and environ.get(FLAG, "").lower() in TRUE:
        return _of_launcher(environ)
    return found


def read_sharding(fsdp: bool | str | list[str] | None, settings: Any) -> Sharding | None:
    """Read `fsdp` and `fsdp_config`.

    Args:
        fsdp: as the YAML has it.
        settings: as the YAML has it: a mapping, JSON, or the name of a JSON or YAML file.

    Returns:
        What they ask for; None for no sharding.

    Raises:
        UserError: naming the setting.
    """
    options = _options(fsdp)
    if options is None:
        return None
    found = {"offload_params": True} if "offload" in options else {}
    if "shard_grad_op" in options:
        found["reshard_after_forward"] = False
    return _build({**found, **_settings(settings)}, "fsdp_config")


def settled(settings: Any) -> list[str]:
    """Say of each setting that changes nothing what is done here.

    Args:
        settings: the YAML's `fsdp_config`.

    Returns:
        Sentences' parts, as "state_dict_type: Surefoot writes its own checkpoints".
    """
    return [f"{name}: {SETTLED[name]}" for name in _settings(settings) if name in SETTLED]


def _options(fsdp: bool | str | list[str] | None) -> list[str] | None:
    if fsdp is None or fsdp is False:
        return None
    if fsdp is True:
        return ["full_shard"]
    words = fsdp.replace(",", " ").split() if isinstance(fsdp, str) else [w for part in fsdp for w in part.split()]
    words = [word.lower() for word in words]
    if not words or words[0] in FALSE:
        return None
    if words[0] in TRUE:
        return ["full_shard", *words[1:]]
    unknown = [word for word in words if word not in OPTIONS]
    if unknown:
        raise UserError(f"has no option {unknown[0]}", hint=f"the options are {', '.join(OPTIONS)}", key="fsdp")
    refused = [word for word in words if word.startswith("hybrid") or word == "no_shard"]
    if refused:
        hint = "write `full_shard auto_wrap`" if refused[0] != "no_shard" else "leave `fsdp` out for whole replicas"
        raise UserError(f"{refused[0]} is not there", hint=hint, key="fsdp")
    return words


def _settings(settings: Any) -> dict[str, Any]:
    """Read the settings' mapping; accelerate writes its names with a prefix, transformers without."""
    if isinstance(settings, str):
        settings = _file(settings)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UserError("is no mapping", hint="write `fsdp_config: {fsdp_version: 2}`", key="fsdp_config")
    return {str(name).removeprefix("fsdp_"): value for name, value in settings.items()}


def _file(text: str) -> Any:
    import yaml

    try:
        content = text if text.lstrip().startswith("{") else Path(text).expanduser().read_text(encoding="utf-8")
        read = json.loads(content) if content.lstrip().startswith("{") else yaml.safe_load(content)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{text[:80]} cannot be read: {error}", hint="name a JSON or YAML file", key="fsdp_config"
        ) from None
    # An `accelerate` configuration holds the settings beside other things.
    return read.get("fsdp_config", read) if isinstance(read, dict) else read


def _build(settings: dict[str, Any], key: str) -> Sharding:
    for name, value in settings.items():
        if name in REFUSED and value not in (None, False, "", {}, []):
            raise UserError(f"{name} is not there: {REFUSED[name]}", hint="leave it out", key=key)
        if name not in (*HONOURED, *SETTLED, *REFUSED):
            known = ", ".join((*HONOURED, *SETTLED))
            raise UserError(f"has no setting {name}", hint=f"known are {known}", key=key)
    version = settings.get("version", 2)
    if str(version) not in ("1", "2"):
        raise UserError(f"fsdp_version is {version}", hint="write 2; 1 is taken as 2", key=key)
    reshard, old = settings.get("reshard_after_forward"), settings.get("sharding_strategy")
    if reshard is None:
        reshard = old
    return Sharding(
        _reshards(reshard, key), _flag(settings, "offload_params", key) or _flag(settings, "cpu_offload", key)
    )


def _reshards(value: Any, key: str) -> bool:
    """Read FSDP2's bool, or FSDP1's names and numbers of strategies that stand in its place."""
    if value is None or isinstance(value, bool):
        return value is not False
    word = str(value).lower()
    if word in ("full_shard", "1") or word in TRUE:
        return True
    if word in ("shard_grad_op", "2") or word in FALSE:
        return False
    raise UserError(f"reshard_after_forward is {value}", hint="write true or false", key=key)


def _flag(settings: dict[str, Any], name: str, key: str) -> bool:
    value = settings.get(name)
    if isinstance(value, bool) or value is None:
        return bool(value)
    if str(value).lower() in TRUE:
        return True
    if str(value).lower() in FALSE:
        return False
    raise UserError(f"{name} is {value}", hint="write true or false", key=key)


def _of_launcher(environ: Mapping[str, str]) -> Sharding:
    """Read accelerate's variables: those that change something; the others only tune what FSDP2 decides here."""
    names = {"reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD", "sharding_strategy": "FSDP_SHARDING_STRATEGY",
             "offload_params": "FSDP_OFFLOAD_PARAMS", "version": "FSDP_VERSION"}  # fmt: skip
    return _build({name: environ[place] for name, place in names.items() if environ.get(place)}, "fsdp")
