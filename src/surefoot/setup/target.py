"""What a plan is for: the cards that were named, or those of the machine itself."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.doctor.clues import display_only, gpu_words, pci_words
from surefoot.errors import UserError
from surefoot.machine.facts import Machine
from surefoot.machine.gfx import is_gfx, split_targets
from surefoot.machine.table import load_table
from surefoot.setup.plan import Wish


@dataclass(frozen=True)
class Target:
    """What is planned for.

    Attributes:
        kind: rocm, cuda or cpu.
        gfx: GPU targets of `rocm`.
        here: whether they are this machine's own, so that its facts about driver and device nodes count.
        fact: the fact that says so.
    """

    kind: str
    gfx: tuple[str, ...]
    here: bool
    fact: str


def target_of(m: Machine, wish: Wish) -> Target:
    """Find what the plan is for: what was wished, else what the machine has.

    Args:
        m: the machine.
        wish: the wish.

    Returns:
        The target.

    Raises:
        UserError: the card named is unknown, or the machine's card is none that ROCm takes.
    """
    if wish.gpu:
        return _wished_target(m, wish.gpu)
    if m.compute_targets and not display_only(m) and not (m.has_nvidia and _only_integrated(m)):
        unknown = [gfx for gfx in m.compute_targets if load_table().gpu(gfx) is None]
        if unknown:
            raise _refuse(f"the table of GPUs has no row for {unknown[0]}, which this machine has")
        return Target("rocm", m.compute_targets, True, f"this machine has {', '.join(m.compute_targets)}")
    if m.has_nvidia:
        return Target("cuda", (), True, "this machine has an NVIDIA GPU")
    if m.wsl and m.snapshot.present("/dev/dxg"):
        raise UserError(
            "WSL shows /dev/dxg, but not which card Windows has",
            hint="name it: --gpu gfx1100, --gpu 'RX 7900 XTX', --gpu nvidia, or --gpu cpu to leave it alone",
            key="--gpu",
        )
    if m.has_amd and not display_only(m):
        old = [gfx for g in m.amd_pci if (gfx := load_table().unsupported_asic(g.device))]
        what = f"ROCm's driver takes no {old[0]}" if old else "the table of GPUs does not know this card"
        raise _refuse(f"{what} ({pci_words(m) or gpu_words(m)})")
    return Target("cpu", (), True, "no GPU to train on is here")


def _refuse(message: str) -> UserError:
    return UserError(
        message,
        hint="would match: another card (--gpu gfxNNN plans for it), or this machine's CPU: --gpu cpu",
        key="--gpu",
    )


def _only_integrated(m: Machine) -> bool:
    rows = [load_table().gpu(gfx) for gfx in m.compute_targets]
    return all(row is not None and row.integrated for row in rows)


def _wished_target(m: Machine, text: str) -> Target:
    if text.lower() == "cpu":
        return Target("cpu", (), True, "--gpu cpu")
    if text.lower() in ("nvidia", "cuda"):
        return Target("cuda", (), m.has_nvidia, f"--gpu {text}")
    table = load_table()
    named = table.gpu_of_name(text)
    names = [named.gfx] if named else split_targets(text)
    for name in names or [text]:
        if table.gpu(name) is None:
            known = f"a target ({', '.join(table.gpus)}), a card as `MI300X` or `RX 7900 XTX`, nvidia, or cpu"
            near = "" if is_gfx(name) else ", ".join(table.near_names(text))
            what = f"no GPU target {name}" if is_gfx(name) else f"no card {text!r}"
            raise UserError(
                f"the table of GPUs has {what}",
                hint=f"near ones: {near}; or its target, as gfx1030" if near else known,
                key="--gpu",
            )
    gfx = tuple(dict.fromkeys(table.gpus[row.gfx].gfx for name in names if (row := table.gpu(name))))
    own = set(m.targets) or ({*gfx} if m.wsl and m.snapshot.present("/dev/dxg") else set())
    return Target("rocm", gfx, set(gfx) <= own, f"--gpu {text}")
