"""What is said of variables and training options in a tutorial, for one machine.

The verdicts are put into terms of the machine: a list of targets is right or wrong by the card that is here. Tools,
groups and drivers are in `advice_system.py`, packages and builds in `advice_pip.py`; the words are in `advice.toml`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

from surefoot.doctor.clues import amd_wanted
from surefoot.doctor.fixes import torch_for
from surefoot.doctor.rules.h_environment import load_rows
from surefoot.machine.facts import Machine
from surefoot.machine.gfx import is_gfx, parse_override, split_targets
from surefoot.machine.hardware import KFD, meminfo_bytes
from surefoot.machine.table import load_table
from surefoot.setup.jobs import build_jobs
from surefoot.setup.tutorial import Piece

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RIGHT, OUTDATED, WRONG, UNKNOWN = "right", "outdated", "wrong", "unknown"

#: Consumer of each list of targets: (variable, separator that it splits at).
ARCH_LISTS = {
    "PYTORCH_ROCM_ARCH": ";",
    "GPU_ARCHS": ";",
    "BNB_ROCM_ARCH": ";",
    "CMAKE_HIP_ARCHITECTURES": ";",
    "GPU_TARGETS": ";",
    "AMDGPU_TARGETS": ";",
    "HIP_ARCHITECTURES": " ",
    "HCC_AMDGPU_TARGET": ",",
}
_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_OF_ROCM = ("ROCM_PATH", "ROCM_HOME", "HIP_PATH", "HSA_OVERRIDE_GFX_VERSION", "FLASH_ATTENTION_TRITON_AMD_ENABLE")
_GIB_PER_JOB = 4  # facts: PyTorch, bitsandbytes and DeepSpeed; CK's kernels take more


@lru_cache(maxsize=1)
def load_words() -> dict[str, dict[str, Any]]:
    """Read the texts and lists of names; once a process, since they never change."""
    return tomllib.loads(resources.files("surefoot.setup").joinpath("advice.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Ruling:
    """What a rule says of a piece: the key of its words, the verdict, and what fills their placeholders."""

    key: str
    verdict: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """The machine, and what the rest of the tutorial does.

    Attributes:
        m: the machine.
        side: amd, nvidia or cpu: whose torch the machine wants.
        pieces: all pieces of the tutorial, in order.
    """

    m: Machine
    side: str
    pieces: tuple[Piece, ...] = ()

    @property
    def amd(self) -> bool:
        """Whether it wants a ROCm torch."""
        return self.side == "amd"

    def told(self, pattern: str, before: int) -> bool:
        """Whether some piece up to a line matches."""
        return any(re.search(pattern, p.text) for p in self.pieces if p.line <= before)

    def variable(self, name: str, piece: Piece) -> str:
        """A variable's value for a piece: its own, or one that an earlier line set."""
        earlier = [
            p.words[1] for p in self.pieces if p.kind == "setting" and p.words[0] == name and p.line < piece.line
        ]
        return piece.env.get(name) or (earlier[-1] if earlier else "")


def context_of(m: Machine, pieces: tuple[Piece, ...]) -> Context:
    """Say whose torch a machine wants: AMD's where ROCm is meant, else NVIDIA's where such a card is, else none."""
    side = "amd" if m.has_amd and amd_wanted(m) else "nvidia" if m.has_nvidia else "cpu"
    return Context(m, side, pieces)


def rule(key: str, verdict: str, **values: str) -> Iterator[Ruling]:
    """One ruling."""
    yield Ruling(key, verdict, values)


def jobs_here(m: Machine, gib_per_job: int = _GIB_PER_JOB) -> tuple[int, bool]:
    """How many compilers may run at once here: (number, whether the count of cores is known)."""
    available = meminfo_bytes(m.snapshot, "MemAvailable") / 2**30
    cores = sum(
        int(number)
        for path in m.snapshot.glob(f"{KFD}/*/properties")
        for number in re.findall(r"^cpu_cores_count (\d{1,6})$", m.snapshot.text(path), re.M)
    )
    return build_jobs(cores or 10**6, available, gib_per_job), bool(cores)


