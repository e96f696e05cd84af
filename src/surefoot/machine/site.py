"""What is installed in a Python environment, read from its files without importing anything of it."""

from __future__ import annotations

import platform
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from surefoot.machine.elf import read_library
from surefoot.machine.snapshot import dist_name

#: Packages whose file lists matter: who owns which folder.
_OWNERS = re.compile(
    r"^(torch\w*|(pytorch-)?triton(-rocm)?|rocm.*|bitsandbytes|flash-attn.*|numpy|aiter|amd-aiter|amdsmi|xformers|deepspeed)$"
)
#: Packages whose compiled parts are looked into.
_COMPILED = (
    "flash_attn",
    "bitsandbytes",
    "xformers",
    "deepspeed",
    "causal_conv1d",
    "mamba_ssm",
    "apex",
    "vllm",
    "aiter",
)


def environment_of(python: Path | None) -> tuple[list[Path], dict[str, Any]]:
    """Find a Python's site-packages.

    Args:
        python: an interpreter of another environment, or None for the running one.

    Returns:
        Its site-packages folders, nearest first, and what is known of the interpreter.
    """
    if python is None:
        prefix, version = Path(sys.prefix), platform.python_version()
        folders = list(dict.fromkeys(Path(p) for p in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))))
        folders += [
            Path(p) for p in sys.path if p.endswith(("site-packages", "dist-packages")) and Path(p) not in folders
        ]
    else:
        prefix = python.absolute().parent.parent
        folders = sorted(prefix.glob("lib/python3*/site-packages")) + sorted(
            prefix.glob("lib64/python3*/site-packages")
        )
        version = _version_of(prefix, folders)
    return [f for f in folders if f.is_dir()], {
        "executable": str(python or sys.executable),
        "version": version,
        "abi": f"cp{''.join(version.split('.')[:2])}",
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")) if python is None else _threaded(folders),
        "libc": " ".join(platform.libc_ver()).strip() or _musl(),
        "kind": _kind(prefix, python is None),
    }


def _threaded(folders: list[Path]) -> bool:
    return any(f.parent.name.endswith("t") for f in folders)


def _musl() -> str:
    return "musl" if list(Path("/lib").glob("ld-musl-*")) else ""


def _version_of(prefix: Path, folders: list[Path]) -> str:
    config = prefix / "pyvenv.cfg"
    if config.is_file():
        found = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+(?:\.\d+)?)", config.read_text(errors="replace"), re.M)
        if found:
            return found.group(1)
    return folders[0].parent.name.removeprefix("python").rstrip("t") if folders else ""


def _kind(prefix: Path, running: bool) -> str:
    if (prefix / "conda-meta").is_dir():
        return "conda"
    if (prefix / "pyvenv.cfg").is_file() or (running and sys.prefix != sys.base_prefix):
        return "venv"
    return "system"


