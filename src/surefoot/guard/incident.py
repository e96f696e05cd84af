"""An incident's folder: a bad step with everything that is needed to run it again, on this machine or another.

Written by a run and read by `surefoot replay`, often from somebody else: reading runs no code from it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from surefoot.data.messages import Sample
from surefoot.errors import UserError
from surefoot.files import whole_folder, write_json, write_text
from surefoot.guard.diagnosis import Diagnosis, FaultClass
from surefoot.guard.incident_page import incident_page
from surefoot.guard.journal import as_json
from surefoot.guard.scene import Scene
from surefoot.guard.seen import Seen
from surefoot.model.randomness import get_random_state, set_random_state

FORMAT = 1
MOST_WEIGHT_BYTES = 4 * 2**30
RECORD, SAMPLES, RANDOM, WEIGHTS = "incident.json", "samples.npz", "random_state.pt", "weights.st"
FROZEN, SETTINGS, PLAN, PAGE = "bad_frozen.st", "resolved.yaml", "precision_plan.json", "README.md"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Incident:
    """A bad step, read from its folder.

    Attributes:
        folder: where it lies.
        diagnosis: what the guard said of it.
        seen: losses and gradients as they were.
        samples: those of the step.
        tokens_per_pass: most tokens in one pass.
        loss_scale: the factor on the loss.
        random_state: of all generators at the step's start.
        packs: whether rows shared passes.
        chunked: whether the loss was taken in chunks from hidden states.
        recompute: whether layers were recomputed in the backward pass.
        compiled: names of the compiled layers.
        weights: `{"kept", "bytes", "checkpoint"}`: whether the trained weights are here, or which checkpoint has them.
        bad_frozen: names of frozen weights that were not finite; they are kept here.
        base_values: a few values of some frozen weights, to recognise the base model by.
        device: "torch" (the device as torch names it), "name", and on AMD "arch".
        versions: of surefoot, torch, transformers and peft.
        plan: the precision plan that was in force.
        step_tokens: trained tokens of the whole step where `samples` are one rank's share; None when they are all.
    """

    folder: Path
    diagnosis: Diagnosis
    seen: Seen
    samples: tuple[Sample, ...]
    tokens_per_pass: int
    loss_scale: float
    random_state: dict[str, Any]
    packs: bool
    chunked: bool
    recompute: bool
    compiled: tuple[str, ...]
    weights: dict[str, Any]
    bad_frozen: tuple[str, ...]
    base_values: dict[str, list[float]]
    device: dict[str, str]
    versions: dict[str, str]
    plan: dict[str, Any]
    step_tokens: int | None = None

    @property
    def settings(self) -> Path:
        """The YAML of the run."""
        return self.folder / SETTINGS


def write_incident(
    folder: Path,
    scene: Scene,
    diagnosis: Diagnosis,
    *,
    yaml: str,
    plan: dict[str, Any],
    seen: Seen | None = None,
    checkpoint: str = "",
    most_weight_bytes: int = MOST_WEIGHT_BYTES,
) -> Path:
    """Keep a bad step. The model must hold the weights that the step had, and the plan that it ran with.

    Args:
        folder: the run's `surefoot/incidents`; the incident gets `step-N` in it, a second of that step `step-N-2`.
        scene: the step.
        diagnosis: what was found.
        yaml: the run's settings, from `Config.to_yaml`.
        plan: the precision plan in force at the step, from `Plan.to_json`; empty for none.
        seen: what the step gave; None runs it once more to see, which a step with unusable token ids cannot.
        checkpoint: name of the run's last checkpoint before the step, told where the weights are too large to keep;
            empty looks for it in the run's folder, where `folder` has its usual place.
        most_weight_bytes: the trained weights are kept up to this size.

    Returns:
        The incident's folder, whole on disk.

    Raises:
        UserError: the disk is full, or the place cannot be written to.
    """
    seen = seen or Seen.of(scene.rerun())
    place = _free_name(folder, scene.step)
    trained = scene.trained_parameters()
    size = sum(p.numel() * p.element_size() for p in trained.values())
    frozen = {name: p for name, p in scene.model.named_parameters() if not p.requires_grad and p.dtype in FLOATS}
    bad_frozen = {name: p for name, p in frozen.items() if not bool(p.detach().isfinite().all())}
    record = _record(scene, diagnosis, seen) | {
        "weights": {
            "kept": size < most_weight_bytes,
            "bytes": size,
            "checkpoint": checkpoint or _last_checkpoint(folder, scene.step),
        },
        "bad_frozen": sorted(bad_frozen),
        "base_values": _some_values(frozen),
    }
    with whole_folder(place) as temporary:
        write_json(temporary / RECORD, as_json(record))
        ids = np.concatenate([sample.input_ids for sample in scene.samples])
        labels = np.concatenate([sample.labels for sample in scene.samples])
        np.savez_compressed(temporary / SAMPLES, input_ids=ids, labels=labels)
        torch.save(scene.random_state, temporary / RANDOM)
        if record["weights"]["kept"]:
            _save(temporary / WEIGHTS, trained)
        if bad_frozen:
            _save(temporary / FROZEN, bad_frozen)
        write_text(temporary / SETTINGS, yaml)
        write_json(temporary / PLAN, plan)
        write_text(temporary / PAGE, incident_page(place, record, diagnosis, seen))
    return place


def read_incident(folder: Path) -> Incident:
    """Read an incident's folder; the weights stay on disk until `put_in_weights`.

    Args:
        folder: that a run wrote, on whatever machine.

    Returns:
        The incident.

    Raises:
        UserError: it is none, lacks a file, or holds something else than it should.
    """
    if not (folder / RECORD).is_file():
        hint = "name a folder <output_dir>/surefoot/incidents/step-N"
        raise UserError(f"{folder} is not an incident's folder: it has no {RECORD}", hint=hint)
    lost = [name for name in (SAMPLES, RANDOM, SETTINGS, PLAN) if not (folder / name).is_file()]
    if lost:
        raise UserError(f"{folder} has no {lost[0]}", hint="copy the whole folder")
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"it has format {record['format']!r}, and this version of Surefoot reads {FORMAT}")
        return Incident(
            folder=folder,
            diagnosis=_diagnosis(record["diagnosis"]),
            seen=Seen.from_json(record["seen"]),
            samples=_read_samples(folder, record["samples"]),
            tokens_per_pass=int(record["tokens_per_pass"]),
            loss_scale=float(record["loss_scale"]),
            random_state=_read_random_state(folder / RANDOM),
            packs=bool(record["packs"]),
            chunked=bool(record["chunked"]),
            recompute=bool(record["recompute"]),
            compiled=_names(record["compiled"]),
            weights=dict(record["weights"]),
            bad_frozen=_names(record["bad_frozen"]),
            base_values={str(k): [float(v) for v in values] for k, values in record["base_values"].items()},
            device={str(k): str(v) for k, v in record["device"].items()},
            versions={str(k): str(v) for k, v in record["versions"].items()},
            plan=dict(plan),
            step_tokens=None if record.get("step_tokens") is None else int(record["step_tokens"]),
        )
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{folder} is not a whole incident: {what}", hint="copy the whole folder again") from error


@torch.no_grad()
def put_in_weights(incident: Incident, model: Any) -> list[str]:
    """Copy the kept weights into a model's own parameters: the trained ones, and frozen ones that were not finite.

    Args:
        incident: whose trained weights were kept.
        model: a freshly loaded model of the incident's settings.

    Returns:
        Names of the weights put in that are not finite.

    Raises:
        UserError: a tensor is missing on one side, or has another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    parameters = dict(model.named_parameters())
    files = [(WEIGHTS, {name for name, p in parameters.items() if p.requires_grad})] if incident.weights["kept"] else []
    files += [(FROZEN, set(incident.bad_frozen))] if incident.bad_frozen else []
    bad: list[str] = []
    for name, wanted in files:
        try:
            saved = load_file(incident.folder / name)
        except (OSError, SafetensorError) as error:
            hint = "copy the whole folder again"
            raise UserError(f"{incident.folder / name} cannot be read: {error}", hint=hint) from error
        unfit = sorted(wanted ^ set(saved))
        unfit += sorted(n for n in saved if n in parameters and parameters[n].shape != saved[n].shape)
        unfit += sorted(n for n in saved if n not in parameters)
        if unfit:
            raise UserError(
                f"the incident's weights do not fit this model: {unfit[0]} is on one side only, or has another shape",
                hint="the base model must be the one that the run trained: name it with --model",
            )
        for tensor, value in saved.items():
            parameters[tensor].copy_(value)
        bad += [tensor for tensor, value in saved.items() if not bool(value.isfinite().all())]
    return bad


