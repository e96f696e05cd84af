"""What the guard costs on a healthy run, and what its cures cost: step time, host syncs and memory on one GPU.

Llama-3-8B shapes with random bfloat16 weights, LoRA r=16 on all linears. `off` and `heal`, both through
`surefoot.train.loop.train`, take turns in blocks over the same rows; `bare` (forward, backward, clip, fused AdamW, no
check at all) runs one block. Where the host is the limit, times of blocks swing with the machine: there `off` runs
twice, as a control, and the host's time within the guard's own calls is told as well. Then the step with one cure at a
time. Needs torch, transformers and PEFT.

    python benchmarks/guard_cost.py --part long --seconds 400
    python benchmarks/guard_cost.py --part short cure
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from helpers import MemoryTable, random_sample
from surefoot.data.batch import count_trained, pack, split_into_passes
from surefoot.data.order import TableOrder
from surefoot.model.attention import EAGER_NAME, SDPA_NAME, use_packed_attention
from surefoot.model.forward import base_of
from surefoot.model.lora import fuse_lora
from surefoot.model.probes import build_forward
from surefoot.model.randomness import get_random_state
from surefoot.train.frozen import CHECKSUM_EVERY
from surefoot.train.garbage import startup_frozen
from surefoot.train.gate import Gate
from surefoot.train.integrity import StateTensors
from surefoot.train.keeper import Keeper
from surefoot.train.loop import Run, train
from surefoot.train.loss_scale import LossScale
from surefoot.train.optimizer import build_optimizer, build_scheduler
from surefoot.train.schedule import make_schedule
from surefoot.train.signals import StopRequest
from surefoot.train.step import StepRunner

LLAMA_3_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BLOCK = 20  # steps an arm does before the next one's turn
WARM = 8  # steps before anything is timed
# What the loop calls of the guard at a healthy step, beside the two looks at the state around an update.
GUARD_CALLS = ("without_skipped", "settle", "watch", "learning_rate_factor")
# What makes the host wait for the device, by the profiler's names; a copy to pinned memory does not.
WAITS = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize|aten::_local_scalar_dense|Memcpy DtoH.*")


class Recorder:
    """A listener that keeps steps and sentences."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.times: list[float] = []
        self.messages: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def stepped(self, event: Any) -> None:
        """Keep the event, and when the host had read the step."""
        self.steps.append(event)
        self.times.append(time.perf_counter())

    def told(self, message: str) -> None:
        """Keep the sentence."""
        self.messages.append(message)


@dataclass
class Bench:
    """The model and all that the arms share."""

    model: Any
    forward: Any
    device: str
    folder: Path

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def peak(self) -> float:
        """GiB allocated at most since the last call."""
        if self.device == "cpu":
            return 0.0
        gib = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return gib


@dataclass
class Arm:
    """One way to train: `advance(steps)` does some more steps over its rows."""

    name: str
    advance: Callable[[int], None]
    seconds: list[float] = field(default_factory=list)
    single: list[list[float]] = field(default_factory=list)
    peak: float = 0.0
    recorder: Recorder = field(default_factory=Recorder)
    in_guard: dict[str, list[float]] = field(default_factory=dict)
    weights: list[torch.Tensor] = field(default_factory=list)

    def take_model(self, bench: Bench) -> None:
        """Put this arm's own trained weights into the shared model; the first time they are copied."""
        trained = [p for p in bench.model.parameters() if p.requires_grad]
        if not self.weights:
            self.weights = [p.detach().clone() for p in trained]
        for parameter, weight in zip(trained, self.weights, strict=True):
            parameter.data = weight

    def block(self, bench: Bench, steps: int) -> None:
        """Time a block of steps, from an idle device to an idle device."""
        self.take_model(bench)
        bench.synchronize()
        bench.peak()
        began, seen = time.perf_counter(), len(self.recorder.times)
        self.advance(steps)
        bench.synchronize()
        self.seconds.append((time.perf_counter() - began) / steps)
        times = self.recorder.times[seen:]
        # The first of a block fills the pipeline, the last one has nothing behind it.
        self.single.append([late - early for early, late in pairwise(times[1:-1])])
        self.peak = max(self.peak, bench.peak())


