"""What the installed torch is: its build, its ROCm, and the GPU targets it has kernels for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.machine.gfx import base_name, is_gfx
from surefoot.machine.snapshot import Dist, as_dict, as_float, as_text, as_texts, dist_name
from surefoot.machine.table import load_table
from surefoot.machine.versions import Version, local_tag, parse_version, rocm_of_tag

_TRITONS = ("triton", "triton-rocm", "pytorch-triton-rocm")


@dataclass(frozen=True)
class Torch:
    """The installed torch, read from its files.

    Attributes:
        version: full version, local tag included.
        hip: HIP version of a ROCm build, else empty.
        cuda: CUDA version of a CUDA build, else empty.
        flavour: rocm, cuda or cpu.
        rocm: ROCm version it was built for; empty when unknown.
        targets: GPU targets whose kernels it has; empty when unknown.
        split: whether kernels come as one package per target (ROCm 7.14 and later).
        targets_source: where `targets` was read.
    """

    version: str
    hip: str
    cuda: str
    flavour: str
    rocm: Version
    targets: frozenset[str]
    split: bool
    targets_source: str

    @property
    def number(self) -> Version:
        """Its version as numbers."""
        return parse_version(self.version)


def read_dists(rows: object) -> dict[str, Dist]:
    """Read the captured distributions.

    Args:
        rows: name → fields, or name → version alone.

    Returns:
        Normalised name → distribution; rows without a version are left out.
    """
    found = {}
    for name, row in as_dict(rows).items():
        fields = as_dict(row)
        version = as_text(fields.get("version")) if fields else as_text(row)
        if version:
            found[dist_name(name)] = Dist(
                dist_name(name),
                version,
                as_text(fields.get("summary")),
                as_texts(fields.get("requires")),
                _owned(dist_name(name), fields),
                as_text(fields.get("installer")),
                as_float(fields.get("modified")),
                as_text(fields.get("origin")),
            )
    return found


def read_torch(fields: Mapping[str, Any], dists: Mapping[str, Dist]) -> Torch | None:
    """Read what torch is.

    Args:
        fields: the captured `python.torch` section.
        dists: the installed distributions.

    Returns:
        The torch, or None when there is none.
    """
    dist = dists.get("torch")
    version = as_text(fields.get("version")) or (dist.version if dist else "")
    if not version:
        return None
    hip, cuda, tag = as_text(fields.get("hip")), as_text(fields.get("cuda")), local_tag(version)
    rocm = rocm_of_tag(tag)
    known = "hip" in fields or "cuda" in fields
    if hip or (rocm and not cuda):
        flavour = "rocm"
    elif cuda or tag.startswith("cu") or (not known and not tag):
        flavour = "cuda"
    else:
        flavour = "cpu"
    if flavour != "rocm":
        return Torch(version, hip, cuda, flavour, rocm, frozenset(), False, "")
    if not rocm:
        sdk = dists.get("rocm-sdk-core")
        rocm = _rocm_of_hip(parse_version(hip)) or (parse_version(sdk.version) if sdk else ())
    targets, source, split = _targets(fields, dists, rocm, version)
    return Torch(version, hip, cuda, flavour, rocm, targets, split, source)


def _targets(
    fields: Mapping[str, Any], dists: Mapping[str, Dist], rocm: Version, version: str
) -> tuple[frozenset[str], str, bool]:
    """Find the targets that torch has kernels for: (targets, where they were read, one package per target)."""
    names = {n.rpartition("-")[2] for n in dists if re.match(r"(amd-torch|rocm-sdk)-device-", n)}
    devices = {d for d in names if not _placeholder(d, dists)}  # an empty package from PyPI holds no kernels
    if "all" in devices:
        return frozenset(load_table().gpus), "the installed device-all package", True
    gfx = fields.get("gfx")
    listed = as_texts(gfx) if isinstance(gfx, list) else as_texts(as_dict(gfx).get("kernels"))
    kernels = {base_name(name) if is_gfx(name) else name for name in listed}
    if kernels and not devices:
        return frozenset(kernels), "the kernels inside torch", False
    if devices or (rocm >= (7, 14) and "rocm-sdk-core" in dists):
        return frozenset(devices | kernels), "the installed device packages", True
    source = f"the table of torch wheels for {local_tag(version) or 'ROCm'}"
    return load_table().wheel_targets(rocm), source, False


def _placeholder(gfx: str, dists: Mapping[str, Dist]) -> bool:
    rows = [dists[n] for n in (f"amd-torch-device-{gfx}", f"rocm-sdk-device-{gfx}") if n in dists]
    return bool(rows) and all(row.version.startswith("0.0.1") for row in rows)


def _owned(name: str, fields: dict[str, Any]) -> tuple[str, ...]:
    """Import names that a distribution owns; the three triton packages own `triton` also when nobody wrote it down."""
    listed = as_texts(fields.get("top"))
    return listed if listed or "top" in fields or name not in _TRITONS else ("triton",)


def _rocm_of_hip(hip: Version) -> Version:
    """ROCm's number from HIP's: they part from 10.0 on, where HIP says 7.15."""
    release = next((r for r in load_table().rocm if r.hip == hip[:2]), None)
    return release.version if release else hip[:2]
