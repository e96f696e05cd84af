"""A training run put together: from a loaded model and encoded data to saved, verified weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surefoot.data.messages import Sample
from surefoot.data.order import StepOrder, StreamOrder, TableOrder
from surefoot.errors import UserError, WorkError
from surefoot.files import only_writer, whole_files
from surefoot.guard.plan import Plan, read_plan
from surefoot.model import fp8
from surefoot.model.compiled import ROUND_TO, compile_layers, is_wanted
from surefoot.model.emulate import emulation
from surefoot.model.forward import LossForward, base_of
from surefoot.model.load import LoadedModel
from surefoot.model.probes import build_forward, check_packing
from surefoot.model.randomness import get_random_state
from surefoot.model.recompute import recompute, recomputed, turn_on_recompute
from surefoot.train.before import look_before_training
from surefoot.train.checkpoint import read_checkpoint, remove_weights, save_model, sweep, verify_weights
from surefoot.train.events import Listener, RunFacts, TrainResult
from surefoot.train.garbage import startup_frozen
from surefoot.train.gate import Gate
from surefoot.train.keeper import Keeper
from surefoot.train.loop import Run, evaluate_all, train
from surefoot.train.loss_scale import LossScale
from surefoot.train.memory_plan import plan_memory, with_memory, words_of
from surefoot.train.neftune import Neftune
from surefoot.train.optimizer import build_optimizer, build_scheduler
from surefoot.train.ranks import Ranks
from surefoot.train.restore import load_weights, restore
from surefoot.train.resume import choose_checkpoint, fingerprint, model_identity, refuse_other_run, samples_per_step
from surefoot.train.saving import whole_weights
from surefoot.train.schedule import make_schedule
from surefoot.train.shards import Shards, shard_as_asked
from surefoot.train.signals import StopRequest
from surefoot.train.single import SingleRows
from surefoot.train.step import StepRunner
from surefoot.train.zero import load_on_host, take_over

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.data.prepare import PreparedData


ECHO = 10.0  # seconds in which a launcher passes a signal on that its processes have had already


def run_training(
    cfg: Config,
    loaded: LoadedModel,
    tokenizer: Any,
    data: PreparedData,
    listeners: Sequence[Listener],
    device: str,
    ranks: Ranks | None = None,
) -> TrainResult:
    """Train, checkpoint and save a model.

    Args:
        cfg: the YAML.
        loaded: the model on its device.
        tokenizer: its tokenizer.
        data: the encoded training and evaluation data.
        listeners: who hears of the run.
        device: where the model lives, as torch names it.
        ranks: that train together; None for this process alone.

    Returns:
        How the run ended. The trained weights stand verified in `output_dir`.

    Raises:
        NonFiniteStepError: a step was not finite; nothing of it was applied.
        UserError: the data or a checkpoint does not belong to this model.
    """
    output_dir = Path(cfg.output_dir)
    ranks = ranks or Ranks()
    with only_writer(output_dir) if ranks.is_main else nullcontext(), StopRequest(0.0 if ranks.alone else ECHO) as stop:
        if ranks.is_main:
            sweep(output_dir)
        run = assemble(cfg, loaded, tokenizer, data, listeners, device, stop, ranks)
        resumed_from = run.state.step
        trainable, total = loaded.parameters
        facts = RunFacts(
            total_steps=run.schedule.total_steps,
            epochs=run.schedule.epochs,
            samples=run.order.samples,
            samples_per_step=samples_per_step(cfg, ranks.place.world),
            trainable_parameters=trainable,
            total_parameters=total,
            precision=str(loaded.precision),
            device=device,
            resumed_from=resumed_from,
        )
        for listener in listeners:
            listener.started(facts)
        with emulation(cfg.emulate):
            look_before_training(run)
            take_over(run)
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats(device)  # what looking took is no part of the plan
            with startup_frozen():
                result = with_memory(run, train(run))
            if run.state.step and run.state.step == run.guard.memory.steps_lost:
                raise WorkError(
                    "every step was left out: nothing was trained", hint="look at the rows that were skipped"
                )
            finish(run, result)
        for sentence in run.guard.closing():
            run.tell(sentence)
    for listener in listeners:
        listener.finished(result)
    return result


def assemble(
    cfg: Config,
    loaded: LoadedModel,
    tokenizer: Any,
    data: PreparedData,
    listeners: Sequence[Listener],
    device: str,
    stop: StopRequest,
    ranks: Ranks | None = None,
) -> Run:
    """Put a run together, restored from its checkpoint if it goes on from one.

    Args:
        cfg: the YAML.
        loaded: the model on its device.
        tokenizer: its tokenizer.
        data: the encoded training and evaluation data.
        listeners: who hears of the run.
        device: where the model lives, as torch names it.
        stop: set by stop signals.
        ranks: that train together; None for this process alone.

    Returns:
        The run, at its first step to do.

    Raises:
        UserError: the data or a checkpoint does not belong to this model.
    """

    def tell(message: str) -> None:
        for listener in listeners:
            listener.told(message)

    assert data.train is not None
    ranks = ranks or Ranks()
    refuse_unknown_tokens(data, loaded)
    make_deterministic(cfg, device)
    order = order_of(cfg, data, ranks.place.world)
    identity = model_identity(base_of(loaded.model))
    shards = shard_as_asked(cfg, loaded, ranks, device, tell)
    forward, order = _make_forward(cfg, loaded, order, device, tell, shards)
    runner = make_runner(cfg, loaded, forward, data, device, tell, shards)
    runner.ranks, runner.seed, runner.stopping = ranks, cfg.seed, lambda: bool(stop.requested)
    if shards is None:
        ranks.copy_from_main_(list(runner.trained.values()))
    schedule = make_schedule(cfg, order, evaluates=bool(data.evals))
    optimizer = build_optimizer(loaded.model, cfg, runner.trained)
    load_on_host(optimizer, cfg, ranks)
    run = Run(
        cfg=cfg,
        model=loaded.model,
        tokenizer=tokenizer,
        order=order,
        evals=data.evals,
        runner=runner,
        optimizer=optimizer,
        gate=Gate(optimizer, None if shards is None else lambda bad: ranks.spread(bad).amax()),
        scheduler=build_scheduler(optimizer, cfg, schedule.total_steps),
        schedule=schedule,
        output_dir=Path(cfg.output_dir),
        fingerprint=fingerprint(cfg, data.train.fingerprint, identity, ranks.place.world),
        listeners=listeners,
        stop=stop,
        guard=Keeper(cfg, writes=ranks.is_main),
        looks_ahead=device != "cpu",
        ranks=ranks,
        shards=shards if shards is not None and shards.trains else None,
        alike=shards is not None,
    )
    ranks.same("the run", run.fingerprint | {"row packing": str(forward.packs)})
    _take_up(run)
    return run


def _make_forward(
    cfg: Config,
    loaded: LoadedModel,
    order: StepOrder,
    device: str,
    tell: Callable[[str], None],
    shards: Shards | None = None,
) -> tuple[LossForward, StepOrder]:
    """Make the model's way to a loss, packed and compiled where that can be, and the order that goes with it."""
    forward = build_forward(
        loaded.model,
        loaded.precision.autocast,
        upcast=cfg.upcast_lmhead_output,
        label_smoothing=cfg.label_smoothing_factor,
        within=None if shards is None else shards.model.within,
        device=device,
    )
    order = pack_or_not(forward, loaded, order, tell, device)
    if cfg.fp8:
        fp8.require(torch.device(device))
    if is_wanted(cfg.compile, device):
        layers = compile_layers(loaded.model, tell=tell, fp8=cfg.fp8)
        tell(f"Compiling {len(layers)} decoder layers: the first steps are slow.")
        forward.round_to = ROUND_TO if forward.packs else 1
    return forward, order


