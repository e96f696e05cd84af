"""Safe workarounds for known defects of this machine together with this training YAML.

A pure function decides; `apply` is called by `surefoot train` before torch is imported, since torch and ROCm read most
of these variables once, at start. Each entry names the finding that it answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.machine.facts import Machine
from surefoot.machine.table import load_table

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Workaround:
    """One change made before torch starts.

    Attributes:
        id: the finding it answers.
        reason: one sentence for the person.
        set_env: variables to set.
        unset_env: variables to remove.
        set_config: YAML keys to change.
    """

    id: str
    reason: str
    set_env: Mapping[str, str] = field(default_factory=dict)
    unset_env: tuple[str, ...] = ()
    set_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """What is done and why, in one line."""
        done = [*(f"{k}={v}" for k, v in self.set_env.items()), *(f"{k} removed" for k in self.unset_env)]
        done += [f"{k}: {str(v).lower() if isinstance(v, bool) else v}" for k, v in self.set_config.items()]
        return f"workaround {self.id}: {', '.join(done)}: {self.reason} (workarounds: false turns this off)"


def is_lora(config: Mapping[str, Any]) -> bool:
    """Whether a YAML trains LoRA adapters; LLaMA-Factory's default is lora."""
    return config.get("finetuning_type", "lora") == "lora"


def dtype_of(config: Mapping[str, Any]) -> str:
    """The compute type that a YAML asks for: bfloat16, float16, float32, or auto."""
    wanted = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(
        str(config.get("compute_dtype")), config.get("compute_dtype")
    )
    if isinstance(wanted, str) and wanted not in ("auto", "None"):
        return wanted
    if config.get("bf16") is True or config.get("pure_bf16") is True:
        return "bfloat16"
    return "float16" if config.get("fp16") is True else "auto"


def ll_avoided(m: Machine) -> bool:
    """Whether NCCL_PROTO already leaves the LL protocol out."""
    value = m.env("NCCL_PROTO")
    if value is None:
        return False
    names = [part.strip().upper() for part in value.lstrip("^").split(",")]
    return ("LL" in names) == value.startswith("^")


def hipblaslt_off(m: Machine) -> bool:
    """Whether the environment already keeps hipBLASLt away from torch's matrix products."""
    return m.env("TORCH_BLAS_PREFER_HIPBLASLT") == "0"


def lora_faults(m: Machine) -> bool:
    """Whether hipBLASLt on this machine reads past LoRA's narrow operand: gfx120x with ROCm 7.2 to 10.0."""
    rocm = m.torch.rocm if m.torch and m.torch.flavour == "rocm" else ()
    return (7, 2) <= rocm[:2] < (10, 1) and any(t in ("gfx1200", "gfx1201") for t in m.targets)


def without_bf16(m: Machine) -> list[str]:
    """Targets that would train here and have no bf16 instructions."""
    rows = [load_table().gpu(t) for t in m.compute_targets]
    return [row.gfx for row in rows if row and row.bf16 == "no"]


def wrong_ll_sums(m: Machine) -> bool:
    """Whether RCCL's LL protocol gives wrong sums here: several gfx950 with ROCm 10.1."""
    return len([g for g in m.visible if g.gfx == "gfx950"]) > 1 and m.rocm[:2] == (10, 1)


def expandable(m: Machine) -> str:
    """Name of the variable that switches expandable segments on where ROCm's are broken, or an empty string."""
    if not m.torch or m.torch.flavour != "rocm" or m.torch.rocm[:2] < (7, 0):
        return ""
    return next((n for n in _ALLOCATOR if re.search(r"expandable_segments\s*:\s*true", m.env(n) or "", re.I)), "")


def _lora_gemm(m: Machine, config: Mapping[str, Any]) -> Workaround | None:
    if not lora_faults(m) or not is_lora(config) or hipblaslt_off(m):
        return None
    return Workaround(
        "F47",
        "hipBLASLt reads past LoRA's narrow matrices on this GPU up to ROCm 10.0",
        {"TORCH_BLAS_PREFER_HIPBLASLT": "0", "ROCBLAS_USE_HIPBLASLT": "0"},
    )


