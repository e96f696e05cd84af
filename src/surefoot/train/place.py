"""Which of several processes this is, on which device it works, and by what it talks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.errors import UserError

if TYPE_CHECKING:
    from surefoot.config import Config


@dataclass(frozen=True)
class Place:
    """Which process of a run this is, as torchrun and `accelerate launch` tell it.

    Attributes:
        rank: its number among all processes.
        world: how many there are.
        local_rank: its number on this machine.
        restarts: how often the launcher has started the processes again.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    restarts: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; without them it is a run of one process.

        Args:
            environ: the environment.

        Returns:
            The place.

        Raises:
            UserError: some of them are missing or are no numbers.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        try:
            restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
            if int(environ.get("WORLD_SIZE") or 1) <= 1:
                return cls(restarts=restarts)
            rank, world, local = (int(environ[name]) for name in names)
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{', '.join(names)} must all be numbers where WORLD_SIZE is above 1: {error}",
                hint="start them with torchrun or `accelerate launch`, or unset WORLD_SIZE",
            ) from None
        return cls(rank, world, local, restarts)


def device_of(cfg: Config, place: Place) -> str:
    """Return which device a process should ask for.

    Args:
        cfg: the YAML; `device` is read.
        place: of the process.

    Returns:
        As `choose_device` wants it.

    Raises:
        UserError: one device is named for several processes.
    """
    if place.world == 1 or cfg.device == "cpu":
        return cfg.device
    if ":" in cfg.device:
        raise UserError(
            f"device {cfg.device} is one card, but there are {place.world} processes",
            hint="leave `device` out: each process takes the card of its LOCAL_RANK", key="device",
        )  # fmt: skip
    import torch

    if cfg.device == "auto" and not torch.cuda.is_available():
        return "auto"
    # A launcher that shows each process its own card only leaves one in sight, which is number 0 then.
    return "cuda:0" if torch.cuda.device_count() == 1 else f"cuda:{place.local_rank}"


def backend_of(cfg: Config, device: str) -> str:
    """Choose how ranks talk: gloo on the CPU, and beside NCCL (RCCL has its name) for what lies on the host.

    Args:
        cfg: the YAML; `ddp_backend` is read.
        device: of the process, as torch names it.

    Returns:
        As torch's process groups want it.

    Raises:
        UserError: a backend that does not go with the device.
    """
    if device == "cpu" and cfg.ddp_backend in (None, "gloo"):
        return "gloo"
    if device != "cpu" and cfg.ddp_backend in (None, "nccl"):
        return "cpu:gloo,cuda:nccl"
    if cfg.ddp_backend == "gloo":
        return "gloo"
    raise UserError(f"{cfg.ddp_backend} is not for {device}", hint="leave it out", key="ddp_backend")
