"""The whole of `surefoot bench`: device, ceilings, and the job if a YAML names one."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from surefoot.errors import WorkError

if TYPE_CHECKING:
    from rich.console import Console

    from surefoot.bench.ceilings import Ceilings
    from surefoot.bench.job import JobFigures
    from surefoot.config import Config


@dataclass(frozen=True)
class Figures:
    """All that was measured.

    Attributes:
        device: as torch names it.
        name: of the card, or "CPU" with its threads.
        torch: torch's version, and ROCm's or CUDA's.
        ceilings: of the device.
        job: of the YAML's step; None without a YAML.
    """

    device: str
    name: str
    torch: str
    ceilings: Ceilings
    job: JobFigures | None

    def to_json(self) -> dict[str, Any]:
        """Everything as one JSON document."""
        document = asdict(self)
        if self.job is not None:
            document["job"]["share"] = self.job.share
            document["job"]["arithmetic"]["total"] = self.job.arithmetic.total
            keys = ("name", "kind", "ms", "calls")
            top = [dict(zip(keys, row, strict=True)) for row in self.job.profile.top]
            document["job"]["profile"]["top"] = top
        return document


def measure(cfg: Config | None, wanted: str, steps: int, console: Console) -> Figures:
    """Measure the machine, and a job on it. Nothing may have imported torch before, as for `run_job`.

    Args:
        cfg: the job; None for the machine alone.
        wanted: without a job, the device: "auto", "cpu", "cuda" or "cuda:N".
        steps: of the job to time.
        console: on stderr.

    Returns:
        The figures.

    Raises:
        UserError: the request cannot be met.
        WorkError: the work failed, or memory ran out.
    """
    from surefoot.machine.device import choose_device
    from surefoot.run.workarounds import apply_plan, plan_for

    def say(message: str) -> None:
        console.print(message, highlight=False, markup=False, soft_wrap=True)

    if cfg is not None:
        for warning in cfg.warnings:
            say(f"warning: {warning}")
        cfg, applied = apply_plan(plan_for(cfg), cfg, os.environ)
        for entry in applied:
            say(entry["line"])
    choice = choose_device(wanted if cfg is None else cfg.device)
    say(choice.message)

    from surefoot.bench.ceilings import measure_ceilings

    with explained_memory(choice.device):
        ceilings = measure_ceilings(choice.device, say)
        job = None if cfg is None else _job(cfg, steps, ceilings, choice.device, console, say)
    return Figures(choice.device, *describe(choice.device), ceilings, job)


def _job(
    cfg: Config, steps: int, ceilings: Ceilings, device: str, console: Console, say: Callable[[str], None]
) -> JobFigures:
    from surefoot.bench.job import bench_job

    return bench_job(cfg, steps, ceilings, device, console, say)


@contextmanager
def explained_memory(device: str) -> Generator[None]:
    """Say plainly that memory ran out.

    Args:
        device: as torch names it.

    Yields:
        Nothing.

    Raises:
        WorkError: the device, or the host on a CPU, has no memory left.
    """
    import torch

    try:
        yield
    except (RuntimeError, MemoryError) as error:  # on a CPU, torch has no class of its own for it
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        raise WorkError(
            f"out of memory on {device}",
            hint="is another program using it? With a YAML, `surefoot check` shows what the job needs",
        ) from error


def describe(device: str) -> tuple[str, str]:
    """Return the card's name and torch's version with what it was built for."""
    import torch

    build = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads", f"torch {torch.__version__}"
    return torch.cuda.get_device_name(device), f"torch {torch.__version__}, {build}"
