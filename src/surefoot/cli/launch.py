"""One command for every card: `surefoot train` starts itself once a card, through torch's own launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from surefoot.errors import UserError
from surefoot.machine.device import cards_in_sight

if TYPE_CHECKING:
    from surefoot.config import Config

ON = ("1", "true", "y", "yes", "on")


def launch_command(cfg: Config, arguments: Sequence[str], environ: Mapping[str, str]) -> list[str] | None:
    """Return the command that starts this run's processes, or None if this process is to train itself.

    LLaMA-Factory's variables are honoured: FORCE_TORCHRUN, NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR, MASTER_PORT
    and MAX_RESTARTS.

    Args:
        cfg: the YAML; `device` is read.
        arguments: behind `surefoot train`, as typed.
        environ: of this process.

    Returns:
        The command, program and arguments.

    Raises:
        UserError: a variable is no number.
    """
    forced = environ.get("FORCE_TORCHRUN", "").lower() in ON
    if "RANK" in environ or (not forced and (cfg.device not in ("auto", "cuda") or len(cards_in_sight()) < 2)):
        return None  # started by a launcher already, or there is nothing to start for
    per_node = _number(environ, "NPROC_PER_NODE", None)
    if per_node is None:
        per_node = 1 if cfg.device == "cpu" else max(1, count_cards())
    nodes = _number(environ, "NNODES", 1)
    if not forced and per_node * (nodes or 1) < 2:
        return None
    options = {
        "nnodes": nodes, "node-rank": _number(environ, "NODE_RANK", 0), "nproc-per-node": per_node,
        "master-addr": environ.get("MASTER_ADDR", "127.0.0.1"),
        "master-port": _number(environ, "MASTER_PORT", None) or free_port(),
        "max-restarts": _number(environ, "MAX_RESTARTS", 0),
    }  # fmt: skip
    launcher = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "surefoot", "train", *arguments]


def become(command: list[str]) -> None:
    """Turn this process into another program, which gets its signals from then on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def count_cards() -> int:
    """Count the cards that torch can use, in a process of its own: importing torch here would be too early."""
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    lines = answer.stdout.split()
    return int(lines[-1]) if answer.returncode == 0 and lines and lines[-1].isdigit() else 0


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int | None:
    value = environ.get(name)
    if not value:
        return default
    if not value.isdigit():
        raise UserError(f"the environment variable {name} is {value!r}, not a number", hint="unset it, or mend it")
    return int(value)
