"""Typed access to `gpus.toml`, the one place where facts about GPUs and ROCm releases are written down."""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

from surefoot.machine.gfx import base_name
from surefoot.machine.versions import Version, parse_version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Gpu:
    """One GPU target.

    Attributes:
        gfx: the compiler's name.
        target_version: KFD's number for it.
        products: names as sold.
        pci: PCI device ids in hex, single or `first-last`.
        wavefront: lanes that run together.
        compute_units: counts of CUs among the products (not WGPs).
        memory_gib: memory sizes among the products, empty for shared memory.
        fp16: how it multiplies fp16 matrices: matrix, packed, dot or no.
        bf16: the same for bf16; `no` also where it is only emulated.
        fp8: fnuz, ocp or no.
        int8: as fp16.
        lds_kib: local memory a work-group may take, in KiB.
        vgpr_kib: vector registers per CU, in KiB.
        xnack: whether the target has retryable page faults.
        family: AMD's family name for package indexes.
        generic: LLVM's generic target whose code runs on it, or empty.
        support: listed, community or bring-up.
        source: where the row comes from.
        integrated: whether it is part of a processor.
        override: an ISA-compatible HSA_OVERRIDE_GFX_VERSION, or empty.
        override_risk: what may go wrong with it.
        kernel_min: oldest kernel whose inbox driver brings it up, or empty.
        dkms_min: oldest DKMS driver that it wants, or empty.
        product_gib: memory of each of the products, the smallest that it is sold with; empty for shared memory.
    """

    gfx: str
    target_version: int
    products: tuple[str, ...]
    pci: tuple[str, ...]
    wavefront: int
    compute_units: tuple[int, ...]
    memory_gib: tuple[int, ...]
    fp16: str
    bf16: str
    fp8: str
    int8: str
    lds_kib: int
    vgpr_kib: int
    xnack: bool
    family: str
    generic: str
    support: str
    source: str
    integrated: bool = False
    override: str = ""
    override_risk: str = ""
    kernel_min: str = ""
    dkms_min: str = ""
    product_gib: tuple[int, ...] = ()


@dataclass(frozen=True)
class RocmRelease:
    """One ROCm release: its line, what HIP calls itself in it, and the targets it lists."""

    version: Version
    date: str
    line: str
    hip: Version
    gfx: frozenset[str]
    source: str


@dataclass(frozen=True)
class Driver:
    """One stream of the kernel-mode driver and the ROCm versions (first, last) that work with it."""

    stream: str
    modules: tuple[Version, ...]
    userspace: tuple[Version, Version]
    date: str
    source: str


@dataclass(frozen=True)
class TorchRelease:
    """One torch minor release: ROCm variants on PyTorch's index and on AMD's, its companions and Python range."""

    version: Version
    rocm: tuple[str, ...]
    amd: tuple[str, ...]
    triton: str
    vision: Version
    audio: Version
    python: tuple[Version, Version]
    source: str


@dataclass(frozen=True)
class Index:
    """One index of Python packages that torch comes from.

    Attributes:
        channel: its short name.
        url: its address, with `{rocm}` where it depends on the release.
        wheel_tag: ending of the versions there, with `{rocm}`; empty where no release is pinned.
        python: first and last Python that it has wheels for; empty where torch's own row says it.
        download_gib: GiB that torch and what comes with it are, packed.
        disk_gib: the same, installed.
        source: where the row comes from.
    """

    channel: str
    url: str
    wheel_tag: str
    python: tuple[Version, ...]
    download_gib: float
    disk_gib: float
    source: str


@dataclass(frozen=True)
class Repo:
    """Where a package manager gets AMD's kernel driver or ROCm's tools from.

    Attributes:
        kind: driver or rocm.
        packager: apt, dnf or zypper.
        url: its address, with `{version}` (driver stream or ROCm release) and `{os}` or `{major}` (the distribution's).
        key: address of the key that signs it.
        packages: what to install from it.
        distros: the distributions that it serves.
        first: packages, with `{major}`, whose own repository those need.
        codenames: releases of other distributions → the one whose packages they take.
        source: where the row comes from.
    """

    kind: str
    packager: str
    url: str
    key: str
    packages: tuple[str, ...]
    distros: tuple[str, ...]
    first: tuple[str, ...]
    codenames: dict[str, str]
    source: str


@dataclass(frozen=True)
class DkmsBreak:
    """A DKMS driver that does not build from some kernel on."""

    module: Version
    kernel: Version
    symptom: str
    fixed_in: str
    source: str


@dataclass(frozen=True)
class Placeholder:
    """A name on PyPI that is empty, stale or somebody else's; `name` may end in `*`."""

    name: str
    versions: tuple[str, ...]
    instead: str
    source: str