def _take_up(run: Run) -> None:
    """Go on from a precision plan and a checkpoint, where there are such; else clear what an earlier run left."""
    cfg, keeper = run.cfg, run.guard
    plan = read_plan(cfg.precision_plan) if cfg.precision_plan else None
    checkpoint = run.ranks.on(0, lambda: choose_checkpoint(cfg, run.output_dir, run.tell))
    if checkpoint and not run.ranks.is_main:
        read_checkpoint(checkpoint.folder)  # what this rank sees of it must be whole as well
    if checkpoint is None:
        keeper.clear()
    if plan:
        _use_plan(run, plan)
    if checkpoint:
        known = checkpoint
        differing = run.ranks.on(0, lambda: refuse_other_run(known, run.fingerprint, anyway=cfg.resume_anyway))
        if differing:
            run.tell(f"Going on from {checkpoint.folder.name} though it differs in {', '.join(differing)}.")
        keeper.remember_birth(run, get_random_state(run.runner.device))
        restore(run, checkpoint)
    elif removed := run.ranks.on(0, lambda: remove_weights(run.output_dir)):
        run.tell(f"Removed what the overwritten run had left: {', '.join(removed)}.")


def _use_plan(run: Run, plan: Plan) -> None:
    """Start with the YAML's `precision_plan`, and say what it changes."""
    try:
        run.guard.use_plan(run, plan)
    except UserError:
        raise
    except ValueError as error:  # a change that this model cannot take
        message = f"{run.cfg.precision_plan} does not fit this model: {error}"
        raise UserError(message, hint="use the plan of a run with the same model", key="precision_plan") from error
    words = "; ".join(str(change) for change in plan.changes) or "no change"
    left_out = len(plan.skipped_rows) + sum(map(len, plan.skipped_at.values()))
    run.tell(f"Precision plan: {words}; {left_out} rows are left out.")


