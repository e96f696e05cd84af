"""What a run ran on: versions, system, memory and cards. No host name, no user name, no path."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from pathlib import Path
from typing import Any

from surefoot import __version__
from surefoot.machine.device import cards_in_sight

PACKAGES = (
    "torch", "transformers", "peft", "datasets", "accelerate", "tokenizers", "safetensors", "numpy", "pyarrow",
    "pydantic", "omegaconf", "typer", "rich", "matplotlib", "huggingface-hub", "bitsandbytes", "deepspeed",
    "flash-attn", "liger-kernel", "triton", "vllm",
)  # fmt: skip


def snapshot(*, with_torch: bool) -> dict[str, Any]:
    """Read the machine.

    Args:
        with_torch: also ask torch what it sees; imports it, which takes seconds.

    Returns:
        A JSON object; what could not be read is null.
    """
    found: dict[str, Any] = {
        "surefoot": __version__,
        "python": platform.python_version(),
        "system": system_name(),
        "architecture": platform.machine(),
        "cpu": cpu_name(),
        "cpu_cores": usable_cores(),
        "memory_gib": memory_gib(),
        "cards": cards_in_sight(),
        "torch_build": torch_build(),
        "packages": package_versions(),
    }
    if with_torch:
        found["torch_sees"] = torch_devices()
    return found


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that matter here, from their metadata: nothing is imported. None: not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def torch_build() -> dict[str, str | None]:
    """Which toolkit the installed torch was built for, read from its `version.py` without importing it.

    Returns:
        Keys "version", "cuda", "hip"; a value is None when torch is missing or was not built for that toolkit.
    """
    build: dict[str, str | None] = {"version": None, "cuda": None, "hip": None}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return build
    source = Path(spec.origin).with_name("version.py")
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    for key, name in (("version", "__version__"), ("cuda", "cuda"), ("hip", "hip")):
        match = re.search(rf"^{name}\s*(?::[^=]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        build[key] = match.group(1) if match else None
    return build


def torch_devices() -> list[dict[str, Any]]:
    """The GPUs that torch can use, as torch describes them; memory in GiB."""
    import torch

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                # Only ROCm builds have gcnArchName; only the capability names a CUDA chip's generation.
                "architecture": getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}",
            }
        )
    return devices


def system_name() -> str:
    """The operating system's own name for itself."""
    if platform.system() == "Linux":
        try:
            release = platform.freedesktop_os_release()
        except OSError:
            return f"Linux {platform.release()}"
        return f"{release.get('PRETTY_NAME', 'Linux')}, kernel {platform.release()}"
    return platform.platform()


def cpu_name() -> str | None:
    """The processor's model name; None when the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or None


def usable_cores() -> int | None:
    """Cores that this process may run on, which a container or a job queue can make fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def memory_gib() -> float | None:
    """The machine's memory; None when the system does not tell."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
