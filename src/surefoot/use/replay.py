"""Run an incident again, here: the same samples, weights and random numbers, on this device or in another dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import WorkError
from surefoot.use.replay_rebuild import check_weights, device_for, rebuild
from surefoot.use.replay_settings import Request, replay_settings

if TYPE_CHECKING:
    from surefoot.guard.diagnosis import Origin
    from surefoot.guard.incident import Incident
    from surefoot.guard.scene import Scene
    from surefoot.guard.seen import Seen
    from surefoot.model.load import LoadedModel

LOSS_TOLERANCE = 0.01
"""Two machines' finite losses of one step are the same within this share: their kernels round differently."""

CHANCE = ("TRANSIENT", "KERNEL")
"""Classes that need not show every time: such an incident runs up to three times."""


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Attributes:
        incident: what was run again.
        device: here, as torch names it.
        precision: of the model here.
        runs: how often it ran.
        now: losses and gradients of the last run; None when the step cannot run at all (`reason` says why).
        happens: whether it happens here too; None when running the passes cannot tell.
        reason: one sentence for the verdict.
        origin: where the first bad value was born here; None when all was finite.
        notes: what differs from the run, in sentences.
    """

    incident: Incident
    device: str
    precision: str
    runs: int
    now: Seen | None
    happens: bool | None
    reason: str
    origin: Origin | None
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The replay in a few lines for a person."""
        from surefoot.guard.incident_page import headline

        then, device = self.incident.seen, self.incident.device
        lines = [
            f"Step {self.incident.diagnosis.step}: {headline(self.incident.diagnosis)}",
            f"Then: {device.get('name', '')} ({device.get('torch', '')}), {_seen(then)}",
            f"Here: {self.device}, {self.precision}, {_seen(self.now) if self.now else 'not run'}",
            *(f"Note: {note}" for note in self.notes),
            self.reason,
        ]
        if self.origin:
            lines += ["First bad value here: " + describe_origin(self.origin)]
        return lines

    def to_json(self) -> dict[str, Any]:
        """The replay as one JSON document."""
        from dataclasses import asdict

        from surefoot.guard.journal import as_json

        diagnosis = self.incident.diagnosis
        return {
            "happens": self.happens,
            "reason": self.reason,
            "step": diagnosis.step,
            "class": diagnosis.fault,
            "place": diagnosis.place,
            "module": diagnosis.module,
            "op": diagnosis.op,
            "device": self.device,
            "precision": self.precision,
            "runs": self.runs,
            "then": _brief(self.incident.seen) | {"device": self.incident.device, "versions": self.incident.versions},
            "now": _brief(self.now) if self.now else None,
            "origin": as_json(asdict(self.origin)) if self.origin else None,
            "notes": list(self.notes),
        }


def replay(folder: Path, request: Request, say: Callable[[str], None]) -> Replay:
    """Run an incident again and judge whether it happens here too.

    Args:
        folder: of the incident.
        request: what shall differ from the run.
        say: shows a sentence to the person.

    Returns:
        The verdict.

    Raises:
        UserError: the folder or the request cannot be used, or the base model is not there.
        WorkError: the step does not fit into the device's memory.
    """
    cfg, notes = replay_settings(folder, request)

    from surefoot.guard.incident import read_incident

    incident = read_incident(folder)
    check_weights(request.weights, incident.weights["kept"], str(incident.weights.get("checkpoint") or ""))
    device = device_for(request.device, incident, say)

    import torch

    from surefoot.model.emulate import emulation

    loaded, scene = rebuild(incident, cfg, device, request, notes)
    say(f"Model: {cfg.model_name_or_path}; {loaded.precision}.")
    unusable = _cannot_run(incident, scene)
    if unusable:
        return _verdict(incident, loaded, device, 0, None, True, unusable, None, notes)
    times = 3 if incident.diagnosis.fault in CHANCE and not incident.seen.finite else 1
    try:
        with emulation(cfg.emulate):
            runs, now = _run(scene, times)
            happens, reason = judge(incident, now, runs)
            origin = _trace(scene) if not now.finite else None
    except torch.OutOfMemoryError as error:
        hint = "use a device with more memory, or --device cpu"
        raise WorkError("the step does not fit into the memory of this device", hint=hint) from error
    return _verdict(incident, loaded, device, runs, now, happens, reason, origin, notes)


