"""Defects that show only in training: a machine together with a training YAML."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.doctor.finding import Hit, hit, seen
from surefoot.doctor.rules.e_build import hipcc_there
from surefoot.doctor.rules.f_running import bnb_files
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import as_int
from surefoot.machine.table import load_table
from surefoot.machine.versions import parse_version
from surefoot.machine.workarounds import dtype_of, is_lora, lora_faults, without_bf16

Config = Mapping[str, Any]


def _rocm(m: Machine) -> bool:
    return m.torch is not None and m.torch.flavour == "rocm"


def bf16_missing(m: Machine, config: Config) -> Hit | None:
    """F62: bf16 on a GPU without it."""
    cards = without_bf16(m)
    if not _rocm(m) or not cards or dtype_of(config) != "bfloat16":
        return None
    key = next((k for k in ("bf16", "pure_bf16", "compute_dtype") if config.get(k)), "bf16")
    return hit(
        f"the YAML has {key}: {str(config.get(key)).lower()}",
        f"the GPU is {cards[0]}, whose bf16 is `no` in the GPU table",
    )


def fp8_encoding(m: Machine, config: Config) -> Hit | None:
    """F64: fp8 on a GPU without it, or in another generation's encoding."""
    if not config.get("fp8") and not str(config.get("quantization_method", "")).startswith("fp8"):
        return None
    rows = [r for t in m.compute_targets if (r := load_table().gpu(t))]
    if not _rocm(m) or not rows:
        return None
    row = rows[0]
    if row.fp8 == "no":
        evidence = ("the YAML asks for fp8", f"{row.gfx} has no fp8 instructions")
        return Hit(
            evidence, fix=("# train in bf16 or fp16; this GPU has no fp8 || 使用 bf16 或 fp16 训练；该 GPU 没有 fp8",)
        )
    asked = str(config.get("fp8_format") or config.get("fp8_dtype") or "")
    if asked and ("fnuz" in asked) != (row.fp8 == "fnuz"):
        right = "float8_e4m3fnuz" if row.fp8 == "fnuz" else "float8_e4m3fn"
        return hit(
            f"the YAML asks for {asked}",
            f"{row.gfx} computes in the {row.fp8.upper()} encodings",
            encoding=right,
            card=row.gfx,
        )
    return None


def lora_gemm(m: Machine, config: Config) -> Hit | None:
    """F47: LoRA on gfx120x with ROCm 7.2 to 10.0, unless the environment already avoids it."""
    if not lora_faults(m) or not is_lora(config) or m.env("TORCH_BLAS_PREFER_HIPBLASLT") == "0":
        return None
    return hit(
        "the YAML trains LoRA adapters", f"the GPU is {m.targets[0]}, torch is {m.torch.version if m.torch else ''}"
    )


def flushed_fp16(m: Machine, config: Config) -> Hit | None:
    """F132: fp16 backward on MI200."""
    if (
        not _rocm(m)
        or "gfx90a" not in m.targets
        or dtype_of(config) != "float16"
        or m.env("TORCH_BLAS_PREFER_HIPBLASLT") == "0"
    ):
        return None
    return hit("the YAML has fp16: true", "the GPU is gfx90a, whose matrix units flush fp16 subnormals to zero")


def flash_attention(m: Machine, config: Config) -> Hit | None:
    """F133: flash-attn asked for where it is missing, has no kernels, or the heads are too wide."""
    if config.get("flash_attn") not in ("fa2", "fa3", "flash_attention_2"):
        return None
    if not _rocm(m):
        return None
    ck, triton = load_table().addons["flash_attn_ck"], load_table().addons["flash_attn_triton"]
    through_triton = m.env("FLASH_ATTENTION_TRITON_AMD_ENABLE") in ("TRUE", "1")
    listed = triton["gfx"] if through_triton else ck["gfx"]
    wrong = [t for t in m.compute_targets if t not in listed]
    head = as_int(config.get("head_dim"))
    reasons = (
        "flash-attn is not installed" if m.dists_known and "flash-attn" not in m.dists else "",
        f"flash-attn has no kernels for {wrong[0]}" if wrong else "",
        f"the model's heads are {head} wide, flash-attn's kernels end at {ck['head_dim_max']}"
        if head > ck["head_dim_max"]
        else "",
        "flash_attn: fa3 exists for Hopper only" if config.get("flash_attn") == "fa3" else "",
    )
    return hit(f"the YAML has flash_attn: {config.get('flash_attn')}", *reasons) if any(reasons) else None


def deepspeed_operators(m: Machine, config: Config) -> Hit | None:
    """F134: a DeepSpeed configuration whose operators cannot be compiled here."""
    wanted = config.get("deepspeed")
    if not wanted or not _rocm(m):
        return None
    text = str(wanted)
    offload = bool(re.search(r"offload", text))
    never = [n for n in ("sparse_attn", "sparse_attention", "gds") if n in text]
    reasons = (
        "deepspeed is not installed" if m.dists_known and "deepspeed" not in m.dists else "",
        f"DeepSpeed's {never[0]} does not exist on ROCm" if never else "",
        "CPU offload compiles CPUAdam at first use, and no hipcc is installed"
        if offload and hipcc_there(m) is False
        else "",
        "the integrated graphics come first, and DeepSpeed compiles for the first GPU"
        if len(m.visible) > 1 and m.visible[0].integrated
        else "",
    )
    return hit(f"the YAML has deepspeed: {text[:80]}", *reasons) if any(reasons) else None