def build_bench(shapes: dict[str, int], device: str, folder: Path, compiled: bool) -> Bench:
    """Make the model on its device, as `load_model` would leave it for `bf16: true` and LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            base = LlamaForCausalLM(LlamaConfig(**shapes, attn_implementation="sdpa"))
    finally:
        torch.set_default_dtype(default)
    base.config.use_cache = False
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    fuse_lora(model)
    use_packed_attention(base)
    if compiled:
        from surefoot.model.compiled import compile_layers

        compile_layers(model)
    model.train()
    forward = build_forward(model, torch.bfloat16, upcast=False, label_smoothing=0.0)
    return Bench(model, forward, device, folder)


def settings(bench: Bench, mode: str, per_step: int) -> Any:
    """What the loop reads of a YAML; a plain object, since pydantic may be missing where this runs."""
    return SimpleNamespace(
        guard=mode, guard_preflight=False, output_dir=str(bench.folder / mode), model_name_or_path=str(bench.folder),
        learning_rate=1e-5, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8,
        optim="adamw_torch", optim_args=None, lr_scheduler_type="constant", lr_scheduler_kwargs=None, warmup_steps=0,
        warmup_ratio=0.0, max_grad_norm=1.0, max_steps=1_000_000, num_train_epochs=1.0, save_strategy="no",
        eval_strategy="no", save_steps=500, eval_steps=None, logging_steps=5, eval_delay=0, early_stopping_steps=None,
        load_best_model_at_end=False, save_only_model=False, save_total_limit=None, compute_accuracy=False,
        metric_for_best_model=None, greater_is_better=None, per_device_train_batch_size=per_step,
        gradient_accumulation_steps=1, precision_plan=None, to_yaml=lambda: "",
    )  # fmt: skip


def surefoot_arm(bench: Bench, mode: str, table: MemoryTable, per_step: int, optimizer: Any, tokens: int) -> Arm:
    """An arm through Surefoot's own loop; every call of the product's internals is here."""
    cfg, recorder = settings(bench, mode, per_step), Recorder()
    order = TableOrder(table, per_step, seed=0)
    runner = StepRunner(bench.model, bench.forward, bench.device, LossScale.for_run(False), tokens)
    run = Run(
        cfg=cfg, model=bench.model, tokenizer=None, order=order, evals={}, runner=runner, optimizer=optimizer,
        gate=Gate(optimizer), scheduler=build_scheduler(optimizer, cfg, cfg.max_steps),
        schedule=make_schedule(cfg, order, evaluates=False), output_dir=Path(cfg.output_dir), fingerprint={},
        listeners=[recorder], stop=StopRequest(), guard=Keeper(cfg), looks_ahead=bench.device != "cpu",
    )  # fmt: skip
    run.guard.start(run, get_random_state(bench.device))

    def advance(steps: int) -> None:
        # Half a step short of a whole number: the loop stops there, but takes no look as at the end of a run.
        run.schedule = replace(run.schedule, total_steps=run.state.step + steps - 0.5)
        train(run)
        assert len(recorder.steps) == run.state.step, f"a step was done twice: {recorder.messages}"

    arm = Arm(mode, advance, recorder=recorder)
    for owner, names in ((run.guard, GUARD_CALLS), (run.guard.integrity, ("before_update", "after_update"))):
        for name in names if owner is not None else ():
            setattr(owner, name, timed(getattr(owner, name), arm.in_guard.setdefault(name, [])))
    return arm


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Note how long each call takes the host; none of them calls another."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - began)

    return call


def bare_arm(bench: Bench, table: MemoryTable, per_step: int, optimizer: Any, tokens: int) -> Arm:
    """The least that trains: nothing is checked and nothing is read back."""
    order, done = TableOrder(table, per_step, seed=0), [0]
    trained = [p for p in bench.model.parameters() if p.requires_grad]

    def advance(steps: int) -> None:
        for _ in range(steps):
            samples = order.samples_of(done[0])
            done[0] += 1
            count = count_trained(samples)
            for group in split_into_passes(samples, tokens):
                (bench.forward(pack(group).to(bench.device)).loss / count).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Arm("bare", advance)


def long_rows(rows: int, length: int, count: int) -> tuple[MemoryTable, int, int]:
    """`rows` rows of one length a step; returns the table, rows a step and tokens a pass."""
    rng = np.random.default_rng(0)
    return MemoryTable([random_sample(rng, length, i) for i in range(count * rows)]), rows, rows * length


def short_chats(count: int) -> tuple[MemoryTable, int, int]:
    """Eight rows a step whose lengths spread like short chats: mean near 193 tokens, the longest 1,024."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.0, 0.7, count * 8), 16, 1024).astype(int)
    return MemoryTable([random_sample(rng, int(n), i) for i, n in enumerate(lengths)]), 8, 8192


def take_turns(bench: Bench, arms: list[Arm], rounds: int, seconds: float) -> int:
    """Let the arms do a block each, in an order drawn anew, until the rounds or the time are up; return the rounds."""
    order = random.Random(0)
    began = time.perf_counter()
    for turn in range(rounds):
        for arm in order.sample(arms, len(arms)):
            arm.block(bench, BLOCK)
        spent = time.perf_counter() - began
        if spent + spent / (turn + 1) > seconds:
            return turn + 1
    return rounds