@torch.no_grad()
def unlike_base(incident: Incident, model: Any) -> list[str]:
    """Compare some frozen weights with those of the run's model.

    Args:
        incident: with values to compare.
        model: as it was loaded, in any dtype.

    Returns:
        Names of weights that differ by more than the rounding of bfloat16, or are not there. Empty says that this is
        the same base model as far as was looked.
    """
    parameters = dict(model.named_parameters())
    differing = []
    for name, then in incident.base_values.items():
        if name not in parameters:
            differing.append(name)
            continue
        now = _sample_of(parameters[name], len(then)).cpu()
        before = torch.tensor(then)
        near = (now - before).abs() <= 2.0**-7 * before.abs() + 1e-6
        if len(now) != len(then) or not bool(near.all()):
            differing.append(name)
    return differing


def _record(scene: Scene, diagnosis: Diagnosis, seen: Seen) -> dict[str, Any]:
    layers = [n for n, m in scene.forward.model.named_modules() if getattr(m, "_compiled_call_impl", None) is not None]
    return {
        "format": FORMAT,
        "diagnosis": asdict(diagnosis),
        "step": scene.step,
        "loss_scale": scene.loss_scale,
        "tokens_per_pass": scene.tokens_per_pass,
        "step_tokens": scene.step_tokens,
        "packs": scene.forward.packs,
        "chunked": scene.forward.chunked,
        "recompute": _recomputes(scene.forward.model),
        "compiled": layers,
        "autocast": str(scene.forward.autocast or "none").removeprefix("torch."),
        "seen": seen.to_json(),
        "samples": [
            {"row_ids": list(s.row_ids), "segments": list(s.segments), "joined": s.joined} for s in scene.samples
        ],
        "device": _device(scene.device),
        "versions": _versions(),
    }


