"""Capture a machine into a snapshot: all that rules may need, without root, without importing torch, in seconds."""

from __future__ import annotations

import getpass
import os
import platform
import re
import resource
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import surefoot
from surefoot.files import write_json
from surefoot.machine import sections, site
from surefoot.machine.mask import Masker
from surefoot.machine.probe import Probe, free_space, run_command
from surefoot.machine.snapshot import SCHEMA, Snapshot

#: Environment variables that may matter; no other leaves the machine.
_VARIABLES = re.compile(
    r"^(HIP|HSA|HSAKMT|ROCR?|ROCM|ROCBLAS|ROCP|HIPBLASLT|HIPBLAS|HCC|AMD|AMDGPU|GPU|MIOPEN|RCCL|NCCL|CUDA|"
    r"NVIDIA|PYTORCH|TORCH|TORCHINDUCTOR|TORCHDYNAMO"
    r"|TRITON|FLASH_ATTENTION|BNB|DS|DEEPSPEED|AITER|CMAKE_HIP|PIP|UV|CONDA|SLURM|PBS|LSB|OMPI|PMI|LOCAL|"
    r"WORLD|RANK|MASTER|OMP|MKL|HF|TRANSFORMERS"
    r"|SINGULARITY|APPTAINER|KUBERNETES|LD|PYTHON|VIRTUAL|MAX|TMPDIR|HOME|XDG_CACHE|CC|CXX|CPATH|SSL_CERT|"
    r"REQUESTS_CA|container)(_|$)"
)
_HARD_TO_SEE = {"KUBERNETES_SERVICE_HOST", "MASTER_ADDR"}
_JOURNAL = (
    "amdgpu|kfd|amdkfd|drm|gfxhub|IOMMU|iommu|AER:|pcieport|firmware|Firmware|Out of memory|oom-kill|"
    "lockdown|Lockdown|Key was rejected|unavailable key"
    "|module verification|nvidia|NVRM|nouveau|segfault|trap |avc:|apparmor|mce:|EDAC|Linux version|gVisor"
)
_COMMANDS: dict[str, list[str]] = {
    "rocminfo": ["rocminfo"],
    "rocm-smi": ["rocm-smi", "--showproductname", "--json"],
    "amd-smi": ["amd-smi", "version", "--json"],
    "amd-smi-list": ["amd-smi", "list", "--json"],
    "amd-smi-static": ["amd-smi", "static", "--json"],
    "nvidia-smi": ["nvidia-smi"],
    "dkms": ["dkms", "status"],
    "hipcc": ["hipcc", "--version"],
    "mokutil": ["mokutil", "--sb-state"],
    "mokutil-test-key": ["mokutil", "--test-key", "/var/lib/shim-signed/mok/MOK.der"],
    "modinfo": ["modinfo", "-F", "signer", "amdgpu"],
    "getenforce": ["getenforce"],
    "systemd-detect-virt": ["systemd-detect-virt"],
    "ldconfig": ["ldconfig", "-p"],
    "dmesg": ["dmesg"],
    "journal": ["journalctl", "-k", "-b", "-q", "--no-pager", "-n", "4000"],
    "packages-dpkg": ["dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package} ${Version}\n"],
    "packages-rpm": ["rpm", "-qa", "--qf", "ii  %{NAME} %{VERSION}-%{RELEASE}\n"],
}
_PACKAGES = re.compile(
    r"rocm|hip|amdgpu|hsa|linux-firmware|firmware-amd|pve-firmware|linux-modules-extra|nvidia-driver|libdrm-amdgpu",
    re.I,
)
_LIBRARIES = re.compile(r"amdhip|hsa-runtime|rocblas|hipblas|MIOpen|rccl|amd_comgr|amd_smi|hiprtc|libcuda")


def capture(root: Path = Path("/"), python: Path | None = None, time_limit: float = 2.5) -> Snapshot:
    """Look at a machine.

    Args:
        root: where its file tree stands; anything but `/` is a made-up tree, for which no command is run.
        python: the interpreter whose packages are looked at; None for the running one.
        time_limit: seconds that any one command may take; they run side by side.

    Returns:
        The snapshot, secrets and names masked.
    """
    live = root == Path("/")
    probe = Probe(root)
    with ThreadPoolExecutor(max_workers=8) as pool:
        pending = (
            {name: pool.submit(run_command, argv, time_limit, 400_000) for name, argv in _COMMANDS.items()}
            if live
            else {}
        )
        sections.system(probe)
        sections.driver(probe)
        sections.gpus(probe)
        sections.rocm(probe)
        sections.settings(probe)
        packages = _python(python)
        commands = {name: task.result() for name, task in pending.items()}
    commands["ldconfig"] = _keep_lines(commands.get("ldconfig"), _LIBRARIES)
    raw: dict[str, Any] = {
        "schema": SCHEMA,
        "captured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "tool": f"surefoot {surefoot.__version__}",
        "system": {"os": platform.system(), "machine": platform.machine()},
        **probe.tree,
        "env": {n: ("set" if n in _HARD_TO_SEE else v) for n, v in sorted(os.environ.items()) if _VARIABLES.match(n)},
        "process": _process(probe),
        "disk": _disks(probe),
        "python": packages,
        "dmesg": _journal(commands),
        "commands": commands,
    }
    _packages(commands)
    return Snapshot(masker(raw).tree(raw))


def capture_to_file(path: Path, python: Path | None = None) -> Snapshot:
    """Capture the live machine into a JSON file.

    Args:
        path: the file to write.
        python: the interpreter whose packages are looked at; None for the running one.

    Returns:
        The snapshot.

    Raises:
        UserError: the file cannot be written.
    """
    snapshot = capture(python=python)
    write_json(path, snapshot.raw)
    return snapshot