def ratio(ones: list[float], others: list[float]) -> tuple[float, float, float]:
    """Ratio of total times, with a 95 % interval by drawing pairs of blocks anew."""
    rng, pairs = random.Random(0), list(zip(ones, others, strict=True))

    def of(drawn: list[tuple[float, float]]) -> float:
        return sum(a for a, _ in drawn) / sum(b for _, b in drawn)

    drawn = sorted(of(rng.choices(pairs, k=len(pairs))) for _ in range(4000))
    return of(pairs), drawn[100], drawn[-101]


def count_syncs(bench: Bench, arm: Arm, steps: int) -> dict[str, float]:
    """Count what made the host wait in some steps, per step."""
    if bench.device == "cpu":
        return {}
    bench.synchronize()
    arm.take_model(bench)
    # Calls of the runtime only: with every operation the profile of an 8B step takes a minute to sum up.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        arm.advance(steps)
    events = [event for event in found.key_averages() if WAITS.fullmatch(event.key)]
    return {event.key: event.count / steps for event in events}


def against(one: Arm, other: Arm) -> str:
    """How much more time one arm took, in words."""
    if len(one.seconds) != len(other.seconds):
        return ""
    middle, low, high = (100 * (value - 1) for value in ratio(one.seconds, other.seconds))
    said = f"{middle:+.2f}% ({low:+.2f}% to {high:+.2f}%)"
    if all(one.single) and all(other.single):
        # Rare work (a look at the state, a restore point) is in the mean, a host that was called away in neither.
        means = [[_without_outliers(block) for block in arm.single] for arm in (one, other)]
        middle, low, high = (100 * (value - 1) for value in ratio(*means))
        said += f"; steps {middle:+.2f}% ({low:+.2f}% to {high:+.2f}%)"
    return said


def _without_outliers(seconds: list[float]) -> float:
    """Mean of a block's steps but for those that took more than 1.5 times the median."""
    most = 1.5 * statistics.median(seconds)
    return statistics.fmean(second for second in seconds if second <= most)


