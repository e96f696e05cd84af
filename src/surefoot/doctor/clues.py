"""Small questions that several rules ask."""

from __future__ import annotations

from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Node
from surefoot.machine.table import load_table
from surefoot.machine.versions import Version, short

RENDER = "/dev/dri/renderD"


def quote(m: Machine, path: str) -> str:
    """Quote a file's first line, or say that the path is not there."""
    lines = m.snapshot.text(path).splitlines()
    if lines:
        return f"{path}: {lines[0][:200]}"
    return f"{path} is not there" if m.snapshot.absent(path) else f"{path} is there"


def said(m: Machine, pattern: str) -> str:
    """Quote the program's output, or else the kernel's messages, where they match."""
    if line := m.log_said(pattern):
        return f"log: {line}"
    if line := m.kernel_said(pattern):
        return f"dmesg: {line}"
    return f"a probe printed: {line}" if (line := m.said(pattern)) else ""


def is_rocm(m: Machine) -> bool:
    """Whether the installed torch is a ROCm build."""
    return m.torch is not None and m.torch.flavour == "rocm"


def amd_context(m: Machine) -> bool:
    """Whether this is about AMD at all: a card, a ROCm torch or a ROCm installation."""
    return m.has_amd or is_rocm(m) or bool(m.rocm_trees or m.rocm_pip)


def display_only(m: Machine) -> bool:
    """Whether the only AMD graphics are a processor's two display CUs, on which nobody trains."""
    rows = [g.row for g in m.kfd] or [g.row for g in m.amd_pci]
    return bool(rows) and all(r is not None and r.integrated and max(r.compute_units, default=9) <= 2 for r in rows)


def amd_wanted(m: Machine) -> bool:
    """Whether AMD is meant here: ROCm is installed, or a card to train on is there and no other GPU with its torch."""
    if is_rocm(m) or m.rocm_trees or m.rocm_pip:
        return True
    other = m.has_nvidia and m.torch is not None and m.torch.flavour != "rocm"
    return m.has_amd and not display_only(m) and not other


def denied(m: Machine, error: str) -> list[tuple[str, Node]]:
    """Device nodes of the GPU whose opening failed with an errno name."""
    paths = ["/dev/kfd", *m.snapshot.glob("/dev/dri/renderD*"), "/dev/dxg"]
    found = [(path, node) for path in paths if (node := m.snapshot.node(path))]
    return [(path, node) for path, node in found if node.open == error]


def group_members(m: Machine, gid: int) -> tuple[str, list[str]]:
    """Name and listed members of a group, by its number, from this machine's group file."""
    for line in m.snapshot.text("/etc/group").splitlines():
        parts = line.split(":")
        if len(parts) >= 4 and parts[2] == str(gid):
            return parts[0], [p for p in parts[3].split(",") if p]
    return "", []


def user(m: Machine) -> str:
    """Name of the process's user; empty when unknown."""
    value = m.snapshot.section("process").get("user")
    return value if isinstance(value, str) else ""


def secure_boot(m: Machine) -> bool | None:
    """Whether Secure Boot is on, by the firmware's variable or by mokutil; None when nobody could look."""
    text = m.snapshot.text("/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").strip()
    answer = m.snapshot.command("mokutil")
    told = answer.out if answer and "SecureBoot" in answer.out else ""
    if (text and text[-1] == "1") or "SecureBoot enabled" in told:
        return True
    return False if text or told else None


def dkms_for_running(m: Machine) -> str:
    """Version of the DKMS driver that is installed for the running kernel; empty for none."""
    return next((v for v, kernel, state in m.dkms if kernel == m.kernel and state.startswith("installed")), "")


def discrete(m: Machine) -> list[str]:
    """Names of visible discrete GPUs."""
    return [g.name for g in m.visible if not g.integrated]


def gpu_words(m: Machine) -> str:
    """Name the machine's AMD GPUs in a few words."""
    if m.kfd:
        return ", ".join(dict.fromkeys(g.gfx for g in m.kfd))
    names = [gpu.row.gfx if gpu.row else f"1002:{gpu.device.removeprefix('0x')}" for gpu in m.amd_pci]
    return ", ".join(dict.fromkeys([*names, *m.rocminfo_targets])) or "an AMD GPU"


def pci_words(m: Machine) -> str:
    """Quote the AMD GPUs on the PCI bus."""
    return "; ".join(f"{g.bdf} is {g.vendor}:{g.device}" + (f" ({g.row.gfx})" if g.row else "") for g in m.amd_pci[:4])


def effective(m: Machine, gfx: str) -> str:
    """The target as ROCm sees it once the override is applied."""
    return m.override_target or gfx


def uncovered(m: Machine) -> list[str]:
    """Visible targets for which torch is known to have no kernels, the override applied."""
    return [t for t in m.targets if m.covers(effective(m, t)) is False and m.covers(t) is False]


def line(version: Version) -> str:
    """Write a version's major and minor number."""
    return short(version)


def newest_rocm() -> Version:
    """The newest ROCm release in the table."""
    return load_table().rocm[-1].version


def kfd_open(m: Machine) -> str:
    """How opening /dev/kfd went: `ok`, an errno name, or empty."""
    node = m.snapshot.node("/dev/kfd")
    return node.open if node else ""
