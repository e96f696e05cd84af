"""GPUs as the kernel shows them: PCI devices and KFD topology nodes."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from surefoot.machine.gfx import base_name, decode_target, is_gfx
from surefoot.machine.snapshot import Snapshot, as_int, key_values
from surefoot.machine.table import Gpu, load_table

AMD, NVIDIA = "0x1002", "0x10de"
KFD = "/sys/devices/virtual/kfd/kfd/topology/nodes"
PCI = "/sys/bus/pci/devices"


@dataclass(frozen=True)
class PciGpu:
    """A display controller or processing accelerator on the PCI bus.

    Attributes:
        bdf: its address, `0000:03:00.0`.
        vendor: vendor id, `0x1002` for AMD.
        device: device id.
        driver: name of the kernel driver bound to it, empty if none or unknown.
    """

    bdf: str
    vendor: str
    device: str
    driver: str

    @property
    def row(self) -> Gpu | None:
        """The GPU table's row for its device id."""
        return load_table().gpu_of_pci(self.device) if self.vendor == AMD else None


@dataclass(frozen=True)
class KfdGpu:
    """A GPU node of the KFD topology.

    Attributes:
        node: its number there.
        gfx: its true target, whatever overrides say.
        compute_units: CUs (not WGPs).
        vram: bytes of device memory, 0 when it only shares the system's.
        render_minor: N of /dev/dri/renderDN, -1 when the kernel names none.
        bdf: PCI address.
        uuid: the name ROCR_VISIBLE_DEVICES takes, empty on cards without one.
    """

    node: int
    gfx: str
    compute_units: int
    vram: int
    render_minor: int
    bdf: str
    uuid: str

    @property
    def row(self) -> Gpu | None:
        """The GPU table's row for its target."""
        return load_table().gpu(self.gfx)

    @property
    def integrated(self) -> bool:
        """Whether it is part of a processor: by the table, else by its size."""
        if self.row:
            return self.row.integrated
        return 0 < self.compute_units <= 16 and self.vram < 3 << 30

    @property
    def name(self) -> str:
        """How to call it in a sentence."""
        return f"{self.gfx} at {self.bdf}" if self.bdf else self.gfx


def pci_gpus(snapshot: Snapshot) -> tuple[PciGpu, ...]:
    """List display controllers (class 03) and processing accelerators (class 12) by address."""
    found = []
    for path in snapshot.glob(f"{PCI}/*/class"):
        folder = posixpath.dirname(path)
        if not re.match(r"0x(03|12)", snapshot.text(path)):
            continue
        driver = posixpath.basename(snapshot.link(f"{folder}/driver"))
        vendor, device = snapshot.text(f"{folder}/vendor").lower(), snapshot.text(f"{folder}/device").lower()
        found.append(PciGpu(posixpath.basename(folder), vendor, device, driver))
    return tuple(found)


def kfd_gpus(snapshot: Snapshot) -> tuple[KfdGpu, ...]:
    """List AMD GPU nodes of the KFD topology in node order; CPU nodes and other vendors' nodes are left out."""
    found = []
    for path in snapshot.glob(f"{KFD}/*/properties"):
        folder = posixpath.dirname(path)
        number = posixpath.basename(folder)
        if posixpath.dirname(folder) != KFD or not number.isdigit() or len(number) > 6:
            continue
        values = key_values(snapshot.text(path))
        gfx = decode_target(values.get("gfx_target_version", 0))
        if not gfx or values.get("simd_count", 0) <= 0 or values.get("vendor_id", 4098) != 4098:
            continue
        found.append(_kfd_gpu(snapshot, folder, int(number), gfx, values))
    return tuple(sorted(found, key=lambda gpu: gpu.node))


def _kfd_gpu(snapshot: Snapshot, folder: str, node: int, gfx: str, values: dict[str, int]) -> KfdGpu:
    location, domain = values.get("location_id", 0), values.get("domain", 0)
    bdf = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 31:02x}.{location & 7:x}" if location > 0 else ""
    vram = 0
    for bank in snapshot.glob(f"{folder}/mem_banks/*/properties"):
        facts = key_values(snapshot.text(bank))
        if facts.get("heap_type") in (1, 2):
            vram += max(0, facts.get("size_in_bytes", 0))
    unique = values.get("unique_id", 0)
    per_cu = max(1, values.get("simd_per_cu", 2))
    return KfdGpu(
        node,
        gfx,
        values.get("simd_count", 0) // per_cu,
        vram,
        values.get("drm_render_minor", -1) or -1,
        bdf,
        f"GPU-{unique:016x}" if unique > 0 else "",
    )


def rocminfo_gpus(text: str) -> tuple[str, ...]:
    """Read the GPU agents' targets from rocminfo: only an agent's own `Name:`, so ISA lines do not count twice."""
    found, current = [], ""
    for line in text.splitlines():
        field = re.match(r"\s{0,4}(Name|Device Type):\s*(\S+)", line)
        if not field:
            continue
        if field.group(1) == "Name":
            current = field.group(2)
        elif field.group(2) == "GPU" and is_gfx(current):
            found.append(base_name(current))
    return tuple(found)


def dkms_rows(text: str, module: str = "amdgpu") -> tuple[tuple[str, str, str], ...]:
    """Read `dkms status` into (version, kernel, state) rows of one module; both spellings, slash and comma."""
    rows = []
    for line in text.splitlines():
        head, _, state = line.rpartition(": ") if ": " in line else line.rpartition(":")
        parts = [part for part in re.split(r"[,/]\s*", head.strip()) if part]
        if len(parts) >= 2 and parts[0] == module:
            rows.append((parts[1], parts[2] if len(parts) > 2 else "", state.strip() or line.strip()))
        elif len(parts) < 2 and line.startswith(f"{module}/"):
            version, _, state = line.partition(":")
            rows.append((version.partition("/")[2], "", state.strip()))
    return tuple(rows)


def meminfo_bytes(snapshot: Snapshot, key: str) -> int:
    """Read a size from /proc/meminfo in bytes; 0 when unknown."""
    found = re.search(rf"^{re.escape(key)}:?\s+(\d{{1,18}})", snapshot.text("/proc/meminfo"), re.M)
    return as_int(found.group(1)) * 1024 if found else 0
