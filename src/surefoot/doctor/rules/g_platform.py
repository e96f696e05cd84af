"""Beyond the catalogue: platforms, launchers, schedulers, kernels (F100 to F114, F123 to F126)."""

from __future__ import annotations

import re

from surefoot.doctor.clues import amd_context, denied, dkms_for_running, is_rocm, pci_words, quote, said
from surefoot.doctor.finding import Hit, hit, seen
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import as_dict, as_int, as_text
from surefoot.machine.versions import parse_version

_NEVER = {
    "virtualbox": "VirtualBox has no PCI passthrough",
    "vmware": "VMware's desktop products show a virtual display only",
    "parallels": "Parallels shows a virtual display only",
    "hyperv": "Hyper-V shows a GPU only through discrete device assignment on servers",
    "apple": "Apple's virtualization passes no PCI device on",
    "utm": "UTM shows a virtual display only",
    "firecracker": "Firecracker has no PCI devices to pass on by default",
}


def f100(m: Machine) -> Hit | None:
    """A platform that never shows the card."""
    wanted = is_rocm(m) or m.rocm_trees or m.rocm_pip
    if m.amd_pci or m.kfd or m.nvidia_pci or m.wsl or not wanted:
        return None
    if m.sandbox:
        return hit("the kernel is gVisor's, not Linux", platform="gVisor")
    reason = _NEVER.get(m.virtual_machine)
    if not reason or not m.pci_looked:
        return None
    return hit(
        quote(m, "/sys/class/dmi/id/sys_vendor"),
        f"the hypervisor is {m.virtual_machine}: {reason}",
        platform=m.virtual_machine,
    )


def f101(m: Machine) -> Hit | None:
    """WSL without the door to Windows' driver."""
    if not m.wsl or m.container or not m.snapshot.absent("/dev/dxg") or not is_rocm(m):
        return None
    return hit("/dev/dxg is not there", f"the kernel is {m.kernel}")


def f102(m: Machine) -> Hit | None:
    """No torch is installed."""
    if m.torch is not None or not m.dists_known or not m.dists or "torch" not in m.python:
        return None
    return hit("site-packages has no torch", f"Python is {as_text(m.python.get('version'))}")


def f103(m: Machine) -> Hit | None:
    """One device list hides every GPU."""
    cards = m.reachable
    names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    given = [n for n in names if m.env(n) is not None]
    if m.has_nvidia and not cards and is_rocm(m) is False:
        value = m.env("CUDA_VISIBLE_DEVICES")
        return hit(f"CUDA_VISIBLE_DEVICES={value!r}", name="CUDA_VISIBLE_DEVICES") if value in ("", "-1") else None
    both = "ROCR_VISIBLE_DEVICES" in given and len(given) > 1
    if not cards or m.visible or not given or both or not is_rocm(m):
        return None
    return hit(f"{given[0]}={m.env(given[0])!r}", f"{len(cards)} GPU(s) are here, none is left", name=given[0])


def f112(m: Machine) -> Hit | None:
    """More ranks than GPUs, or a rank that asks for a GPU it was not given."""
    text = m.log_said(r"invalid device ordinal|hipErrorInvalidDevice\b")
    cards, rank = len(m.visible), m.env("LOCAL_RANK")
    world = as_int(m.env("LOCAL_WORLD_SIZE"))
    if not m.kfd or not cards or (cards < len(m.reachable) and not text and rank is None):
        return None
    too_high = rank is not None and rank.isdigit() and int(rank[:6]) >= cards
    lists = [
        f"{n}={m.env(n)}"
        for n in (
            "ROCR_VISIBLE_DEVICES",
            "HIP_VISIBLE_DEVICES",
            "CUDA_VISIBLE_DEVICES",
            "SLURM_STEP_GPUS",
            "SLURM_GPUS_ON_NODE",
        )
        if m.env(n)
    ]
    if not (too_high or world > cards) and not (text and len(m.reachable) == len(m.kfd) and lists):
        return None
    evidence = (
        f"LOCAL_RANK={rank}" if rank else "",
        f"LOCAL_WORLD_SIZE={world}" if world else "",
        f"{cards} GPU(s) are visible",
        *lists,
    )
    return seen(*evidence, f"log: {text}") if text else hit(*evidence)


def f113(m: Machine) -> Hit | None:
    """A scheduler's job that did not ask for a GPU."""
    if not m.env("SLURM_JOB_ID") or not amd_context(m):
        return None
    granted = [
        n
        for n in (
            "SLURM_JOB_GPUS",
            "SLURM_STEP_GPUS",
            "SLURM_GPUS",
            "SLURM_GPUS_ON_NODE",
            "ROCR_VISIBLE_DEVICES",
            "GPU_DEVICE_ORDINAL",
        )
        if m.env(n)
    ]
    if granted or not denied(m, "EPERM"):
        return None
    return hit(
        f"SLURM_JOB_ID={m.env('SLURM_JOB_ID')}, but no SLURM_JOB_GPUS, SLURM_GPUS_ON_NODE or ROCR_VISIBLE_DEVICES",
        "the job's device cgroup refuses the GPU's nodes (EPERM)",
    )


