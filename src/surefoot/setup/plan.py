"""What a plan is: a wish, and ordered steps of which each says why, how, how to undo it and how it is verified."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.errors import UserError

SCHEMA = "surefoot.setup/1"
PURPOSES = ("train", "deepspeed", "flash-attn", "serve")
SOURCES = ("pip", "amd", "source")
ENVIRONMENTS = ("venv", "uv", "conda", "system", "docker")

#: Folder, below the one where the command runs, of constraints, journal and logs.
STATE_FOLDER = "surefoot-setup"
CONSTRAINTS = f"{STATE_FOLDER}/constraints.txt"


@dataclass(frozen=True)
class Wish:
    """What a person wants.

    Attributes:
        purposes: some of PURPOSES; `train` is always meant.
        gpu: a gfx target or the name of a card to plan for, or `cpu`; empty for the cards of the machine itself.
        rocm: the ROCm release wanted, as `7.2`; empty to choose.
        torch: the torch release wanted, as `2.13`; empty to choose.
        source: one of SOURCES; empty to choose.
        env: one of ENVIRONMENTS.
        folder: where the environment goes; of `system` and `docker`, not used.
        surefoot: what pip installs Surefoot from: a requirement or a folder.
        index: an index that torch comes from instead of the table's, as a company's mirror is; empty for the table's.
    """

    purposes: tuple[str, ...] = ("train",)
    gpu: str = ""
    rocm: str = ""
    torch: str = ""
    source: str = ""
    env: str = "venv"
    folder: str = ".venv"
    surefoot: str = "surefoot"
    index: str = ""

    def __post_init__(self) -> None:
        for name, value, known in (("--source", self.source, ("", *SOURCES)), ("--env", self.env, ENVIRONMENTS)):
            if value not in known:
                raise UserError(f"cannot be {value!r}", hint=f"one of {', '.join(k for k in known if k)}", key=name)
        for purpose in self.purposes:
            if purpose not in PURPOSES:
                raise UserError(
                    f"cannot hold {purpose!r}", hint=f"join some of {', '.join(PURPOSES)} with +", key="--for"
                )


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Attributes:
        id: short name, unique in the plan.
        title: what it does, for people.
        reason: why it is needed, with the fact that says so quoted.
        commands: bash lines; run in order in one shell under `set -euo pipefail`, in the folder of the run.
        verify: bash lines that all end with 0 exactly when the step is done; run before it (to skip) and after it.
        undo: bash lines, or lines starting with `#` for the reader.
        needs: ids of the steps that come before.
        root: whether the commands need root.
        reboot: whether the machine must be started again before the next step.
        login: whether a new login is needed before the next step.
        disk_gib: GiB that stay on the disk.
        minutes: about how long it takes on an ordinary machine and line.
        downloads: what is fetched and from where.
        satisfied: the fact that shows that nothing is to be done; empty when something is.
    """

    id: str
    title: str
    reason: str
    commands: tuple[str, ...]
    verify: tuple[str, ...]
    undo: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    root: bool = False
    reboot: bool = False
    login: bool = False
    disk_gib: float = 0.0
    minutes: float = 0.0
    downloads: tuple[str, ...] = ()
    satisfied: str = ""


@dataclass(frozen=True)
class Plan:
    """Steps in order, for one machine and one wish.

    Attributes:
        wish: what was asked for.
        machine: one line on the machine that it is for.
        targets: gfx targets that it serves, empty for a CPU.
        torch: the torch requirement's version with its local tag, as `2.13.0+rocm7.2`.
        index: the one index that torch comes from.
        constraints: lines of the constraints file that every later pip call gets.
        steps: the steps.
        notes: what the reader should know and no step can do.
    """

    wish: Wish
    machine: str
    targets: tuple[str, ...]
    torch: str
    index: str
    constraints: tuple[str, ...]
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()

    @property
    def todo(self) -> tuple[Step, ...]:
        """The steps that no fact shows to be done already."""
        return tuple(step for step in self.steps if not step.satisfied)

    def to_json(self) -> dict[str, Any]:
        """Write the stable JSON document of `surefoot setup --json`."""
        return {"schema": SCHEMA, **asdict(self)}


def misplaced(steps: Iterable[Step]) -> list[str]:
    """Find steps that come before something they need, need something unknown, or share an id.

    Args:
        steps: a plan's steps in order.

    Returns:
        One sentence for each; empty when the order is right.
    """
    seen: set[str] = set()
    wrong = []
    for step in steps:
        wrong += [f"{step.id} comes before {need}, or {need} is missing" for need in step.needs if need not in seen]
        if step.id in seen:
            wrong.append(f"two steps are called {step.id}")
        seen.add(step.id)
    return wrong