@dataclass(frozen=True)
class Link:
    """How the cards of one machine are joined: each with every other, directly.

    Attributes:
        products: names as sold.
        peers: most cards that one is joined with.
        gbs: what collectives get of one link, GB/s each way.
        source: where the row comes from.
    """

    products: tuple[str, ...]
    peers: int
    gbs: float
    source: str

    def bus_gbs(self, cards: int) -> float | None:
        """Bus bandwidth of an all-reduce among cards of one machine, GB/s; None where the links do not join them."""
        return (cards - 1) * self.gbs if 2 <= cards <= self.peers + 1 else None


@dataclass(frozen=True)
class Table:
    """Everything in `gpus.toml`.

    Attributes:
        date: when it was last checked.
        gpus: targets by name.
        rocm: releases, oldest first.
        drivers: kernel-mode driver streams, oldest first.
        torch: torch releases, oldest first.
        wheel_gfx: targets in PyTorch's own wheels by ROCm variant.
        hipblaslt: targets that torch's hipBLASLt list gained, by the ROCm that torch was built with.
        addons: add-on package → its table.
        indexes: channel → index URL (with `{rocm}` where it depends on the release).
        placeholders: names on PyPI to beware of.
        dkms_breaks: drivers that do not build from some kernel on.
        unsupported_asics: GPU targets that ROCm's kernel side refuses → PCI ids.
        channels: channel → all that is known of that index.
        repos: package repositories of AMD.
        os_rows: GPU class (instinct, radeon, ryzen) → `distribution release kernel` lines of ROCm 10.0.
        links: between the cards of one machine, where their speed is known.
    """

    date: str
    gpus: dict[str, Gpu]
    rocm: tuple[RocmRelease, ...]
    drivers: tuple[Driver, ...]
    torch: tuple[TorchRelease, ...]
    wheel_gfx: dict[Version, frozenset[str]]
    hipblaslt: dict[Version, frozenset[str]]
    addons: dict[str, dict[str, Any]]
    indexes: dict[str, str]
    placeholders: tuple[Placeholder, ...]
    dkms_breaks: tuple[DkmsBreak, ...]
    unsupported_asics: dict[str, tuple[str, ...]]
    channels: dict[str, Index] = field(default_factory=dict)
    repos: tuple[Repo, ...] = ()
    os_rows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    links: tuple[Link, ...] = ()

    def gpu(self, gfx: str) -> Gpu | None:
        """Look up a target by name, features and old spellings allowed."""
        return self.gpus.get(base_name(gfx))

    def gpu_of_pci(self, device: str) -> Gpu | None:
        """Look up a target by its PCI device id, written as `0x74a1` or `74a1`."""
        for row in self.gpus.values():
            if _in_ranges(device, row.pci):
                return row
        return None

    def link_of(self, name: str) -> Link | None:
        """How cards of a name are joined, None where it is not known; torch's and AMD's spellings are both read."""
        wanted = _plain(name)
        return next((row for row in self.links if wanted in {_plain(product) for product in row.products}), None)

    def unsupported_asic(self, device: str) -> str:
        """Name the target of a PCI device that ROCm refuses (gfx8 and older), or an empty string."""
        for gfx, ids in self.unsupported_asics.items():
            if _in_ranges(device, ids):
                return gfx
        return ""

    def gpu_of_name(self, name: str) -> Gpu | None:
        """Look up a target by the name of a card, the maker's words left out: `MI300X`, `rx 7900 xtx`."""
        wanted = _plain(name)
        return next((row for row in self.gpus.values() if wanted in {_plain(p) for p in row.products}), None)

    def near_names(self, name: str) -> list[str]:
        """List cards whose names are much like one, nearest first."""
        known = {_plain(product): product for row in self.gpus.values() for product in row.products}
        return [known[near] for near in difflib.get_close_matches(_plain(name), known, n=3, cutoff=0.7)]

    def repo(self, kind: str, packager: str, distro: str) -> Repo | None:
        """Find where a distribution gets AMD's `driver` or `rocm` packages from."""
        rows = (row for row in self.repos if (row.kind, row.packager) == (kind, packager))
        return next((row for row in rows if distro in row.distros), None)

    def driver_of(self, module: Version) -> Driver | None:
        """Find the driver stream of a version in /sys/module/amdgpu/version: the newest one not above it."""
        best = None
        for row in self.drivers:
            if any(module[:2] >= start for start in row.modules):
                best = row
        return best

    def torch_release(self, version: Version) -> TorchRelease | None:
        """Find the row of a torch version by its major and minor number."""
        return next((row for row in self.torch if row.version[:2] == version[:2]), None)

    def wheel_targets(self, rocm: Version) -> frozenset[str]:
        """Targets in PyTorch's own wheel for a ROCm variant: the newest row not above it; empty if none is known."""
        known = [key for key in self.wheel_gfx if key <= rocm[:2]]
        return self.wheel_gfx[max(known)] if known else frozenset()

    def hipblaslt_targets(self, rocm: Version) -> frozenset[str]:
        """Targets that hipBLASLt accepts in a torch built with this ROCm."""
        return frozenset().union(*(gfx for key, gfx in self.hipblaslt.items() if key <= rocm[:2]))