def f114(m: Machine) -> Hit | None:
    """A kernel older than the card."""
    kernel = parse_version(m.kernel)
    for gpu in m.amd_pci:
        row = gpu.row
        oldest = parse_version(row.kernel_min) if row else ()
        known = any(g.gfx == row.gfx for g in m.kfd) if row else False
        # Enterprise kernels carry newer drivers under old numbers, so only a card that did not come up counts.
        if (
            row
            and row.wavefront == 32
            and oldest
            and kernel
            and kernel < oldest
            and not known
            and not dkms_for_running(m)
            and not m.driver
            and not m.container
            and not m.wsl
        ):
            return hit(
                f"kernel {m.kernel}; {row.gfx} wants {row.kernel_min} or newer",
                pci_words(m),
                card=row.gfx,
                oldest=row.kernel_min,
            )
    return None


def f123(m: Machine) -> Hit | None:
    """Two versions: torch's files and its metadata tell two versions."""
    dist, fields = m.dists.get("torch"), as_dict(m.python.get("torch"))
    inside = as_text(fields.get("version"))
    if not dist or not inside or dist.version == inside:
        return None
    if parse_version(dist.version) == parse_version(inside) and "+" not in dist.version:
        return None  # some builders leave the local tag out of the metadata
    return hit(f"torch/version.py: {inside}", f"torch's dist-info: {dist.version}")


def f124(m: Machine) -> Hit | None:
    """Most of the GPU's memory is in use already."""
    found = []
    for path in m.snapshot.glob("/sys/class/drm/card*/device/mem_info_vram_used"):
        total = as_int(m.snapshot.text(path.replace("_used", "_total")))
        used = as_int(m.snapshot.text(path))
        if total >= 4 << 30 and used > 0.5 * total:
            found.append(f"{path}: {used / 2**30:.1f} of {total / 2**30:.0f} GiB")
    return hit(*found[:4]) if found else None


def f125(m: Machine) -> Hit | None:
    """Automatic NUMA balancing on a machine with many GPUs."""
    if len([g for g in m.visible if g.row and g.row.wavefront == 64]) < 4:
        return None
    path = "/proc/sys/kernel/numa_balancing"
    return hit(quote(m, path), f"{len(m.visible)} GPUs are visible") if m.snapshot.text(path).strip() == "1" else None


def f126(m: Machine) -> Hit | None:
    """The home folder cannot be written, so no compiled kernel can be kept."""
    home = as_dict(m.snapshot.section("disk").get("home"))
    gpu = m.torch is not None and m.torch.flavour != "cpu"
    moved = m.env("TRITON_CACHE_DIR") or m.env("TRITON_HOME")
    text = said(m, r"(Permission denied|Read-only file system).*\.(triton|cache)")
    if home.get("writable") is not False or moved or not gpu:
        return None
    evidence = f"{as_text(home.get('path'))} cannot be written"
    return seen(evidence, text) if text else hit(evidence)


def f130(m: Machine) -> Hit | None:
    """Two ranks bind the same GPU."""
    text = m.log_said(r"Duplicate GPU detected")
    return (
        seen(f"log: {text}", *(f"{n}={m.env(n)}" for n in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if m.env(n)))
        if text
        else None
    )


def f131(m: Machine) -> Hit | None:
    """Docker Desktop or another VM runs the container, away from the card."""
    if not m.container or m.wsl or not is_rocm(m) or m.amd_pci or m.kfd or not m.pci_looked:
        return None
    desktop = re.search(r"linuxkit|docker-desktop|orbstack|colima|lima", m.kernel + m.snapshot.text("/proc/version"))
    return hit(f"the kernel is {m.kernel}: a virtual machine that runs containers on a desktop") if desktop else None


def _probes(m: Machine) -> list[dict[str, object]]:
    rows = m.snapshot.raw.get("probes")
    return [as_dict(row) for row in rows] if isinstance(rows, list) else []


def f132(m: Machine) -> Hit | None:
    """The subnormal probe of `--deep`: fp16 below its smallest normal number became zero."""
    flushed = [r for r in _probes(m) if r.get("name") == "fp16 subnormals" and r.get("ok") is False]
    return (
        Hit((f"probe fp16 subnormals: {as_text(flushed[0].get('detail'))}",), seen=True, level="note")
        if flushed
        else None
    )


def f137(m: Machine) -> Hit | None:
    """A probe of `--deep` crashed or computed wrongly."""
    failed = [r for r in _probes(m) if r.get("ok") is False and r.get("name") != "fp16 subnormals"]
    return seen(*(f"probe {as_text(r.get('name'))}: {as_text(r.get('detail'))}" for r in failed)) if failed else None