def read_dists(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """Read every distribution's metadata; the first folder that has a name wins, as importing does."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for info in sorted((*folder.glob("*.dist-info"), *folder.glob("*.egg-info"))):
            row = _dist(info)
            if row:
                name = dist_name(row.pop("name"))
                if name in found and found[name].get("folder") == str(folder):
                    found[name].setdefault("also", []).append(row["version"])
                found.setdefault(name, {**row, "folder": str(folder)})
    for row in found.values():
        row.pop("folder", None)
    return found


def _dist(info: Path) -> dict[str, Any] | None:
    metadata = info / "METADATA" if info.is_dir() else info
    if info.is_dir() and not metadata.is_file():
        metadata = info / "PKG-INFO"
    try:
        with metadata.open(encoding="utf-8", errors="replace") as handle:
            head = handle.read(65536).partition("\n\n")[0]
        modified = int(metadata.stat().st_mtime)
    except OSError:
        return None
    fields = {k: v.strip() for k, v in re.findall(r"^(Name|Version|Summary): (.*)$", head, re.M)}
    if not fields.get("Name") or not fields.get("Version"):
        return None
    name = dist_name(fields["Name"])
    row: dict[str, Any] = {"name": name, "version": fields["Version"], "modified": modified}
    requires = re.findall(r"^Requires-Dist: (.*)$", head, re.M)
    of_interest = bool(_OWNERS.match(name))
    kept = requires if of_interest else [r for r in requires if re.match(r"(torch|triton|rocm)\b", r)]
    if kept:
        row["requires"] = [r.strip() for r in kept[:60]]
    if of_interest:
        row["summary"] = fields.get("Summary", "")[:120]
        row["top"] = _top_names(info)
    installer = info / "INSTALLER"
    if info.is_dir() and installer.is_file():
        row["installer"] = installer.read_text(errors="replace").strip()[:20]
    return row


def _top_names(info: Path) -> list[str]:
    """Import names that a distribution owns, from its RECORD (its files as they are), else its top_level.txt."""
    record, listed = info / "RECORD", info / "top_level.txt"
    names: set[str] = set()
    if info.is_dir() and record.is_file():
        for line in record.read_text(errors="replace").splitlines():
            first, slash, _ = line.partition("/")
            if slash and re.fullmatch(r"\w+", first):
                names.add(first)
    elif info.is_dir() and listed.is_file():
        names = set(listed.read_text(errors="replace").split())
    return sorted(names)[:30]


def read_torch(folders: list[Path]) -> dict[str, Any] | None:
    """Read torch's own version file and the targets of its kernel files; None when no torch is there."""
    package = next((f / "torch" for f in folders if (f / "torch" / "version.py").is_file()), None)
    if package is None:
        return None
    text = (package / "version.py").read_text(errors="replace")
    found = dict(re.findall(r"^(__version__|cuda|hip|debug)\b[^=\n]*=\s*(.+?)\s*$", text, re.M))
    values = {k: (None if v in ("None", "") else v.strip("'\"")) for k, v in found.items()}
    library = package / "lib"
    names = sorted(entry.name for entry in library.iterdir()) if library.is_dir() else []
    hip = read_library(library / "libtorch_hip.so") if "libtorch_hip.so" in names else None
    gfx = {
        "kernels": list(hip.targets) if hip else [],
        "rocblas": _file_targets(library / "rocblas" / "library"),
        "hipblaslt": _file_targets(library / "hipblaslt" / "library"),
        "aotriton": _file_targets(library / "aotriton.images"),
    }
    return {
        "version": values.get("__version__") or "",
        "hip": values.get("hip"),
        "cuda": values.get("cuda"),
        "libs": [n for n in names if re.match(r"lib(torch_|c10_|amd|hsa|roc|hip|MIOpen)", n)][:60],
        "gfx": {k: v for k, v in gfx.items() if v},
    }


def _file_targets(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted({t for entry in folder.iterdir() for t in re.findall(r"gfx[0-9a-f]{3,4}", entry.name)})


def read_addons(folders: list[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """List the native libraries of add-ons and what they link: (files by add-on, links by file)."""
    addons: dict[str, Any] = {}
    binaries: dict[str, Any] = {}
    for folder in folders:
        for name in _COMPILED:
            if name in addons or not (folder / name).is_dir():
                continue
            files = sorted((folder / name).rglob("*.so*"))[:40]
            addons[name] = {"files": [f.name for f in files]}
            for file in files if name != "bitsandbytes" else ():  # it loads one of its many by name, and only that one
                _links(file, folder, binaries)
        for file in sorted(folder.glob("*.so"))[:60]:
            if re.match(r"(flash_attn|causal_conv1d|selective_scan|amp_C|apex|exllama|fused_)", file.name):
                _links(file, folder, binaries)
    return addons, binaries


def _links(file: Path, folder: Path, binaries: dict[str, Any]) -> None:
    library = read_library(file)
    if library:
        binaries[str(file.relative_to(folder))] = {"needed": list(library.needed), "runpath": list(library.runpath)}


def newest_libstdcxx(prefix: Path) -> str | None:
    """The newest GLIBCXX version in conda's own C++ library, or None when it has none."""
    library = prefix / "lib" / "libstdc++.so.6"
    if not library.is_file():
        return None
    versions = [v.decode() for v in re.findall(rb"GLIBCXX_(3\.4\.\d+)\b", library.read_bytes())]
    return max(versions, key=lambda version: int(version.rpartition(".")[2])) if versions else None


def has_python_headers() -> bool:
    """Whether the running Python's C headers are installed."""
    folder = sysconfig.get_path("include")
    return bool(folder) and (Path(folder) / "Python.h").is_file()
