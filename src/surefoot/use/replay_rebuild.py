"""The model, forward and step of an incident, built again from its folder on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import UserError
from surefoot.use.replay_settings import Request

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.guard.incident import Incident
    from surefoot.guard.scene import Scene
    from surefoot.model.forward import LossForward
    from surefoot.model.load import LoadedModel


def check_weights(folder: Path | None, kept: bool, checkpoint: str) -> None:
    """Refuse a replay whose trained weights nobody named.

    Args:
        folder: the request's `--weights`.
        kept: whether the incident holds them itself.
        checkpoint: the run's checkpoint that has them.

    Raises:
        UserError: they are neither in the incident nor named, or the folder is not there.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"there is no folder {folder}", hint="name a checkpoint of the run")
    if not kept and folder is None:
        name = f"{checkpoint} of the run" if checkpoint else "a checkpoint of the run from before the step"
        hint = f"add --weights {name}"
        raise UserError("the incident does not hold the trained weights: they were too large", hint=hint)


def device_for(wanted: str, incident: Incident, say: Callable[[str], None]) -> str:
    """Choose the kind of device that it happened on, unless the person names one.

    Args:
        wanted: the request's.
        incident: with the device then.
        say: shows a sentence to the person.

    Returns:
        As torch names it.

    Raises:
        UserError: a GPU is wanted or in sight, but the installed torch cannot use it.
    """
    from surefoot.machine.device import choose_device

    if wanted == "auto" and incident.device.get("torch") == "cpu":
        say("Device: CPU, as then.")
        return "cpu"
    choice = choose_device(wanted)
    say(choice.message)
    return choice.device


def rebuild(
    incident: Incident, cfg: Config, device: str, request: Request, notes: list[str]
) -> tuple[LoadedModel, Scene]:
    """Build the model and the step as they were.

    Args:
        incident: to be built.
        cfg: its settings, fitted to this machine.
        device: to build on.
        request: what shall differ.
        notes: gains a sentence for everything that could not be as it was.

    Returns:
        The loaded model, and the step.

    Raises:
        UserError: the base model is not there, or not the incident's.
    """
    from surefoot.guard.incident import put_in_weights, unlike_base
    from surefoot.guard.names import leaf_name
    from surefoot.guard.scene import Scene
    from surefoot.model.probes import build_forward
    from surefoot.train.restore import load_trained_weights
    from surefoot.train.run import make_deterministic, turn_on_recompute

    loaded = _load(cfg, device)
    make_deterministic(cfg, device)
    differing = unlike_base(incident, loaded.model)
    if differing:
        notes.append(
            f"{len(differing)} of {len(incident.base_values)} frozen weights looked at are not those of the run, first "
            f"{leaf_name(differing[0])}: this is another base model, or the run's was changed in memory."
        )
    forward = build_forward(
        loaded.model,
        loaded.precision.autocast,
        upcast=cfg.upcast_lmhead_output,
        label_smoothing=cfg.label_smoothing_factor,
    )
    forward.chunked = forward.chunked and incident.chunked
    if not incident.packs:
        forward.packs = False
        if forward.model.config._attn_implementation != loaded.own_attention:
            forward.model.set_attn_implementation(loaded.own_attention)
    bad = put_in_weights(incident, loaded.model)
    if not incident.weights["kept"]:
        assert request.weights is not None, "replay_settings asks for it"
        load_trained_weights(loaded.model, request.weights)
        notes.append(f"The trained weights are those of {request.weights}, not of the step itself.")
    if bad:
        notes.append(
            f"{len(bad)} weights were not finite themselves, and are so here: {', '.join(map(leaf_name, bad[:3]))}."
        )
    if incident.recompute:
        turn_on_recompute(loaded.model)
    _compile(incident, cfg, loaded.model, notes)
    _apply_plan(loaded.model, forward, incident, request.plan, notes)
    loaded.model.train()
    scale = _loss_scale(incident, loaded, notes)
    _note_randomness(incident, cfg, device, notes)
    scene = Scene(
        loaded.model, forward, device, incident.diagnosis.step, incident.samples, incident.tokens_per_pass, scale,
        incident.random_state, _before_pass(cfg, forward), incident.step_tokens,
    )  # fmt: skip
    return loaded, scene


def _load(cfg: Config, device: str) -> LoadedModel:
    from surefoot.model.load import load_model
    from surefoot.run.prompts import load_prompts

    try:
        tokenizer, _ = load_prompts(cfg)
        return load_model(cfg, tokenizer, device)
    except UserError as error:
        first = error.problems[0]
        if first.key != "model_name_or_path":
            raise
        hint = f"{first.hint}; if it lies elsewhere on this machine, add --model PATH"
        raise UserError(first.message, hint=hint, key=first.key) from error


def _before_pass(cfg: Config, forward: LossForward) -> Any:
    if not cfg.neftune_noise_alpha:
        return None
    from surefoot.train.neftune import Neftune

    return Neftune(forward.model.get_input_embeddings(), cfg.neftune_noise_alpha).before_pass


def _compile(incident: Incident, cfg: Config, model: Any, notes: list[str]) -> None:
    if cfg.compile is False or not incident.compiled:
        if incident.compiled:
            notes.append(f"{len(incident.compiled)} layers were compiled then, and none is here.")
        return
    from surefoot.model.compiled import compile_layers

    compile_layers(model)  # layers that the guard had taken out are taken out again by the plan


def _apply_plan(model: Any, forward: LossForward, incident: Incident, other: Path | None, notes: list[str]) -> None:
    """Apply the plan that the step ran with, or another one to see whether it helps."""
    if other is None and not incident.plan.get("changes"):
        return
    from surefoot.guard.incident import PLAN
    from surefoot.guard.plan import apply_change, read_plan

    for change in read_plan(other or incident.folder / PLAN).changes:
        try:
            apply_change(model, forward, change)
        except UserError:
            raise
        except ValueError as error:  # as when a layer shall not be compiled that is not compiled here
            notes.append(f"Not applied: {error}.")


def _loss_scale(incident: Incident, loaded: LoadedModel, notes: list[str]) -> float:
    """Keep the step's scale where gradients are float16; elsewhere a run has none."""
    from surefoot.train.loss_scale import START

    scaled = loaded.precision.loss_scaling
    scale = incident.loss_scale if scaled else 1.0
    if scaled and incident.loss_scale == 1.0:
        scale = START
    if scale != incident.loss_scale:
        notes.append(f"The loss scale is {scale:g}, as a run in this precision starts; it was {incident.loss_scale:g}.")
    return scale


def _note_randomness(incident: Incident, cfg: Config, device: str, notes: list[str]) -> None:
    then = incident.device.get("torch", "cpu").partition(":")[0]
    if then != device.partition(":")[0] and (cfg.lora_dropout or cfg.neftune_noise_alpha):
        notes.append("Dropout and noise draw other random numbers on this kind of device.")
