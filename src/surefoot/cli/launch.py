"""One command for every card: `surefoot train` starts itself once a card, through torch's own launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli.roll_call import Node
from surefoot.errors import UserError
from surefoot.machine.device import cards_in_sight

if TYPE_CHECKING:
    from surefoot.config import Config

MOST_PATIENCE = 600  # seconds for which a machine waits for the others, as torchrun itself
USUAL_PORT = 29500  # torchrun's, where several machines must know it
CHECKED = "SUREFOOT_MACHINE_CHECKED"  # tells the processes that their machine was looked at before they started
ON = ("1", "true", "y", "yes", "on")


def launch_command(cfg: Config, arguments: Sequence[str], environ: Mapping[str, str]) -> list[str] | None:
    """Return the command that starts this run's processes, or None if this process is to train itself.

    LLaMA-Factory's variables are honoured: FORCE_TORCHRUN, NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR,
    MASTER_PORT, MAX_RESTARTS, RDZV_ID, MIN_NNODES and MAX_NNODES.

    Args:
        cfg: the YAML; `device` is read.
        arguments: behind `surefoot train`, as typed.
        environ: of this process.

    Returns:
        The command, program and arguments.

    Raises:
        UserError: a variable is no number, or lacks for several machines.
    """
    forced = environ.get("FORCE_TORCHRUN", "").lower() in ON
    if "RANK" in environ or (not forced and (cfg.device not in ("auto", "cuda") or len(cards_in_sight()) < 2)):
        return None  # started by a launcher already, or there is nothing to start for
    per_node = _number(environ, "NPROC_PER_NODE", None)
    if per_node is None:
        per_node = 1 if cfg.device == "cpu" else max(1, count_cards())
    nodes = _number(environ, "NNODES", 1) or 1
    if not forced and per_node * nodes < 2:
        return None
    options = {"nproc-per-node": per_node, "max-restarts": _number(environ, "MAX_RESTARTS", 0)}
    if "RDZV_ID" in environ:  # torchrun's own meeting, which numbers the machines itself
        fewest, most = _number(environ, "MIN_NNODES", nodes), _number(environ, "MAX_NNODES", nodes)
        node = _node(environ, nodes=2)
        options |= {
            "nnodes": f"{fewest}:{most}", "rdzv-backend": "c10d", "rdzv-id": environ["RDZV_ID"],
            "rdzv-endpoint": node.meeting_point,
        }  # fmt: skip
    else:
        node = _node(environ, nodes)
        options |= {
            "nnodes": nodes, "node-rank": node.rank, "master-addr": node.address, "master-port": node.port,
        }  # fmt: skip
    launcher = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "surefoot", "train", *arguments]


def meet_others(cfg: Config, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """With several machines: wait until all are there, before each starts its processes.

    Args:
        cfg: the YAML; `ddp_timeout` is read.
        environ: of this process.
        say: tells the person what is waited for.

    Raises:
        UserError: the variables do not fit, or the meeting point cannot be reached.
        WorkError: a machine did not come.
    """
    nodes = _number(environ, "NNODES", 1) or 1
    if nodes < 2 or "RDZV_ID" in environ:
        return
    from surefoot.cli.roll_call import call_roll
    from surefoot.machine.network import check_names, interfaces

    check_names(environ, list(interfaces()))
    call_roll(_node(environ, nodes), min(cfg.ddp_timeout, MOST_PATIENCE), say)


def check_machine(cfg: Config, say: Callable[[str], None], root: Path = Path("/")) -> None:
    """Before several GPU processes start here: tell the worst of what they will trip over.

    Args:
        cfg: the YAML; `device` and `workarounds` are read.
        say: tells the person.
        root: where the file system begins; another folder in tests.

    Raises:
        UserError: training would sum gradients wrongly.
    """
    if cfg.device == "cpu" or not cards_in_sight(root):
        return
    from surefoot.doctor.launch import judge_launch
    from surefoot.machine.capture import capture

    found = judge_launch(capture(root), workarounds=cfg.workarounds)
    if found:
        more = f" ({len(found) - 1} more: surefoot doctor)" if found[1:] else ""
        say(f"warning: {found[0]}{more}")


def become(command: list[str]) -> None:
    """Turn this process into another program, which gets its signals from then on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[CHECKED] = "1"
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


def _node(environ: Mapping[str, str], nodes: int) -> Node:
    """Read which machine of the run this is, and where all meet."""
    several = nodes > 1
    address = environ.get("MASTER_ADDR")
    if several and not address:
        raise UserError(
            "several machines need MASTER_ADDR",
            hint="set it on every machine to the name or address of the one with NODE_RANK 0",
        )
    rank = _number(environ, "NODE_RANK", 0) or 0
    if rank >= nodes:
        raise UserError(f"NODE_RANK is {rank}, but NNODES is {nodes}", hint="the numbers go from 0 to NNODES - 1")
    port = _number(environ, "MASTER_PORT", None) or (USUAL_PORT if several else free_port())
    return Node(rank, nodes, address or "127.0.0.1", port)


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int | None:
    value = environ.get(name)
    if not value:
        return default
    if not value.isdigit():
        raise UserError(f"the environment variable {name} is {value!r}, not a number", hint="unset it, or mend it")
    return int(value)
