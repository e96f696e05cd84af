"""Which device a run computes on, chosen so that a GPU is never ignored in silence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surefoot.errors import UserError

# PCI vendor ids and the display/accelerator classes, from the PCI ID database.
GPU_VENDORS = {"0x1002": "AMD", "0x10de": "NVIDIA"}
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")


@dataclass(frozen=True)
class DeviceChoice:
    """The device of a run.

    Attributes:
        device: as torch names it: "cpu", "cuda:0", ... (ROCm devices are called cuda too).
        message: one line for the person.
    """

    device: str
    message: str


def cards_in_sight(root: Path = Path("/")) -> list[str]:
    """List the GPUs that the system's own tables show, whether torch can use them or not.

    Args:
        root: where the file system begins; another folder in tests.

    Returns:
        One line a card, as "AMD card at 0000:c1:00.0". Integrated graphics count as well.
    """
    cards = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor = GPU_VENDORS.get(_read(device / "vendor"))
        if vendor and _read(device / "class").startswith(GPU_CLASSES):
            cards.append(f"{vendor} card at {device.name}")
    if not cards and (root / "dev/kfd").exists():
        cards.append("AMD card (/dev/kfd is there)")
    if not cards and (root / "dev/nvidia0").exists():
        cards.append("NVIDIA card (/dev/nvidia0 is there)")
    return cards


def choose_device(wanted: str = "auto", root: Path = Path("/")) -> DeviceChoice:
    """Choose where to compute: the first GPU that torch can use, else the CPU if no GPU is in sight.

    Args:
        wanted: the YAML's `device`: "auto", "cpu", "cuda" or "cuda:N".
        root: where the file system begins; another folder in tests.

    Returns:
        The choice, with one line that says why.

    Raises:
        UserError: a GPU is wanted or in sight, but the installed torch cannot use it.
    """
    if wanted == "cpu":
        return DeviceChoice("cpu", "Device: CPU, as the YAML asks.")
    import torch

    build = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        index = int(wanted.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise UserError(
                f"device {wanted} is not there: torch sees {torch.cuda.device_count()} GPU(s)",
                hint="name one of cuda:0 ...", key="device",
            )  # fmt: skip
        return DeviceChoice(f"cuda:{index}", f"Device: {torch.cuda.get_device_name(index)} ({build}).")
    cards = cards_in_sight(root)
    if cards or wanted != "auto":
        seen = ", ".join(cards) or "no card"
        raise UserError(
            f"{build} cannot use a GPU here; this machine shows {seen}",
            hint="run `surefoot doctor` to find the cause, or set `device: cpu` to train on the CPU on purpose",
            key="device",
        )
    return DeviceChoice("cpu", f"Device: CPU. No AMD or NVIDIA card is in sight on this machine ({build}).")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