def _rccl_protocol(m: Machine, config: Mapping[str, Any]) -> Workaround | None:
    if not wrong_ll_sums(m) or ll_avoided(m):
        return None
    return Workaround(
        "F85", "RCCL's LL protocol adds up wrongly on gfx950 with ROCm 10.1", {"NCCL_PROTO": "LL128,Simple"}
    )


def _rocblas_for_fp16(m: Machine, config: Mapping[str, Any]) -> Workaround | None:
    rocm = m.torch is not None and m.torch.flavour == "rocm"
    if not rocm or "gfx90a" not in m.targets or dtype_of(config) != "float16" or hipblaslt_off(m):
        return None
    return Workaround(
        "F132",
        "MI200 flushes small fp16 numbers to zero; rocBLAS keeps them in backward passes, hipBLASLt does not",
        {"TORCH_BLAS_PREFER_HIPBLASLT": "0"},
    )


def _fp16_for_bf16(m: Machine, config: Mapping[str, Any]) -> Workaround | None:
    cards = without_bf16(m)
    rocm = m.torch is not None and m.torch.flavour == "rocm"
    if not rocm or not cards or dtype_of(config) != "bfloat16":
        return None
    changes: dict[str, Any] = {"bf16": False, "fp16": True}
    if config.get("pure_bf16"):
        changes["pure_bf16"] = False
    if str(config.get("compute_dtype", "auto")) not in ("auto", "None"):
        changes["compute_dtype"] = "float16"
    return Workaround("F62", f"{cards[0]} has no bf16 instructions", set_config=changes)


def _no_expandable(m: Machine, config: Mapping[str, Any]) -> Workaround | None:
    name = expandable(m)
    if not name:
        return None
    rest = [part for part in (m.env(name) or "").split(",") if not re.match(r"\s*expandable_segments\s*:", part)]
    reason = "expandable segments corrupt or hang memory on ROCm"
    if rest:
        return Workaround("F88", reason, {name: ",".join(rest)})
    return Workaround("F88", reason, unset_env=(name,))


_RULES: tuple[Callable[[Machine, Mapping[str, Any]], Workaround | None], ...] = (
    _lora_gemm,
    _rccl_protocol,
    _rocblas_for_fp16,
    _fp16_for_bf16,
    _no_expandable,
)


def plan_workarounds(m: Machine, config: Mapping[str, Any]) -> list[Workaround]:
    """Choose the workarounds for a machine and a training YAML.

    Args:
        m: the machine.
        config: the YAML's keys and values; plain names as LLaMA-Factory has them. `workarounds: false` chooses none.

    Returns:
        What to change, in the order of the rules; empty on machines without a known defect.
    """
    if config.get("workarounds") is False:
        return []
    return [found for rule in _RULES if (found := rule(m, config))]


def apply_environment(plan: list[Workaround], environ: MutableMapping[str, str]) -> dict[str, dict[str, str | None]]:
    """Change the environment of this process; to be called before torch is imported.

    Args:
        plan: from `plan_workarounds`.
        environ: the mapping to change, in real life `os.environ`.

    Returns:
        Variable → its value before and after, for the run's record; a missing value is None.
    """
    changed: dict[str, dict[str, str | None]] = {}
    for entry in plan:
        for name, value in entry.set_env.items():
            changed[name] = {"before": environ.get(name), "after": value}
            environ[name] = value
        for name in entry.unset_env:
            changed[name] = {"before": environ.pop(name, None), "after": None}
    return changed


#: Variables that a run's record keeps, so that anyone can see what the training process really got.
RECORDED = re.compile(
    r"^(HIP|HSA|ROCR|ROCM|ROCBLAS|HIPBLASLT|MIOPEN|NCCL|RCCL|PYTORCH|TORCH|TRITON|CUDA|AMD|GPU|OMP)_|^DISABLE_ADDMM_CUDA_LT$"
)


def recorded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that decides how torch and ROCm behave, sorted by name."""
    return {name: environ[name] for name in sorted(environ) if RECORDED.match(name)}