def masker(raw: dict[str, Any]) -> Masker:
    """Make the masker for this machine: its user, its host names and its home folder."""
    names = {os.environ.get(n, "") for n in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")} | {
        str(raw.get("process", {}).get("user", ""))
    }
    home = str(Path.home())
    return Masker(
        names - {"root", ""},
        {platform.node(), platform.node().partition(".")[0], os.environ.get("HOSTNAME", "")},
        {home},
    )


def _python(python: Path | None) -> dict[str, Any]:
    folders, facts = site.environment_of(python)
    addons, binaries = site.read_addons(folders)
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    prefix = Path(os.environ.get("CONDA_PREFIX", "/nonexistent"))
    return {
        **facts,
        "site": [str(f) for f in folders],
        "dists": site.read_dists(folders),
        "torch": site.read_torch(folders),
        "addons": addons,
        "binaries": binaries,
        "compiler": {"cc": compiler, "python_h": site.has_python_headers() if python is None else None},
        "conda_libstdcxx": site.newest_libstdcxx(prefix) if facts["kind"] == "conda" else None,
        "shadowed_by": _shadow(folders) if python is None else "",
    }


def _shadow(folders: list[Path]) -> str:
    """A torch that PYTHONPATH would put before the environment's own."""
    own = {str(f) for f in folders}
    for entry in os.environ.get("PYTHONPATH", "").split(":"):
        if entry and entry not in own and (Path(entry) / "torch" / "version.py").is_file():
            return entry
    return ""


def _process(probe: Probe) -> dict[str, Any]:
    status = probe.file("/proc/self/status", 8192)
    probe.tree["files"].pop("/proc/self/status", None)
    seccomp = re.search(r"^Seccomp:\s*(\d+)", status, re.M)
    groups = sorted(os.getgroups())
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no passwd entry, as in many containers
        user = ""
    wanted = {44, 109, 993, *groups}
    kept = []
    for line in probe.file("/etc/group", 262_144).splitlines():
        parts = line.split(":")
        if len(parts) >= 4 and (parts[0] in ("video", "render") or (parts[2].isdigit() and int(parts[2]) in wanted)):
            members = [m for m in parts[3].split(",") if m == user]
            kept.append(":".join([parts[0] if parts[0] != user else "<user>", "x", parts[2], ",".join(members)]))
    probe.tree["files"]["/etc/group"] = "\n".join(kept)
    limits: dict[str, Any] = {}
    for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("memlock", resource.RLIMIT_MEMLOCK)):
        soft = resource.getrlimit(kind)[0]
        limits[name] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    return {
        "uid": os.getuid(),
        "gid": os.getgid(),
        "groups": groups,
        "user": user,
        "seccomp": int(seccomp.group(1)) if seccomp else None,
        "limits": limits,
    }


def _disks(probe: Probe) -> dict[str, Any]:
    import tempfile

    home = Path.home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    import sys

    places = {
        "venv": Path(sys.prefix),
        "home": home,
        "tmp": Path(tempfile.gettempdir()),
        "pip_cache": Path(os.environ.get("PIP_CACHE_DIR") or cache / "pip"),
        "miopen": cache / "miopen",
    }
    kinds = _mounts(probe)
    found = {}
    for name, path in places.items():
        mount = max(
            (m for m in kinds if str(path).startswith(m.rstrip("/") + "/") or str(path) == m or m == "/"),
            key=len,
            default="",
        )
        found[name] = {**free_space(path), "fs": kinds.get(mount, "")}
    return found


def _mounts(probe: Probe) -> dict[str, str]:
    try:
        text = (probe.root / "proc/self/mounts").read_text(errors="replace")
    except OSError:
        return {}
    rows = (line.split() for line in text.splitlines())
    return {row[1]: row[2] for row in rows if len(row) > 2}


def _keep_lines(answer: dict[str, Any] | None, pattern: re.Pattern[str], most: int = 60) -> dict[str, Any] | None:
    if answer and isinstance(answer.get("out"), str):
        answer["out"] = "\n".join([x.strip() for x in answer["out"].splitlines() if pattern.search(x)][:most])
    return answer


def _journal(commands: dict[str, Any]) -> Any:
    """Take the kernel's messages out of dmesg, else out of the journal; only lines on hardware, drivers and memory."""
    dmesg, journal = commands.pop("dmesg", None), commands.pop("journal", None)
    for answer in (dmesg, journal):
        if answer and answer.get("rc") == 0 and answer.get("out", "").strip():
            words = re.compile(_JOURNAL)
            lines = [x for x in answer["out"].splitlines() if words.search(x)]
            return "\n".join(lines[:150] + lines[150:][-450:])[:200_000] or "(no line on hardware, drivers or memory)"
    if dmesg and "not permitted" in str(dmesg.get("err", "")):
        return {"error": "EPERM"}
    return {"error": "no dmesg" if dmesg is None else str(dmesg.get("error") or "empty")}


def _packages(commands: dict[str, Any]) -> None:
    """Join what dpkg or rpm list about ROCm and drivers into one `packages` answer; removed packages are left out."""
    lines: list[str] = []
    for name in ("packages-dpkg", "packages-rpm"):
        answer = commands.pop(name, None)
        if answer and isinstance(answer.get("out"), str):
            lines += [x for x in answer["out"].splitlines() if x.startswith("ii") and _PACKAGES.search(x)]
    commands["packages"] = {"rc": 0, "out": "\n".join(lines[:200]), "err": ""} if lines else None
