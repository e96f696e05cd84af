"""Before several machines start their processes: are they all there, and has each a number of its own?

torchrun waits ten minutes for a machine that never comes, whatever the reason, and then says that a socket was closed.
Here the machines meet on the same address and port first and say who is missing, unreachable, or there twice.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from surefoot.errors import UserError, WorkError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

TELL_AFTER = 10.0  # seconds after which a person is told what is waited for
LOOK_EVERY = 0.2
CLASH, GONE = "clash", "gone"  # words in the store


@dataclass(frozen=True)
class Node:
    """One machine of a run.

    Attributes:
        rank: its NODE_RANK.
        nodes: how many there are.
        address: MASTER_ADDR.
        port: MASTER_PORT.
    """

    rank: int
    nodes: int
    address: str
    port: int

    @property
    def meeting_point(self) -> str:
        """Where all meet."""
        return f"{self.address}:{self.port}"

    @property
    def name(self) -> str:
        """This machine, for a message."""
        return f"node {self.rank} ({socket.gethostname()})"


def call_roll(node: Node, patience: float, say: Callable[[str], None]) -> None:
    """Wait until all machines are there; returns at about the same time on all of them.

    Args:
        node: this machine.
        patience: seconds to wait.
        say: tells the person what is waited for.

    Raises:
        UserError: the port is taken, the meeting point cannot be reached, or two machines have the same number.
        WorkError: a machine did not come.
    """
    from torch.distributed import DistError, TCPStore

    deadline = time.monotonic() + patience
    opened: Any = None
    if node.rank == 0:
        try:
            opened = TCPStore("127.0.0.1", node.port, is_master=True, wait_for_workers=False)
        except DistError as error:
            raise UserError(
                f"MASTER_PORT {node.port} of {node.name} is taken", hint="another run? choose another port for all"
            ) from error
    try:
        _reach(node, deadline, say)
        met = TCPStore(node.address, node.port, is_master=False, wait_for_workers=False)
        _sign(node, met)
        _wait_for_all(node, met, deadline, patience, say)
        _part(node, met)
    except DistError as error:
        raise WorkError(
            f"{node.name} lost {node.meeting_point} while it waited for the others",
            hint="node 0 ended; what it says is the cause",
        ) from error
    finally:
        del opened  # frees the port, which torchrun takes next


def _reach(node: Node, deadline: float, say: Callable[[str], None]) -> None:
    """Wait until somebody answers at the meeting point."""
    began, told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((node.address, node.port), timeout=5).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise UserError(
                f"{node.name} cannot reach MASTER_ADDR:MASTER_PORT {node.meeting_point}: {why}",
                hint="it must be an address of the machine with NODE_RANK 0 that all others reach (firewall?), and "
                "node 0 must have been started",
            )
        if not told and time.monotonic() - began > TELL_AFTER:
            told = True
            say(f"{node.name} waits for an answer from {node.meeting_point}: {why}")
        time.sleep(1.0)


def _sign(node: Node, met: TCPStore) -> None:
    """Write this machine down; a second one with its number tells everyone."""
    place = met.add(f"count {node.rank}", 1)
    met.set(f"node {node.rank} {place}", f"{socket.gethostname()}, process {os.getpid()}")
    if place > 1:
        names = [met.get(f"node {node.rank} {n}").decode() for n in (1, place)]
        met.set(CLASH, f"NODE_RANK {node.rank} was given to two: {names[0]}, and {names[1]}")


def _wait_for_all(node: Node, met: TCPStore, deadline: float, patience: float, say: Callable[[str], None]) -> None:
    began, told = time.monotonic(), False
    while True:
        if met.check([CLASH]):
            _refuse(node, met)
        missing = [str(rank) for rank in range(node.nodes) if not met.check([f"node {rank} 1"])]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise WorkError(
                f"{node.name} waited {patience:.0f} s at {node.meeting_point}, and of {node.nodes} nodes "
                f"{', '.join(missing)} did not come",
                hint="start the command on every machine, each with a NODE_RANK of its own",
            )
        if not told and time.monotonic() - began > TELL_AFTER:
            told = True
            say(f"{node.name} waits for node {', '.join(missing)} of {node.nodes} at {node.meeting_point}")
        time.sleep(LOOK_EVERY)


def _refuse(node: Node, met: TCPStore) -> NoReturn:
    words = met.get(CLASH).decode()
    if node.rank == 0:
        time.sleep(2.0)  # the store is in this process: let the others read it
    raise UserError(words, hint="each machine needs a NODE_RANK of its own, from 0 to NNODES - 1")


def _part(node: Node, met: TCPStore) -> None:
    """Let the one that keeps the store be the last to leave."""
    met.add(GONE, 1)
    ends = time.monotonic() + 5.0
    while node.rank == 0 and time.monotonic() < ends and met.add(GONE, 0) < node.nodes:
        time.sleep(0.05)