def pack_or_not(
    forward: LossForward,
    loaded: LoadedModel,
    order: StepOrder,
    tell: Callable[[str], None],
    device: str | None = None,
) -> StepOrder:
    """Prove on two rows that this model's rows may share a pass; else let each run alone, and say so.

    Args:
        forward: the model's forward; changed in place when rows run alone.
        loaded: the model.
        order: the steps' samples.
        tell: called with a sentence for the person.
        device: where the model runs; None for where its weights are.

    Returns:
        The order that the run takes.
    """
    verdict = check_packing(forward, loaded.own_attention, order.samples_of(0), device)
    if verdict.packs:
        return order
    forward.packs = False
    if forward.model.config._attn_implementation != loaded.own_attention:
        forward.model.set_attn_implementation(loaded.own_attention)
    tell(f"Rows are not packed, each runs alone: {verdict.reason}.")
    return SingleRows(order)


def make_runner(
    cfg: Config,
    loaded: LoadedModel,
    forward: LossForward,
    data: PreparedData,
    device: str,
    tell: Callable[[str], None],
    shards: Shards | None = None,
) -> StepRunner:
    """Plan the passes of a run and build what computes them.

    Args:
        cfg: the YAML.
        loaded: the model on its device.
        forward: how its loss is computed.
        data: the encoded data.
        device: where the model lives, as torch names it.
        tell: called with a sentence for the person.
        shards: of a sharded model.

    Returns:
        The runner.
    """
    plan = plan_memory(cfg, loaded, forward, data, device, shards)
    recompute(loaded.model, plan.choice)
    if plan.recompute:
        tell(words_of(plan))
    before_pass = None
    if cfg.neftune_noise_alpha:
        before_pass = Neftune(forward.model.get_input_embeddings(), cfg.neftune_noise_alpha).before_pass
    scale = LossScale.for_run(loaded.precision.loss_scaling)
    tokens = plan.tokens_per_pass if forward.packs else 1

    def recompute_more() -> bool:
        if cfg.disable_gradient_checkpointing or recomputed(loaded.model)[0] == plan.model.shapes.layers:
            return False
        turn_on_recompute(loaded.model)
        return True

    return StepRunner(
        loaded.model, forward, device, scale, tokens, before_pass, tell, plan, recompute_more, shards=shards
    )


def finish(run: Run, result: TrainResult) -> None:
    """Save the final weights beside the checkpoints and verify them.

    Args:
        run: after its last step.
        result: how it ended. A run that a signal stopped leaves its checkpoint only.
    """
    if result.stopped_by == "signal":
        return
    if run.cfg.load_best_model_at_end and run.state.best_step not in (None, run.state.step):
        load_weights(run, run.output_dir / f"checkpoint-{run.state.best_step}")
        run.state.evaluated_at = None  # what was evaluated last is not what is saved
    if run.cfg.do_eval and run.evals and run.state.evaluated_at != run.state.step:
        evaluate_all(run)
    weights = whole_weights(run)
    with run.gathered(False):
        run.ranks.on(0, lambda: _save_result(run, weights))


def _save_result(run: Run, weights: dict[str, torch.Tensor] | None) -> None:
    with_embeddings = run.guard.memory.embeddings_mended
    with whole_files(run.output_dir) as temporary:
        save_model(temporary, run.model, run.tokenizer, with_embeddings=with_embeddings, weights=weights)
        verify_weights(temporary)


def order_of(cfg: Config, data: PreparedData, ranks: int = 1) -> StepOrder:
    """Decide which samples make each step of all ranks: shuffled each epoch by the seed, or as a stream comes."""
    per_step = samples_per_step(cfg, ranks)
    if hasattr(data.train, "lengths"):
        seed = cfg.seed if cfg.data_seed is None else cfg.data_seed
        return TableOrder(data.train, per_step, seed, shuffle=not cfg.disable_shuffling)  # type: ignore[arg-type]
    return StreamOrder(data.train, per_step)  # type: ignore[arg-type]


def make_deterministic(cfg: Config, device: str) -> None:
    """Seed every generator; with `full_determinism`, refuse operations that are not reproducible."""
    from transformers import set_seed

    set_seed(cfg.seed)
    if cfg.full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        torch.use_deterministic_algorithms(True)
        if device != "cpu":
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False


def refuse_unknown_tokens(data: PreparedData, loaded: LoadedModel) -> None:
    """Refuse data with a token id beyond the model's embedding rows.

    Args:
        data: the encoded data.
        loaded: the model.

    Raises:
        UserError: naming the first row that holds such an id.
    """
    rows = base_of(loaded.model).get_input_embeddings().weight.shape[0]
    for table in (data.train, *data.evals.values()):
        if getattr(table, "max_token_id", -1) < rows:
            continue
        bad: Sample = next(s for s in (table[i] for i in range(len(table))) if int(s.input_ids.max()) >= rows)  # type: ignore[index, arg-type]
        raise UserError(
            f"row {bad.row_ids[0]} has token id {int(bad.input_ids.max())}, but the model has {rows} embedding rows",
            hint="use the model's own tokenizer, or set `resize_vocab: true`",
            key="model_name_or_path",
        )