_MAKERS = ("amd", "radeon", "instinct", "rx", "pro", "ai")


def _plain(name: str) -> str:
    """Write a card's name for comparison: small letters and digits, without the maker's words in front."""
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    while word := next((word for word in _MAKERS if text.startswith(word)), ""):
        text = text.removeprefix(word)
    return text


def _in_ranges(device: str, ids: tuple[str, ...]) -> bool:
    text = device.strip().lower().removeprefix("0x")
    if not text or any(c not in "0123456789abcdef" for c in text):
        return False
    number = int(text, 16)
    for entry in ids:
        first, _, last = entry.partition("-")
        if int(first, 16) <= number <= int(last or first, 16):
            return True
    return False


def _gpu(row: dict[str, Any]) -> Gpu:
    listed = {"products", "pci", "compute_units", "memory_gib", "product_gib"}
    fields: dict[str, Any] = {key: tuple(value) if key in listed else value for key, value in row.items()}
    return Gpu(**fields)


def _torch(row: dict[str, Any]) -> TorchRelease:
    return TorchRelease(
        version=parse_version(row["version"]),
        rocm=tuple(row["rocm"]),
        amd=tuple(row.get("amd", [])),
        triton=row["triton"],
        vision=parse_version(row["vision"]),
        audio=parse_version(row["audio"]),
        python=(parse_version(row["python"][0]), parse_version(row["python"][1])),
        source=row["source"],
    )


def _index(row: dict[str, Any]) -> Index:
    return Index(
        channel=row["channel"],
        url=row["url"],
        wheel_tag=row.get("wheel_tag", ""),
        python=tuple(parse_version(text) for text in row.get("python", [])),
        download_gib=float(row["download_gib"]),
        disk_gib=float(row["disk_gib"]),
        source=row["source"],
    )


def _repo(row: dict[str, Any]) -> Repo:
    listed = {"packages", "distros"}
    fields: dict[str, Any] = {key: tuple(value) if key in listed else value for key, value in row.items()}
    return Repo(**fields | {"first": tuple(row.get("first", ())), "codenames": row.get("codenames", {})})


def _by_rocm(rows: list[dict[str, Any]]) -> dict[Version, frozenset[str]]:
    return {parse_version(row["rocm"]): frozenset(row["gfx"]) for row in rows}


@lru_cache(maxsize=1)
def load_table() -> Table:
    """Read `gpus.toml`; once a process, since it never changes."""
    raw = tomllib.loads(resources.files("surefoot.machine").joinpath("gpus.toml").read_text(encoding="utf-8"))
    return Table(
        date=str(raw["date"]),
        gpus={row["gfx"]: _gpu(row) for row in raw["gpu"]},
        rocm=tuple(
            RocmRelease(
                parse_version(r["version"]),
                r["date"],
                r["line"],
                parse_version(r["hip"]),
                frozenset(r["gfx"]),
                r["source"],
            )
            for r in raw["rocm"]
        ),
        drivers=tuple(
            Driver(
                r["stream"],
                tuple(parse_version(m) for m in r["module"]),
                (parse_version(r["userspace"][0]), parse_version(r["userspace"][1])),
                r["date"],
                r["source"],
            )
            for r in raw["driver"]
        ),
        torch=tuple(_torch(row) for row in raw["torch"]),
        wheel_gfx=_by_rocm(raw["wheel_gfx"]),
        hipblaslt=_by_rocm(raw["hipblaslt"]),
        addons=raw["addon"],
        indexes={row["channel"]: row["url"] for row in raw["index"]},
        placeholders=tuple(
            Placeholder(r["name"], tuple(r["versions"]), r["instead"], r["source"]) for r in raw["placeholder"]
        ),
        dkms_breaks=tuple(
            DkmsBreak(parse_version(r["module"]), parse_version(r["kernel"]), r["symptom"], r["fixed_in"], r["source"])
            for r in raw["dkms_break"]
        ),
        unsupported_asics={gfx: tuple(ids) for gfx, ids in raw["unsupported_asics"].items()},
        channels={row["channel"]: _index(row) for row in raw["index"]},
        repos=tuple(_repo(row) for row in raw["repo"]),
        os_rows={row["family"]: tuple(row["rows"]) for row in raw["os"]},
        links=tuple(Link(tuple(r["products"]), r["peers"], float(r["gbs"]), r["source"]) for r in raw["link"]),
    )
