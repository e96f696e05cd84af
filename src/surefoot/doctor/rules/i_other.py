"""CUDA and CPU machines (F118 to F122): plain findings, no AMD noise."""

from __future__ import annotations

import re

from surefoot.doctor.clues import is_rocm, said
from surefoot.doctor.finding import Hit, hit, seen
from surefoot.doctor.rules.h_environment import load_rows
from surefoot.machine.facts import Machine
from surefoot.machine.versions import Version, parse_version


def nvidia_driver(m: Machine) -> Version:
    """Version of the NVIDIA kernel driver; empty when it is not loaded or unknown."""
    text = m.snapshot.text("/proc/driver/nvidia/version")
    found = re.search(r"(?:Module[^\d]*(?:x86_64|aarch64)?\s+)(\d{3}\.\d+(?:\.\d+)?)", text) or re.search(
        r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text
    )
    if found:
        return parse_version(found.group(1))
    answer = m.snapshot.command("nvidia-smi")
    shown = re.search(r"Driver Version:\s*(\d+\.\d+(?:\.\d+)?)", answer.out) if answer else None
    return parse_version(shown.group(1)) if shown else ()


def f118(m: Machine) -> Hit | None:
    """The NVIDIA driver is older than the CUDA that torch was built for."""
    if not m.torch or m.torch.flavour != "cuda" or not m.has_nvidia:
        return None
    driver, cuda = nvidia_driver(m), parse_version(m.torch.cuda)
    oldest = parse_version(load_rows("known_bad.toml")["cuda_driver"].get(str(cuda[0]), "")) if cuda else ()
    text = m.log_said(r"The NVIDIA driver on your system is too old|CUDA driver version is insufficient")
    if driver and oldest and driver[:2] < oldest:
        need = ".".join(str(n) for n in oldest)
        evidence = (
            f"the driver is {'.'.join(str(n) for n in driver)}",
            f"torch {m.torch.version} is for CUDA {m.torch.cuda}, which wants {need} or newer",
        )
        return seen(*evidence, f"log: {text}", need=need) if text else hit(*evidence, need=need)
    return seen(f"log: {text}", need="a newer one") if text else None


def f119(m: Machine) -> Hit | None:
    """A CPU torch on a machine with an NVIDIA GPU."""
    if not m.torch or m.torch.flavour != "cpu" or not m.has_nvidia:
        return None
    cards = ", ".join(f"{g.bdf} is {g.vendor}:{g.device}" for g in m.nvidia_pci[:2]) or "/dev/nvidia0 is there"
    return hit(f"torch/version.py: {m.torch.version}, cuda = None", cards)


def f120(m: Machine) -> Hit | None:
    """A ROCm torch on a machine whose only GPU is NVIDIA's."""
    if not is_rocm(m) or not m.has_nvidia or m.has_amd or not m.torch:
        return None
    return hit(f"torch/version.py: {m.torch.version}", "the GPU on the bus is NVIDIA's (vendor 0x10de)")


def f121(m: Machine) -> Hit | None:
    """The NVIDIA card has no working driver."""
    if not m.nvidia_pci or (m.amd_pci and not (m.torch and m.torch.flavour == "cuda")):
        return None
    other = [g for g in m.nvidia_pci if g.driver and g.driver not in ("nvidia", "nvgpu")]
    gone = (
        m.snapshot.absent("/proc/driver/nvidia/version")
        or m.snapshot.absent("/sys/module/nvidia")
        or m.snapshot.absent("/dev/nvidiactl")
    )
    if not other and not (gone and not nvidia_driver(m)):
        return None
    return hit(
        *(f"{g.bdf} is bound to {g.driver}" for g in other[:2]), "the nvidia module is not loaded" if gone else ""
    )


def f122(m: Machine) -> Hit | None:
    """NVIDIA's library and kernel module are of different versions."""
    text = said(m, r"Driver/library version mismatch")
    return seen(text) if text else None