def judge(incident: Incident, now: Seen, runs: int) -> tuple[bool | None, str]:
    """Decide whether an incident happened again.

    Args:
        incident: as it was.
        now: the last of the runs here.
        runs: how often it ran.

    Returns:
        True or False, or None when running the passes cannot tell; and a sentence that says so.
    """
    then, fault = incident.seen, incident.diagnosis.fault
    if not now.finite:
        if then.finite and fault == "OPTIMIZER":
            return (
                None,
                "The fault was in the update, which a replay does not run; the weights here are those after it.",
            )
        if then.finite:
            return True, "The step is not finite here, which it was then."
        what = "the loss is" if not now.loss_finite else f"{len(now.bad_gradients)} gradients are"
        return True, f"It happens here too: {what} not finite."
    if not then.finite:
        often = f" in {runs} runs" if runs > 1 else ""
        return False, f"It does not happen here: loss and gradients are finite{often}."
    if fault in ("OPTIMIZER", "STAGNATION"):
        return None, "Loss and gradients are finite, as then; the fault was in the update, which a replay does not run."
    near = abs(now.loss - then.loss) <= LOSS_TOLERANCE * abs(then.loss)
    if near:
        return True, f"It happens here too: the step has the same loss, {now.loss:.4g} ({then.loss:.4g} then)."
    return False, f"It does not happen here: the step's loss is {now.loss:.4g}, and it was {then.loss:.4g}."


def describe_origin(origin: Origin) -> str:
    """Write an origin as a sentence."""
    where = origin.module or "outside of every module"
    how = f"{origin.op} ({origin.phase})" if origin.op else origin.phase
    if origin.kind == "leaf":
        return f"{origin.leaf}, a weight or buffer that no operation made."
    inputs = f"; inputs {', '.join(origin.inputs)}" if origin.inputs else ""
    output = f"; output {origin.output}" if origin.output else ""
    place = f", {origin.place}" if origin.place else ""
    return f"{origin.kind} in {where}, {how}{place}{inputs}{output}."


def _cannot_run(incident: Incident, scene: Scene) -> str:
    """Say why the step cannot run at all: on a GPU, such token ids would end the process."""
    rows = scene.forward.model.get_input_embeddings().weight.shape[0]
    for sample in incident.samples:
        for worst in (int(sample.input_ids.min()), int(sample.input_ids.max())):
            if not 0 <= worst < rows:
                names = ", ".join(sample.row_ids[:4])
                return f"It happens here too: {names} has token id {worst}, and the model has {rows} embedding rows."
    if scene.trained_tokens == 0:
        return "It happens here too: no token of the step carries a label."
    return ""


def _run(scene: Scene, times: int) -> tuple[int, Seen]:
    from surefoot.guard.seen import Seen

    for run in range(1, times + 1):
        now = Seen.of(scene.rerun())
        if not now.finite or run == times:
            return run, now
    raise AssertionError("times is at least 1")


def _trace(scene: Scene) -> Origin | None:
    from surefoot.guard.trace import trace
    from surefoot.model.variants import without_compile

    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in scene.model.modules())
    with without_compile(scene.model) if compiled else contextlib.nullcontext():
        return trace(scene).origin


def _verdict(
    incident: Incident, loaded: LoadedModel, device: str, runs: int, now: Seen | None, happens: bool | None,
    reason: str, origin: Origin | None, notes: Sequence[str],
) -> Replay:  # fmt: skip
    then = incident.diagnosis
    if origin and then.module and (origin.module, origin.op) == (then.module, then.op):
        reason += " At the same place."
    elif origin and then.module:
        reason += f" Then it began in {then.module}{f' ({then.op})' if then.op else ''}."
    return Replay(incident, device, str(loaded.precision), runs, now, happens, reason, origin, tuple(notes))


def _seen(seen: Seen) -> str:
    return f"loss {seen.loss:g}, {len(seen.bad_gradients)} of {len(seen.gradients)} gradients not finite"


def _brief(seen: Seen) -> dict[str, Any]:
    from surefoot.guard.seen import number_text

    return {
        "loss": number_text(seen.loss),
        "losses": [number_text(loss) for loss in seen.losses],
        "bad_gradients": list(seen.bad_gradients),
        "gradients": len(seen.gradients),
    }
