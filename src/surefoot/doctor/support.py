"""What can be shown to others: `surefoot env` and the support bundle, without secrets, names or places of people."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

from surefoot.doctor.diagnose import Report
from surefoot.files import write_bytes
from surefoot.machine.capture import masker
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot

_PACKAGES = (
    "torch",
    "torchvision",
    "torchaudio",
    "triton",
    "triton-rocm",
    "pytorch-triton-rocm",
    "rocm-sdk-core",
    "transformers",
    "peft",
    "datasets",
    "accelerate",
    "safetensors",
    "numpy",
    "bitsandbytes",
    "flash-attn",
    "deepspeed",
    "liger-kernel",
)


def environment_text(snapshot: Snapshot) -> str:
    """Describe an environment in lines fit for an issue report.

    Args:
        snapshot: a captured machine; captures are masked already.

    Returns:
        `key: value` lines.
    """
    m = Machine(snapshot)
    lines = {
        "surefoot": str(snapshot.raw.get("tool", "")).removeprefix("surefoot "),
        "system": f"{m.os_release.get('PRETTY_NAME', m.distro)}, kernel {m.kernel}"
        + (f", {m.container} container" if m.container else "")
        + (", WSL2" if m.wsl else ""),
        "python": f"{m.python.get('version')} ({m.python.get('kind')})",
        "gpus": ", ".join(f"{g.gfx} {g.compute_units} CUs {g.vram / 2**30:.0f} GiB" for g in m.visible)
        or ", ".join(g.device for g in m.pci)
        or "none",
        "driver": snapshot.text("/sys/module/amdgpu/version")
        or ("the kernel's own amdgpu" if m.module_loaded else "")
        or snapshot.text("/sys/module/nvidia/version")
        or "none",
        "rocm": ", ".join(f"{k} {'.'.join(map(str, v))}" for k, v in m.rocm_trees.items())
        or ("pip " + ".".join(map(str, m.rocm_pip)) if m.rocm_pip else "none"),
        "memory": f"{m.ram / 2**30:.0f} GiB",
    }
    lines |= {name: m.dists[name].version for name in _PACKAGES if name in m.dists}
    shown = [
        n
        for n in snapshot.section("env")
        if n.startswith(("HIP", "HSA", "ROC", "CUDA_VIS", "PYTORCH", "TORCH", "NCCL", "TRITON"))
    ]
    lines |= {f"env {name}": str(snapshot.env(name)) for name in sorted(shown)}
    return "\n".join(f"{key}: {value}" for key, value in lines.items()) + "\n"


def write_bundle(path: Path, snapshot: Snapshot, report: Report, texts: Mapping[str, str] | None = None) -> None:
    """Write a zip file to attach to an issue: the snapshot, the diagnosis and further texts, all masked.

    Args:
        path: the zip file.
        snapshot: the captured machine.
        report: its diagnosis.
        texts: further files by name, for example a run's log; each is masked here.

    Raises:
        UserError: the file cannot be written.
    """
    hide = masker(snapshot.raw)
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("snapshot.json", json.dumps(hide.tree(snapshot.raw), indent=1, ensure_ascii=False))
        archive.writestr("diagnosis.json", json.dumps(hide.tree(report.to_json()), indent=1, ensure_ascii=False))
        archive.writestr("env.txt", hide.text(environment_text(snapshot)))
        for name, text in (texts or {}).items():
            archive.writestr(Path(name).name, hide.text(text))
    write_bytes(path, memory.getvalue())