def _recomputes(model: Any) -> bool:
    # transformers 6 keeps the first name only, older ones know the second.
    name = (
        "is_activation_checkpointing" if hasattr(model, "is_activation_checkpointing") else "is_gradient_checkpointing"
    )
    return bool(getattr(model, name, False))


def _diagnosis(record: dict[str, Any]) -> Diagnosis:
    if record["fault"] not in get_args(FaultClass):
        raise ValueError(f"there is no class {record['fault']!r}")
    given = record | {key: _names(record[key]) for key in ("samples", "evidence")}
    return Diagnosis(**given | {"step": int(record["step"]), "details": dict(record["details"])})


def _read_samples(folder: Path, records: Sequence[dict[str, Any]]) -> tuple[Sample, ...]:
    import zipfile

    try:
        with np.load(folder / SAMPLES, allow_pickle=False) as arrays:
            ids, labels = arrays["input_ids"], arrays["labels"]
    except zipfile.BadZipFile as error:
        raise ValueError(f"{SAMPLES} is damaged") from error
    segments = [tuple(int(n) for n in entry["segments"]) for entry in records]
    total = sum(map(sum, segments))
    if not records or any(n < 1 for lengths in segments for n in lengths) or not all(segments):
        raise ValueError("it has no samples, or empty ones")
    if ids.shape != (total,) or labels.shape != (total,) or {ids.dtype.kind, labels.dtype.kind} != {"i"}:
        raise ValueError(f"{SAMPLES} does not hold the {total} tokens that {RECORD} speaks of")
    ends = np.cumsum([sum(lengths) for lengths in segments])
    parts = zip(records, segments, np.split(ids, ends[:-1]), np.split(labels, ends[:-1]), strict=True)
    return tuple(
        Sample(_names(entry["row_ids"]), part.astype(np.int32), label.astype(np.int32), lengths, bool(entry["joined"]))
        for entry, lengths, part, label in parts
    )


def _read_random_state(file: Path) -> dict[str, Any]:
    """Read and try the state of the generators, so that a damaged one is told as such and not in the middle."""
    own = get_random_state("cpu")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        set_random_state(state, "cpu")
        gpu = state["cuda"]
        if gpu is not None and gpu.dtype != torch.uint8:
            raise ValueError("the GPU's part is none")
    # torch, NumPy and Python each have exceptions of their own for a foreign file; whatever comes, it is not usable.
    except Exception as error:
        raise ValueError(f"{file.name} holds no state of random generators ({str(error).splitlines()[0]})") from error
    finally:
        set_random_state(own, "cpu")
    return state


def _last_checkpoint(incidents: Path, step: int) -> str:
    names = [path.name for path in incidents.parent.parent.glob("checkpoint-*")]
    steps = [int(found[1]) for name in names if (found := re.fullmatch(r"checkpoint-(\d+)", name))]
    before = [done for done in steps if done < step]  # a checkpoint counts the steps that are done
    return f"checkpoint-{max(before)}" if before else ""


def _free_name(folder: Path, step: int) -> Path:
    if folder.is_dir():
        for leftover in folder.glob(".step-*.tmp"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)
    place, count = folder / f"step-{step}", 1
    while place.exists():
        count += 1
        place = folder / f"step-{step}-{count}"
    return place


def _save(file: Path, tensors: dict[str, torch.nn.Parameter]) -> None:
    from safetensors.torch import save_file

    # Cloned: safetensors refuses tensors that share their memory.
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, file)


def _some_values(frozen: dict[str, torch.nn.Parameter], tensors: int = 16, values: int = 8) -> dict[str, list[float]]:
    names = list(frozen)
    chosen = names[:: max(1, len(names) // tensors)][:tensors]
    read = {name: _sample_of(frozen[name], values).tolist() for name in chosen}
    return {name: found for name, found in read.items() if all(value - value == 0.0 for value in found)}


def _sample_of(tensor: torch.Tensor, values: int) -> torch.Tensor:
    """Take values from the middle: the first rows of an embedding are often zero in every model."""
    flat = tensor.detach().flatten()
    return flat[len(flat) // 2 :][:values].float()


def _device(device: str) -> dict[str, str]:
    if not device.startswith("cuda"):
        import platform

        return {"torch": device, "name": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    arch = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return {"torch": device, "name": properties.name} | ({"arch": arch} if arch else {})


def _versions() -> dict[str, str]:
    import peft
    import transformers

    from surefoot import __version__

    found = {"surefoot": __version__, "torch": torch.__version__}
    return found | {"transformers": transformers.__version__, "peft": peft.__version__}


def _names(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{values!r} should be a list of names")
    return tuple(values)