def measure(
    bench: Bench, name: str, data: tuple[MemoryTable, int, int], options: argparse.Namespace, twice: bool
) -> None:
    """Measure the arms on one kind of rows and print their lines; with `twice`, `off` runs twice."""
    table, per_step, tokens = data
    cfg = settings(bench, "off", per_step)
    bare = bare_arm(bench, table, per_step, build_optimizer(bench.model, cfg), tokens)
    off = surefoot_arm(bench, "off", table, per_step, build_optimizer(bench.model, cfg), tokens)
    for arm in (bare, off):
        arm.take_model(bench)
        arm.advance(WARM)
    heal = surefoot_arm(bench, "heal", table, per_step, build_optimizer(bench.model, cfg), tokens)
    heal.take_model(bench)
    heal.advance(WARM)
    # Where the host is the limit, the same arm twice shows how far apart equals come out.
    again = surefoot_arm(bench, "off again", table, per_step, build_optimizer(bench.model, cfg), tokens)
    again.take_model(bench)
    again.advance(WARM)
    arms = [off, heal, again] if twice else [off, heal]
    for arm in arms:
        for seconds in arm.in_guard.values():
            seconds.clear()
    with startup_frozen():  # as a run does it
        rounds = take_turns(bench, arms, max(1, options.steps // BLOCK), options.seconds)
    in_guard = {arm.name: 1e3 * sum(map(sum, arm.in_guard.values())) / (rounds * BLOCK) for arm in (off, heal)}
    bare.block(bench, BLOCK)
    syncs = {arm.name: count_syncs(bench, arm, 4) for arm in (bare, off, heal)}
    print(f"\n{name}: {rounds * BLOCK} steps an arm, in turns of {BLOCK}")
    print(f"{'arm':6} {'ms a step':>10} {'peak GiB':>9}   {'against off':72} host syncs a step")
    for arm in (bare, *arms):
        waits = ", ".join(f"{name} {count:g}" for name, count in syncs.get(arm.name, {}).items())
        line = f"{arm.name:6} {1e3 * statistics.median(arm.seconds):10.2f} {arm.peak:9.3f}"
        print(f"{line}   {against(arm, off) if arm is not off else '':72} {waits}")
    if twice:
        print(f"heal against off again: {against(heal, again)}")
    said = ", ".join(f"{name} {ms:.3f}" for name, ms in in_guard.items())
    added = in_guard["heal"] - in_guard["off"]
    share = 0.1 * added / statistics.median(heal.seconds)
    print(f"ms a step of the host within the guard's calls: {said}: {added:+.3f}, {share:.2f}% of heal's step")
    for name, seconds in heal.in_guard.items():
        rare = ", ".join(f"{1e3 * longest:.1f}" for longest in sorted(seconds)[-6:])
        print(f"  {name}: {1e3 * sum(seconds) / (rounds * BLOCK):.3f} ms a step; the longest calls {rare} ms")
    for message in [*off.recorder.messages, *heal.recorder.messages]:
        print(message)


def measure_rare(bench: Bench) -> None:
    """Time what the guard does only now and then: checksums of the frozen weights, a restore point."""
    from surefoot.guard.checksum import WeightChecksums

    sums = WeightChecksums(bench.model)
    times = []
    for _ in range(5):
        bench.synchronize()
        began = time.perf_counter()
        changed = sums.changed(bench.model)
        times.append(time.perf_counter() - began)
        assert not changed
    trained = {name: p for name, p in bench.model.named_parameters() if p.requires_grad}
    state = StateTensors(trained, torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    began = time.perf_counter()
    for _ in range(10):
        state.take_norms()
    print(f"\nnorms of {len(state.tensors)} trained tensors: {100 * (time.perf_counter() - began):.2f} ms of the host")
    print(f"checksums of all frozen weights: {1e3 * statistics.median(times):.1f} ms, every {CHECKSUM_EVERY} steps")


def measure_cures(bench: Bench, options: argparse.Namespace) -> None:
    """Print step time and memory with one cure at a time, on long rows and on short ones with written-out attention."""
    from surefoot.guard.plan import Change, apply_change, hold_change, undo_change

    layer = f"model.layers.{base_of(bench.model).config.num_hidden_layers // 2}"
    cures: dict[str, Change | None] = {
        "as it is": None,
        "scores of one attention": Change("scores", f"{layer}.self_attn"),
        "one attention": Change("island", f"{layer}.self_attn"),
        "one MLP": Change("island", f"{layer}.mlp"),
        "stream, second half": Change("region", layer),
        "fused attention, one": Change("attention_fused", f"{layer}.self_attn"),
        "whole model fp32": Change("float32", ""),
    }
    rows = 2 if bench.device != "cpu" else 1
    places = {
        f"{rows} x {options.length}, fused attention": (long_rows(rows, options.length, 40), SDPA_NAME),
        "short chats, written-out attention": (short_chats(40), EAGER_NAME),
    }
    for name, ((table, per_step, tokens), attention) in places.items():
        base_of(bench.model).set_attn_implementation(attention)
        optimizer = build_optimizer(bench.model, settings(bench, "off", per_step))
        first: tuple[float, float] | None = None
        print(f"\ncost of a cure in float32, {name}\n{'':26} {'ms a step':>10} {'':>8} {'peak GiB':>9}")
        for cure, change in cures.items():
            if change and change.kind == "attention_fused" and attention == SDPA_NAME:
                continue
            if change:
                apply_change(bench.model, bench.forward, change)
                hold_change(bench.model, change)
            arm = surefoot_arm(bench, "off", table, per_step, optimizer, tokens)
            try:
                arm.advance(2)
                arm.block(bench, 5 if change and change.kind == "float32" else 8)
                said = f"{1e3 * arm.seconds[0]:10.1f}"
                first = first or (arm.seconds[0], arm.peak)
                said += f" {100 * (arm.seconds[0] / first[0] - 1):+7.2f}% {arm.peak:9.3f}"
                said += f" {100 * (arm.peak / first[1] - 1):+7.2f}%" if first[1] else ""
            except torch.OutOfMemoryError:
                said = "does not fit"
            print(f"{cure:26} {said}", flush=True)
            del arm
            if change:
                undo_change(bench.model, bench.forward, change)
                narrow_again(bench.model)
            bench.model.zero_grad(set_to_none=True)
            if bench.device != "cpu":
                torch.cuda.empty_cache()
    base_of(bench.model).set_attn_implementation(SDPA_NAME)


def narrow_again(model: Any) -> None:
    """Put frozen weights that a cure held in float32 back to bfloat16; exact, since they came from there."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=["long", "short", "cure"], default=["long", "short", "cure"])
    parser.add_argument("--steps", type=int, default=100, help="steps of each arm")
    parser.add_argument("--seconds", type=float, default=200.0, help="most time for one kind of rows; fewer steps then")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a long row")
    parser.add_argument("--compile", action="store_true", help="compile each decoder layer")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does the script run?")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print("guard_cost.py needs a GPU; --tiny runs it on a CPU", file=sys.stderr)
        return 2
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        bench = build_bench(TINY if options.tiny else LLAMA_3_8B, device, Path(place), options.compile)
        where = torch.cuda.get_device_name() if device != "cpu" else "CPU"
        print(f"{where}, torch {torch.__version__}, model ready after {time.perf_counter() - began:.0f} s", flush=True)
        if "long" in options.part:
            count = options.steps + 60
            measure(bench, f"4 x {options.length}", long_rows(4, options.length, count), options, False)
        if "short" in options.part:
            measure(bench, "short chats, 8 rows a step", short_chats(options.steps + 60), options, True)
            measure_rare(bench)
        if "cure" in options.part:
            measure_cures(bench, options)
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
