"""Snapshot and wish to an ordered plan; whatever cannot be planned is refused before anything is changed."""

from __future__ import annotations

from dataclasses import replace

from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot, as_dict, as_float
from surefoot.setup import system
from surefoot.setup.access import visible
from surefoot.setup.addons import addon_notes, addon_steps
from surefoot.setup.choose import Choice, choose
from surefoot.setup.image import image_steps
from surefoot.setup.plan import Plan, Step, Wish, misplaced
from surefoot.setup.python_env import check_folder, environment_steps, torch_check_step, torch_step, trainer_steps
from surefoot.setup.source_build import torch_from_source
from surefoot.setup.target import Target, target_of
from surefoot.setup.toolchain import rocm_sdk_step
from surefoot.setup.wsl import wsl_bridge


def make_plan(snapshot: Snapshot, wish: Wish) -> Plan:
    """Plan the way from a machine to a training environment.

    Args:
        snapshot: what the machine showed.
        wish: what is wanted.

    Returns:
        The plan, its steps in an order in which none comes before what it needs.

    Raises:
        UserError: no row of the table serves the wish here; the message says what would match.
    """
    m = Machine(snapshot)
    check_folder(m, wish)
    target = target_of(m, wish)
    if wish.env == "docker":
        return _docker_plan(m, wish, target)
    choice = choose(m, wish, target)
    below, notes = system.system_steps(m, choice, target)
    return _plan(m, wish, choice, target, _assemble(m, wish, choice, target, below), notes)


def inside_plan(snapshot: Snapshot, wish: Wish) -> Plan:
    """Plan what a Dockerfile for this machine is made from: the same wish with an environment in place of a container.

    Args:
        snapshot: what the host showed.
        wish: what is wanted.

    Returns:
        The plan; the Dockerfile leaves out what is the host's.

    Raises:
        UserError: no row of the table serves the wish here.
    """
    return make_plan(snapshot, replace(wish, env="venv") if wish.env == "docker" else wish)


def _docker_plan(m: Machine, wish: Wish, target: Target) -> Plan:
    """The host's steps, the image built from the plan inside, and the checks in a container of it."""
    inside = inside_plan(m.snapshot, wish)
    below = tuple(step for step in inside.steps if step.id in system.IDS)
    return replace(inside, wish=wish, steps=(*below, *image_steps(m, target, inside, below)))


def _assemble(m: Machine, wish: Wish, choice: Choice, target: Target, below: tuple[Step, ...]) -> tuple[Step, ...]:
    """Put the steps in their order and let each part wait for the one below it."""
    environment = environment_steps(m, wish, choice)
    first = replace(environment[0], needs=tuple(step.id for step in below[-1:]))
    prefix = _mask(m, target)
    torch = torch_from_source(m, wish, choice) if choice.source == "source" else (torch_step(choice),)
    bridge = _bridge(m, choice, target, {step.id for step in torch})
    have = {step.id for step in (*torch, *bridge)}
    addons = tuple(step for step in addon_steps(m, wish, choice) if step.id not in have)
    check = torch_check_step(choice, target, prefix, tuple(step.id for step in bridge) or ("torch",))
    ends = trainer_steps(wish, choice, ("torch-check", *(step.id for step in addons)), prefix)
    steps = [*below, first, *environment[1:], *torch, *bridge, check, *addons, *ends]
    compiled = next((i for i, step in enumerate(steps) if "rocm-devel" in step.needs), None)
    if compiled is not None:
        steps.insert(compiled, system.rocm_devel(m, choice, target))
    return tuple(steps)


def _bridge(m: Machine, choice: Choice, target: Target, have: set[str]) -> tuple[Step, ...]:
    """What WSL needs between torch and its first kernel; nothing elsewhere."""
    if not (m.wsl and target.kind == "rocm" and target.here):
        return ()
    sdk = rocm_sdk_step(choice, ("torch",), sdk_with_devices=False)
    bridge = wsl_bridge(m, choice, ("torch", sdk.id) if sdk else ("torch",))
    return (sdk, bridge) if sdk and sdk.id not in have and not bridge.satisfied else (bridge,)


def _mask(m: Machine, target: Target) -> str:
    """The variable that keeps a processor's graphics out of the checks; empty where nothing is to be kept out."""
    masked = any(m.env(name) is not None for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
    shown = "" if masked or target.kind != "rocm" else visible(m, target)
    return f"HIP_VISIBLE_DEVICES={shown} " if shown else ""


def _plan(
    m: Machine, wish: Wish, choice: Choice, target: Target, steps: tuple[Step, ...], notes: tuple[str, ...]
) -> Plan:
    assert misplaced(steps) == [], misplaced(steps)
    mask = _mask(m, target)
    more = [f"export {mask.strip()} before training: the processor's graphics are a GPU too"] if mask else []
    need, free = sum(step.disk_gib for step in steps if not step.satisfied), _free(m)
    if free is not None and free < need:
        more.append(f"the plan takes about {need:.0f} GiB of disk, and {free:.0f} GiB are free")
    return Plan(
        wish=wish,
        machine=_words(m, target),
        targets=choice.targets,
        torch=choice.torch,
        index=choice.index,
        constraints=choice.pins,
        steps=steps,
        notes=(*choice.notes, *addon_notes(choice), *notes, *more),
    )


def _free(m: Machine) -> float | None:
    places = [as_dict(m.snapshot.section("disk").get(name)) for name in ("cwd", "venv", "home")]
    known = [as_float(place.get("free_gib"), -1.0) for place in places if place]
    return next((free for free in known if free >= 0), None)


def _words(m: Machine, target: Target) -> str:
    """One line on what is planned for."""
    where = m.os_release.get("PRETTY_NAME") or " ".join(x for x in (m.distro, m.os_release.get("VERSION_ID", "")) if x)
    count = {gfx: sum(g.gfx == gfx for g in m.visible) for gfx in target.gfx}
    cards = ", ".join(f"{count[g]} x {g}" if target.here and count[g] > 1 else g for g in target.gfx)
    place = f"{m.container} container" if m.container else "WSL2" if m.wsl else f"kernel {m.kernel}" if m.kernel else ""
    kind = {"cpu": "CPU", "cuda": "NVIDIA GPU"}.get(target.kind, cards)
    return ", ".join(part for part in (kind, where or "unknown system", place) if part)
