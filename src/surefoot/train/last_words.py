"""What a rank learns from the shared store when the others no longer answer: who is missing, and why if it said so.

torch's store waits for ever for a process that stands still, so every question to it has a limit here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

FAILED, HERE = "surefoot/failed", "surefoot/here"  # in the store that all ranks share
PATIENCE = 5.0  # seconds for which a rank that was cut off waits for the others to say why


def within(seconds: float, work: Callable[[], T]) -> T:
    """Do something in a thread of its own and stop waiting for it after a while.

    Args:
        seconds: to wait.
        work: releases Python's lock while it waits; left to itself when it is late.

    Returns:
        What it returned.

    Raises:
        TimeoutError: it is late. An exception of the work's own goes on.
    """
    done: list[Any] = []

    def run() -> None:
        try:
            done.append((True, work()))
        except Exception as error:  # noqa: BLE001 - raised again below, in the thread that asked
            done.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    good, value = done[0]
    if not good:
        raise value
    return value


def why_missing(store: Any, names: Sequence[str], own: int) -> str:
    """Look in the store for who is missing and why.

    Args:
        store: that all ranks share.
        names: of all ranks.
        own: this rank, which leaves word that it is here.

    Returns:
        A sentence; empty when all are there.
    """
    here = [f"{HERE}/{rank}" for rank in range(len(names))]
    store.set(here[own], "yes")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not store.check([FAILED]) and not store.check(here):
        time.sleep(0.1)
    if store.check([FAILED]):
        rank, _, words = store.get(FAILED).decode().partition(" ")
        return f"{names[int(rank)]}: {words}"
    missing = [name for name, key in zip(names, here, strict=True) if not store.check([key])]
    if not missing:
        return ""
    return f"{', '.join(missing)} does not answer: killed, stopped, or longer than ddp_timeout at its work"