# ---- variables ----
def setting(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge `NAME=value`."""
    name, value = piece.words[0], piece.words[1]
    if name in _VISIBLE and (c.amd or (c.side == "nvidia" and name.startswith("CUDA"))):
        yield from _visible(c, name, value)
    elif name == "MAX_JOBS":
        yield from _max_jobs(c, value)
    elif name in ARCH_LISTS or name in _OF_ROCM or name in _VISIBLE[:2]:
        if not c.amd:
            yield from rule("no-amd", WRONG, what=name)
        elif name in ARCH_LISTS:
            yield from arch_list(c, name, value)
        elif name in ("ROCM_PATH", "ROCM_HOME"):
            yield from _rocm_path(c, name, value)
        elif name == "HIP_PATH":
            yield from rule("hip-path", OUTDATED)
        elif name == "HSA_OVERRIDE_GFX_VERSION":
            yield from _override(c, value)
        else:
            yield from triton_flash(c)
    elif name == "LD_LIBRARY_PATH" and c.amd and re.search(r"/rocm[^:]*/lib", value):
        installer = c.m.dists["torch"].installer if "torch" in c.m.dists else "pip"
        if installer in ("pip", "uv", "conda", ""):  # a distribution's torch has no ROCm of its own
            yield from rule("library-path", WRONG)
    elif re.fullmatch(r"PYTORCH_(CUDA_|HIP_)?ALLOC_CONF", name) and c.amd and "expandable_segments:True" in value:
        yield from rule("expandable", WRONG)
    elif c.amd:
        yield from _doctors_variable(name, value)


def _doctors_variable(name: str, value: str) -> Iterator[Ruling]:
    """Ask the doctor's list of variables that slow down or harm; rows that depend on more are left out."""
    for row in load_rows("environment.toml")["variable"]:
        plain = not any(key in row for key in ("only_without", "unless", "needs")) and row["when"] != "multi"
        if plain and row["name"] == name and re.fullmatch(row["value"], value):
            yield Ruling("doctors-variable", WRONG, {"name": name, "reason": row["why"]})


def _gpus(m: Machine) -> list[tuple[str, bool]]:
    """GPUs in the runtime's order: (target, whether it is part of a processor)."""
    if m.reachable:
        return [(g.gfx, g.integrated) for g in m.reachable]
    table = load_table()
    return [(t, bool(row and row.integrated)) for t in m.rocminfo_targets or m.targets for row in [table.gpu(t)]]


def _visible(c: Context, name: str, value: str) -> Iterator[Ruling]:
    gpus = _gpus(c.m) if c.amd else [("", False)] * len(c.m.nvidia_pci)
    discrete = [i for i, (_, integrated) in enumerate(gpus) if not integrated]
    numbers = [int(part) for part in re.findall(r"\d{1,6}", value)] if re.fullmatch(r"[\d,\s]+", value) else None
    if not gpus or (numbers is None and value not in ("", "-1")):
        return  # UUIDs, variables: what they name is not known here
    chosen = [i for i in numbers or [] if i < len(gpus)]
    values = {"name": name, "value": value, "all": str(len(gpus)), "discrete": ",".join(map(str, discrete)) or "0"}
    values["hidden"] = str(len([i for i in discrete if i not in chosen]))
    values["igpu"] = ", ".join(f"{i} ({gpus[i][0]})" for i in range(len(gpus)) if i not in discrete)
    if not chosen:
        yield Ruling("visible-none", WRONG, values)
    elif len(chosen) < len(numbers or []):
        yield Ruling("visible-beyond", WRONG, values)
    elif discrete and any(i not in discrete for i in chosen):
        yield Ruling("visible-igpu", WRONG, values)
    elif any(i not in chosen for i in discrete):
        yield Ruling("visible-hides", WRONG, values)
    elif len(chosen) < len(gpus):
        yield Ruling("visible-masks-igpu", RIGHT, values)
    else:
        yield Ruling("visible-needless", RIGHT, values)


def _max_jobs(c: Context, value: str) -> Iterator[Ruling]:
    if not re.fullmatch(r"\d{1,5}", value):
        return
    jobs, known = jobs_here(c.m)
    available = meminfo_bytes(c.m.snapshot, "MemAvailable") // 2**30
    values = {"value": value, "jobs": str(jobs), "available": str(available)}
    if not available:
        return
    if int(value) > jobs:
        yield Ruling("jobs-many", WRONG, values)
    elif int(value) < jobs:
        yield Ruling("jobs-few" if known else "jobs-constant", OUTDATED, values)
    else:
        yield Ruling("jobs-right", RIGHT, values)


def arch_list(c: Context, name: str, value: str) -> Iterator[Ruling]:
    """Judge a list of targets that something compiles for.

    Args:
        c: the machine and the tutorial.
        name: the variable or CMake option that holds it; a key of ARCH_LISTS.
        value: the list.

    Yields:
        At most one ruling: a wrong separator first, then targets that are none, then whether this machine's are there.
    """
    separator = ARCH_LISTS[name]
    mine = c.m.compute_targets
    values = {"name": name, "value": value, "mine": ", ".join(mine), "want": separator.join(mine)}
    if not mine or "$" in value:
        return
    if value in ("native", "auto"):
        yield Ruling("arch-native", RIGHT, values)
        return
    named = split_targets(value)
    found = {mark for mark in ";, " if mark in value.strip()}
    if name == "PYTORCH_ROCM_ARCH":
        found -= {" "}  # torch itself turns spaces into semicolons
    if found - {separator} and len(named) > 1:
        told = "a space || 空格" if separator == " " else separator
        yield Ruling("arch-separator", WRONG, values | {"separator": told})
        return
    table = load_table()
    kept = [t for t in mine if t in named or ((row := table.gpu(t)) and row.generic in named)]
    unknown = [n for n in named if not is_gfx(n) and not n.endswith("-generic")]
    if unknown:
        yield Ruling("arch-names", WRONG, values | {"unknown": ", ".join(unknown)})
    elif len(kept) < len(mine):
        yield Ruling("arch-missing", WRONG, values)
    elif name == "GPU_ARCHS" and (left := [t for t in mine if t not in table.addons["flash_attn_ck"]["gfx"]]):
        yield Ruling("arch-no-ck", WRONG, values | {"left": ", ".join(left)})
    else:
        yield Ruling("arch-more" if len(named) > len(mine) else "arch-right", RIGHT, values)


def _rocm_path(c: Context, name: str, value: str) -> Iterator[Ruling]:
    if "rocm-sdk path" in value:
        yield from rule("rocm-path-sdk", RIGHT if c.m.rocm_pip else OUTDATED, name=name)
        return
    trees = [*c.m.rocm_trees, *(["pip's rocm-sdk"] if c.m.rocm_pip else [])]
    here = ", ".join(trees) or "no ROCm for building || 没有可用于构建的 ROCm"
    real = next(iter(c.m.rocm_trees), "$(rocm-sdk path --root)")
    yield from rule("rocm-path", OUTDATED, name=name, value=value, here=here, real=real)


def _override(c: Context, value: str) -> Iterator[Ruling]:
    pretended, mine, table = parse_override(value), c.m.compute_targets, load_table()
    values = {"value": value, "mine": ", ".join(mine), "pretended": pretended}
    served = [t for t in mine if c.m.covers(t)]
    allowed = [t for t in mine if (row := table.gpu(t)) and row.override == value]
    if not pretended:
        yield Ruling("override-invalid", WRONG, values)
    elif mine and (len(served) == len(mine) or torch_for(c.m)):
        yield Ruling("override-native", WRONG, values)
    elif mine and len(allowed) < len(mine):
        yield Ruling("override-family", WRONG, values)
    elif mine:
        risk = row.override_risk if (row := table.gpu(mine[0])) else ""
        risk = risk or "only where no wheel has its kernels || 仅在没有 wheel 含其内核时"
        yield Ruling("override-stopgap", RIGHT, values | {"risk": risk})


def triton_flash(c: Context) -> Iterator[Ruling]:
    """Judge flash-attn's switch to its Triton back end."""
    left = [t for t in c.m.compute_targets if t not in load_table().addons["flash_attn_triton"]["gfx"]]
    if left:
        yield from rule("triton-no", WRONG, left=", ".join(left))
    elif c.m.compute_targets:
        yield from rule("triton-flash", RIGHT)


# ---- training options ----
_DTYPES = ("dtype", "torch_dtype", "compute_dtype", "precision")
_OFF = ("false", "no", "off", "0", "none", "null")


def option(name: str, value: str, c: Context) -> Iterator[Ruling]:
    """Judge a training option, from YAML or from a flag.

    Args:
        name: the key.
        value: its value; empty for a bare flag.
        c: the machine and the tutorial.

    Yields:
        Rulings on the optimizer and the number format.
    """
    rows = [row for t in c.m.compute_targets if (row := load_table().gpu(t))] if c.amd else []
    native = bool(rows) and all(row.bf16 == "matrix" for row in rows)
    values = {"use": "bf16: true" if native else "fp16: true", "mine": ", ".join(c.m.compute_targets)}
    on, low = value.lower() not in _OFF, value.lower().rpartition(".")[2]
    if name == "optim" and low == "adamw_torch":
        yield from rule("adamw", OUTDATED)
    elif name == "optim" and low == "adamw_torch_fused":
        yield from rule("adamw-fused", RIGHT)
    elif name == "optim" and low == "adamw_apex_fused" and c.amd:
        yield from rule("adamw-apex", WRONG)
    elif (name == "fp32" and on) or (low in ("fp32", "float32") and name in _DTYPES):
        key = {"amd": "fp32", "nvidia": "fp32-other", "cpu": "fp32-cpu"}[c.side]
        yield Ruling(key, RIGHT if c.side == "cpu" else WRONG, values)
    elif name in ("bf16", "pure_bf16") and on and rows:
        yield Ruling("bf16" if native else "bf16-no", RIGHT if native else WRONG, values)
    elif name == "fp16" and on and rows:
        yield Ruling("fp16-bf16" if native else "fp16", OUTDATED if native else RIGHT, values)


def options(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge the flags `--optim adamw_torch`, `--fp32`, `--bf16 True` and the like of a command."""
    words = list(piece.words)
    for place, word in enumerate(words[1:], start=1):
        flag = re.fullmatch(r"--(optim|fp32|bf16|pure_bf16|fp16|dtype|torch_dtype|compute_dtype)(?:=(.*))?", word)
        if flag:
            follows = words[place + 1] if place + 1 < len(words) and not words[place + 1].startswith("-") else ""
            yield from option(flag.group(1), flag.group(2) if flag.group(2) is not None else follows, c)
