"""The healthy base machines before anybody installed ROCm or torch on them."""

from __future__ import annotations

import re
from typing import Any

from surefoot.machine.case import base_names, base_snapshot
from surefoot.machine.snapshot import Snapshot

NAMES = [name for name in base_names() if not name.startswith("_")]
_PACKAGES = re.compile(r"(torch\w*|(pytorch-)?triton(-rocm)?|rocm.*|amd-torch.*|nvidia-.*)$")
_TREES = re.compile(r"/opt/rocm|/usr/include/(rocm-core|hip|hipblas)|.*librocdxg")
_PROGRAMS = ("rocminfo", "rocm-smi", "amd-smi", "hipcc")


def bare(name: str) -> Snapshot:
    """A base machine without ROCm's user space and without torch; kernel driver, nodes and groups stay."""
    raw: dict[str, Any] = base_snapshot(name)
    python = raw["python"]
    python["torch"] = None
    python["dists"] = {n: v for n, v in python["dists"].items() if not _PACKAGES.match(n)}
    for section in ("files", "dirs", "links"):
        raw[section] = {path: value for path, value in raw[section].items() if not _TREES.match(path)}
    raw["dirs"]["/opt"] = []
    raw["commands"] |= dict.fromkeys(_PROGRAMS)
    return Snapshot(raw)
