"""A training run put together: from a loaded model and encoded data to saved, verified weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
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
from surefoot.model.forecast import describe_run, plan_for
from surefoot.model.forward import LossForward, base_of
from surefoot.model.load import LoadedModel
from surefoot.model.memory import GIB, MemoryPlan, free_memory
from surefoot.model.probes import build_forward, check_packing
from surefoot.model.randomness import get_random_state
from surefoot.model.recompute import recompute, recomputed, turn_on_recompute
from surefoot.model.shapes import read_shapes
from surefoot.train.before import look_before_training
from surefoot.train.checkpoint import read_checkpoint, remove_weights, save_model, sweep, verify_weights
from surefoot.train.events import Listener, RunFacts, TrainResult
from surefoot.train.gate import Gate
from surefoot.train.keeper import Keeper
from surefoot.train.loop import Run, evaluate_all, train
from surefoot.train.loss_scale import LossScale
from surefoot.train.neftune import Neftune
from surefoot.train.optimizer import build_optimizer, build_scheduler
from surefoot.train.ranks import Ranks
from surefoot.train.restore import load_trained_weights, restore
from surefoot.train.resume import choose_checkpoint, fingerprint, model_identity, refuse_other_run, samples_per_step
from surefoot.train.schedule import make_schedule
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
    forward, order = _make_forward(cfg, loaded, order, device, tell)
    runner = make_runner(cfg, loaded, forward, data, device, tell)
    runner.ranks, runner.seed, runner.stopping = ranks, cfg.seed, lambda: bool(stop.requested)
    ranks.copy_from_main_(list(runner.trained.values()))
    schedule = make_schedule(cfg, order, evaluates=bool(data.evals))
    optimizer = build_optimizer(loaded.model, cfg)
    load_on_host(optimizer, cfg, ranks)
    run = Run(
        cfg=cfg,
        model=loaded.model,
        tokenizer=tokenizer,
        order=order,
        evals=data.evals,
        runner=runner,
        optimizer=optimizer,
        gate=Gate(optimizer),
        scheduler=build_scheduler(optimizer, cfg, schedule.total_steps),
        schedule=schedule,
        output_dir=Path(cfg.output_dir),
        fingerprint=fingerprint(cfg, data.train.fingerprint, model_identity(base_of(loaded.model)), ranks.place.world),
        listeners=listeners,
        stop=stop,
        guard=Keeper(cfg, writes=ranks.is_main),
        looks_ahead=device != "cpu",
        ranks=ranks,
    )
    ranks.same("the run", run.fingerprint | {"row packing": str(forward.packs)})
    _take_up(run)
    return run


def _make_forward(
    cfg: Config, loaded: LoadedModel, order: StepOrder, device: str, tell: Callable[[str], None]
) -> tuple[LossForward, StepOrder]:
    """Make the model's way to a loss, packed and compiled where that can be, and the order that goes with it."""
    forward = build_forward(
        loaded.model,
        loaded.precision.autocast,
        upcast=cfg.upcast_lmhead_output,
        label_smoothing=cfg.label_smoothing_factor,
    )
    order = pack_or_not(forward, loaded, order, tell)
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


def pack_or_not(forward: LossForward, loaded: LoadedModel, order: StepOrder, tell: Callable[[str], None]) -> StepOrder:
    """Prove on two rows that this model's rows may share a pass; else let each run alone, and say so.

    Args:
        forward: the model's forward; changed in place when rows run alone.
        loaded: the model.
        order: the steps' samples.
        tell: called with a sentence for the person.

    Returns:
        The order that the run takes.
    """
    verdict = check_packing(forward, loaded.own_attention, order.samples_of(0))
    if verdict.packs:
        return order
    forward.packs = False
    if forward.model.config._attn_implementation != loaded.own_attention:
        forward.model.set_attn_implementation(loaded.own_attention)
    tell(f"Rows are not packed, each runs alone: {verdict.reason}.")
    return SingleRows(order)


def make_runner(
    cfg: Config, loaded: LoadedModel, forward: LossForward, data: PreparedData, device: str, tell: Callable[[str], None]
) -> StepRunner:
    """Plan the passes of a run and build what computes them.

    Args:
        cfg: the YAML.
        loaded: the model on its device.
        forward: how its loss is computed.
        data: the encoded data.
        device: where the model lives, as torch names it.
        tell: called with a sentence for the person.

    Returns:
        The runner.
    """
    plan = plan_memory(cfg, loaded, forward, data, device)
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

    return StepRunner(loaded.model, forward, device, scale, tokens, before_pass, tell, plan, recompute_more)


