"""Which operation of a step made the first bad value: the step runs again under a look at every operation."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.guard.diagnosis import Origin, Phase, Place
from surefoot.guard.places import Places
from surefoot.guard.scene import Rerun, Scene
from surefoot.guard.trace_modules import ModuleTrail
from surefoot.guard.trace_ops import OpWatch
from surefoot.guard.trace_values import Fault


@dataclass(frozen=True)
class Peak:
    """An operation whose results went beyond a range.

    Attributes:
        module: Hugging Face name of the module that it ran in; None outside of every module.
        op: its aten name, or a custom autograd node's.
        place: what it does in the model.
        phase: "forward" or "backward".
        value: largest magnitude, infinity included; what a mask filled in is left out.
    """

    module: str | None
    op: str
    place: Place | None
    phase: Phase
    value: float


@dataclass(frozen=True)
class Trace:
    """What a look at every operation of a step found.

    Attributes:
        origin: where the bad values began that the loss or a gradient suffers from; where neither suffers, the first
            bad value of all; None when every value was finite, or infinite on purpose in a mask.
        rerun: what the step gave.
        over: with a watched range, all operations that went beyond it, in order of time.
        narrow: (module, op) of every operation with a 16-bit result.
        wide: (module, op) of every operation with a wider one.
        silent: beginnings of bad values that reached neither the loss nor a gradient, the origin excepted.
    """

    origin: Origin | None
    rerun: Rerun
    over: tuple[Peak, ...] = ()
    narrow: frozenset[tuple[str | None, str]] = frozenset()
    wide: frozenset[tuple[str | None, str]] = frozenset()
    silent: tuple[Origin, ...] = ()


def trace(scene: Scene, *, watch_range: float | None = None) -> Trace:
    """Run a step again, forward and backward, and read the range of every operation's results.

    Compiled layers cannot be looked into; the caller lets them run eagerly.

    Args:
        scene: the step.
        watch_range: report every operation whose results are larger than this.

    Returns:
        What was found.
    """
    places = Places(scene.model)
    trail = ModuleTrail(scene.model, places)
    watch = OpWatch(scene.model, places, trail, watch_range)
    hooks = [
        parameter.register_post_accumulate_grad_hook(watch.gradient_arrived)
        for parameter in scene.trained_parameters().values()
    ]
    try:
        with trail.hooked(watch.look_at), watch:
            rerun = scene.rerun(watcher=watch)
    finally:
        for hook in hooks:
            hook.remove()
    harmful = [fault for fault in watch.faults if fault.in_loss or fault.in_gradients]
    blamed = min(harmful or watch.faults, key=lambda fault: fault.order, default=None)
    silent = tuple(_origin(fault) for fault in watch.faults if fault not in harmful and fault is not blamed)
    peaks = tuple(Peak(*key, value) for key, value in watch.over.items())
    return Trace(
        None if blamed is None else _origin(blamed),
        rerun,
        peaks,
        frozenset(watch.narrow),
        frozenset(watch.wide),
        silent,
    )


def _origin(fault: Fault) -> Origin:
    fields = fault.fields
    if fields["phase"] == "forward" and not fault.in_loss and fault.victim is not None:
        fields = fields | {"node": fault.victim}  # the infinity died in the forward and bit in the backward
    return Origin(**fields)