def quantised_base(m: Machine, config: Config) -> Hit | None:
    """F135: a 4-bit or 8-bit base without a bitsandbytes that works here."""
    bits = as_int(config.get("quantization_bit"))
    method = str(config.get("quantization_method") or "bnb")
    if bits not in (4, 8) or method not in ("bnb", "bitsandbytes") or not _rocm(m) or not m.torch:
        return None
    addon = load_table().addons["bitsandbytes"]
    dist = m.dists.get("bitsandbytes")
    if dist is None:
        return hit(f"the YAML has quantization_bit: {bits}", "bitsandbytes is not installed") if m.dists_known else None
    files = bnb_files(m)
    line = "714" if m.torch.rocm >= (7, 14) else ("64" if m.torch.rocm < (7, 0) else "70")
    wrong = [t for t in m.compute_targets if t not in addon[f"gfx_{line}"]]
    official = parse_version(dist.version) >= parse_version(addon["version_min"]) and (
        files is None or len([f for f in files if "_rocm" in f]) > 1
    )
    if wrong and official:
        return hit(
            f"the YAML has quantization_bit: {bits}",
            f"bitsandbytes {dist.version} has no kernels for {wrong[0]} in its ROCm {m.torch.rocm[0]} library",
        )
    return None


def gemma_nan(m: Machine, config: Config) -> Hit | None:
    """F90: Gemma-3 on RDNA3 through the paths that give NaN."""
    name = str(config.get("model_name_or_path", ""))
    risky = (
        config.get("flash_attn") in ("fa2", "flash_attention_2")
        or config.get("torch_compile") is True
        or config.get("compile") is True
    )
    text = m.log_said(r"(loss|grad_norm)\W{1,6}nan\b|loss is nan")
    if not _rocm(m) or not re.search(r"gemma-?3", name, re.I) or not any(t.startswith("gfx11") for t in m.targets):
        return None
    if text:
        return seen(f"log: {text}", f"the YAML has model_name_or_path: {name}", f"the GPU is {m.targets[0]}")
    if not risky:
        return None
    return hit(
        f"the YAML has model_name_or_path: {name}", f"the GPU is {m.targets[0]}", "flash-attn 2 or compilation is on"
    )


def parameters_of(config: Config) -> float:
    """Number of parameters as the model's name tells it (`...-8B-...`); 0 when it does not."""
    given = config.get("model_parameters")
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    name = str(config.get("model_name_or_path", "")).rpartition("/")[2]
    found = re.search(r"(?<![\w.])(?:(\d+)x)?(\d+(?:\.\d+)?)\s?([bBmM])(?![a-zA-Z0-9])", name.replace("_", "-"))
    if not found:
        return 0.0
    return float(found.group(1) or 1) * float(found.group(2)) * (1e9 if found.group(3) in "bB" else 1e6)


def least_memory(config: Config, parameters: float) -> float:
    """Bytes that weights, gradients and optimizer states take at the very least, activations left out.

    Args:
        config: the YAML.
        parameters: number of parameters of the model.

    Returns:
        LoRA: the frozen weights only. Full: fp32 masters, gradients and two Adam moments, 16 bytes a parameter.
    """
    bits = as_int(config.get("quantization_bit"))
    if config.get("finetuning_type", "lora") == "full":
        return parameters * (8.0 if config.get("pure_bf16") else 16.0)
    if bits:
        return parameters * bits / 8
    return parameters * (4.0 if dtype_of(config) == "float32" else 2.0)


def memory(m: Machine, config: Config) -> Hit | None:
    """F136: weights and states alone are larger than the memory that there is."""
    parameters = parameters_of(config)
    sharded = bool(config.get("deepspeed") or config.get("fsdp"))
    sizes = [g.vram or shared_memory(m) for g in m.visible]
    if not parameters or not sizes or not all(sizes) or (sharded and "offload" in str(config.get("deepspeed"))):
        return None
    have = sum(sizes) if sharded else max(sizes)
    need = least_memory(config, parameters)
    if need <= have:
        return None
    return hit(
        f"about {parameters / 1e9:.1f}e9 parameters need at least {need / 2**30:.0f} GiB before any activation",
        f"the GPU{'s have' if sharded else ' has'} {have / 2**30:.0f} GiB",
    )


def shared_memory(m: Machine) -> int:
    """Bytes that ROCm may use on a GPU that shares main memory: the kernel's GTT limit; 0 when unknown."""
    paths = m.snapshot.glob("/sys/class/drm/card*/device/mem_info_gtt_total")
    return max((as_int(m.snapshot.text(p)) for p in paths), default=0) or m.ram // 2


_RULES: dict[str, Callable[[Machine, Config], Hit | None]] = {
    "F47": lora_gemm,
    "F62": bf16_missing,
    "F64": fp8_encoding,
    "F90": gemma_nan,
    "F132": flushed_fp16,
    "F133": flash_attention,
    "F134": deepspeed_operators,
    "F135": quantised_base,
    "F136": memory,
}


def training_hits(m: Machine, config: Config) -> dict[str, Hit]:
    """Run the training rules.

    Args:
        m: the machine.
        config: the YAML's keys and values, with LLaMA-Factory's names.

    Returns:
        Id → hit.
    """
    return {rule_id: found for rule_id, rule in _RULES.items() if (found := rule(m, config))}


def unseen_in(m: Machine, config: Config) -> set[str]:
    """Findings of the machine alone that this YAML rules out: the LoRA fault where no LoRA is trained."""
    return set() if is_lora(config) else {"F47"}