def finish(run: Run, result: TrainResult) -> None:
    """Save the final weights beside the checkpoints and verify them.

    Args:
        run: after its last step.
        result: how it ended. A run that a signal stopped leaves its checkpoint only.
    """
    if result.stopped_by == "signal":
        return
    if run.cfg.load_best_model_at_end and run.state.best_step not in (None, run.state.step):
        load_trained_weights(run.model, run.output_dir / f"checkpoint-{run.state.best_step}")
        run.state.evaluated_at = None  # what was evaluated last is not what is saved
    if run.cfg.do_eval and run.evals and run.state.evaluated_at != run.state.step:
        evaluate_all(run)
    with run.gathered(False):
        run.ranks.on(0, lambda: _save_result(run))


def _save_result(run: Run) -> None:
    with whole_files(run.output_dir) as temporary:
        save_model(temporary, run.model, run.tokenizer, with_embeddings=run.guard.memory.embeddings_mended)
        verify_weights(temporary)


def order_of(cfg: Config, data: PreparedData, ranks: int = 1) -> StepOrder:
    """Decide which samples make each step of all ranks: shuffled each epoch by the seed, or as a stream comes."""
    per_step = samples_per_step(cfg, ranks)
    if hasattr(data.train, "lengths"):
        seed = cfg.seed if cfg.data_seed is None else cfg.data_seed
        return TableOrder(data.train, per_step, seed, shuffle=not cfg.disable_shuffling)  # type: ignore[arg-type]
    return StreamOrder(data.train, per_step)  # type: ignore[arg-type]


def plan_memory(cfg: Config, loaded: LoadedModel, forward: LossForward, data: PreparedData, device: str) -> MemoryPlan:
    """Plan the passes of a run from the model as it is loaded and the memory that is free now.

    Args:
        cfg: the YAML.
        loaded: the model on its device.
        forward: how its loss is computed.
        data: the encoded data.
        device: where the model lives, as torch names it.

    Returns:
        The plan.

    Raises:
        UserError: the longest row does not fit.
    """
    base = base_of(loaded.model)
    trained, total = loaded.parameters
    stored = base.get_input_embeddings().weight.dtype
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in base.parameters()]
    if device == "cpu":
        free = free_memory(device) + sum(size for size, _ in sizes)
    else:
        free = free_memory(device) + torch.cuda.memory_reserved(device)
    lengths = getattr(data.train, "lengths", None)
    longest, mean = float(cfg.cutoff_len), float(cfg.cutoff_len)  # of a stream: the longest that the YAML allows
    if lengths is not None:
        longest, mean = float(max(lengths)), float(sum(lengths) / len(lengths))
    model = describe_run(
        cfg, read_shapes(base.config.to_dict()), weight=stored.itemsize,
        compute=(loaded.precision.autocast or stored).itemsize, trained=trained, total=total,
        # Packed weights come with constants that are no parameters: those are counted from the sizes.
        frozen_bytes=None if cfg.quantization_bit else sum(size for size, trains in sizes if not trains),
        chunked=forward.chunked, cpu=device == "cpu",
    )  # fmt: skip
    return plan_for(
        cfg, model, {"longest": longest, "mean": mean}, free_bytes=free, cpu=device == "cpu", alone=not forward.packs
    )


def words_of(plan: MemoryPlan) -> str:
    """Say what a plan computes again."""
    choice, layers = plan.choice, plan.model.shapes.layers
    parts = [f"{choice.layers} of {layers} decoder layers"] if choice.layers else []
    parts += [f"the MLPs of {choice.mlps} of {layers} decoder layers"] if choice.mlps else []
    host = "; their inputs wait in the host's memory, and they run uncompiled" if choice.offload else ""
    return f"To fit, {' and '.join(parts)} are recomputed in the backward pass{host}."


def with_memory(run: Run, result: TrainResult) -> TrainResult:
    """Add planned and measured memory to the result of a run on a GPU, and say when they differ by much.

    Args:
        run: after its last step.
        result: how it ended.

    Returns:
        The result with both figures; unchanged on a CPU.
    """
    runner = run.runner
    if runner.device == "cpu" or runner.plan is None or not runner.largest_pass:
        return result
    measured = torch.cuda.max_memory_allocated(runner.device) / GIB
    planned = runner.plan.peak_gib(runner.largest_pass, runner.most_passes)
    if abs(measured - planned) > 0.1 * planned:
        run.tell(f"Memory: planned {planned:.1f} GiB for this run's largest pass, measured {measured:.1f} GiB.")
    return replace(result, memory_gib=round(measured, 3), planned_memory_gib=round(planned, 3))


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
