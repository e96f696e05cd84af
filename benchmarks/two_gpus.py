"""Two cards against one: the same losses, the speed, the guard, a checkpoint of two resumed on one.

Llama-3-8B shapes with random weights, compiled and packed, through the product's own assembly (`run_training`). Four
starts, one after the other: two processes that hold the model each, two that share it by FSDP2, two that fine-tune all
of it by FSDP2, and one process on one card. Each runs several short jobs and writes its numbers to a file; at the end
they are compared. Exit code 1 when a bound is broken. The variables of the machine's NVLink are left alone.

    python benchmarks/two_gpus.py              two GPUs, under nine minutes
    python benchmarks/two_gpus.py --on one     two processes on one GPU, four layers: replicas only, since gloo cannot
                                               gather pieces there, and nothing about speed
    python benchmarks/two_gpus.py --on cpu     two processes on the CPU, tiny: the same in float32
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

CARDS = 2
STEPS, KEPT = 10, 5  # of a trajectory; after how many a checkpoint is kept
WARM = 4  # steps before anything is timed
SHORT_STEPS = 40
BAD_STEP = 4  # at which rank 1's gradient is spoilt
WITHIN = 2**-8  # of a loss: bfloat16's rounding (8 bits of significand), for sums in another order over ten updates
EQUAL = 1e-5  # the same in float32, on the CPU
STARTS = {"replicas": CARDS, "fsdp": CARDS, "full": CARDS, "one": 1}
SECONDS = {"replicas": 240, "fsdp": 150, "full": 150, "one": 200}
Numbers = dict[str, Any]


# ---------------------------------------------------------------- in each process


class Ears:
    """A listener that keeps losses, times and sentences."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.messages: list[str] = []
        self.peak = 0.0

    def stepped(self, event: Any) -> None:
        """Keep a step."""
        self.losses.append(event.loss)
        self.seconds.append(event.seconds)
        self.tokens.append(event.tokens)
        self.peak = event.memory_gib or 0.0

    def told(self, message: str) -> None:
        """Keep a sentence."""
        self.messages.append(message)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def numbers(self) -> Numbers:
        """Return what the tables need; speed over the steps after the warm ones."""
        warm = min(WARM, len(self.losses) - 2)
        seconds = self.seconds[-1] - self.seconds[warm - 1]
        tokens = self.tokens[-1] - self.tokens[warm - 1]
        return {
            "losses": self.losses, "tokens_per_second": tokens / seconds, "peak": self.peak, "messages": self.messages,
            "step_ms": 1e3 * seconds / (len(self.losses) - warm),
        }  # fmt: skip


class Worker:
    """One process of a start: it runs the jobs and, as rank 0, keeps their numbers."""

    def __init__(self, name: str, folder: Path, on: str) -> None:
        import torch

        from surefoot.config import make_config
        from surefoot.train.place import Place, device_of
        from surefoot.train.ranks import Ranks

        self.name, self.folder, self.on, self.tiny = name, folder, on, on == "cpu"
        self.cfg_of = make_config
        place = Place.of(os.environ)
        first = make_config(self.settings(name, {}))
        self.device = "cpu" if self.tiny else device_of(first, place) if place.world > 1 else "cuda:0"
        self.ranks = Ranks.join(first, self.device, os.environ)
        self.found: dict[str, Numbers] = {}
        torch.set_num_threads(1 if self.tiny else 8)

    def settings(self, job: str, changes: Numbers) -> Numbers:
        """The YAML of a job."""
        return {
            "model_name_or_path": str(self.folder / "model"), "dataset": "rows", "template": "default",
            "output_dir": str(self.folder / job), "finetuning_type": "lora", "lora_rank": 16, "lora_alpha": 32,
            "lora_target": "all", "learning_rate": 1e-4, "lr_scheduler_type": "constant", "bf16": not self.tiny,
            "compile": not self.tiny, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
            "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "seed": 0,
            "guard_preflight": False, "overwrite_output_dir": True, "ddp_timeout": 120, "cutoff_len": 8192,
            "device": "cpu" if self.tiny else "auto", "ddp_backend": "gloo" if self.on == "one" else None,
        } | changes  # fmt: skip

    def run(self, job: str, table: Any, **changes: Any) -> None:
        """Build the model, train, keep the numbers."""
        import gc

        import torch

        from helpers import byte_tokenizer
        from surefoot.data.prepare import PreparedData
        from surefoot.train.run import run_training

        began = time.perf_counter()
        spoilt = changes.pop("spoilt", False)
        cfg = self.cfg_of(self.settings(job, changes))
        loaded = self.build(cfg)
        if spoilt and self.ranks.place.rank == CARDS - 1:
            spoil(loaded.model)
        ears = Ears()
        run_training(cfg, loaded, byte_tokenizer(), PreparedData(table), [ears], self.device, self.ranks)
        self.found[job] = ears.numbers() | {"all_seconds": time.perf_counter() - began}
        if self.ranks.is_main:
            print(f"  {self.name} {job}: {self.found[job]['all_seconds']:.0f} s in all", file=sys.stderr, flush=True)
        del loaded
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def build(self, cfg: Any) -> Any:
        """Make the model on its device as `load_model` leaves it, with random weights, the same on every rank."""
        import torch
        from speed import adapted
        from transformers import LlamaConfig, LlamaForCausalLM

        from surefoot.model.attention import use_packed_attention
        from surefoot.model.load import LoadedModel
        from surefoot.model.lora import fuse_lora
        from surefoot.model.precision import Precision

        full = cfg.finetuning_type == "full"
        stored = torch.float32 if self.tiny or full else torch.bfloat16
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(stored)
        try:
            with torch.device(self.device):
                base = LlamaForCausalLM(LlamaConfig(**shapes_of(self.on), attn_implementation="sdpa"))
        finally:
            torch.set_default_dtype(before)
        own = use_packed_attention(base)
        base.config.use_cache = False
        model: Any = base.train()
        if not full:
            model = adapted(base)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            fuse_lora(model)
        compute = None if self.tiny else torch.bfloat16
        return LoadedModel(model, Precision(None, compute, torch.float32, loss_scaling=False), own, ())


def shapes_of(on: str) -> Numbers:
    """Return the model's sizes."""
    from speed import SHAPES, TINY

    return {"cards": SHAPES, "one": SHAPES | {"num_hidden_layers": 4}, "cpu": TINY}[on]


def spoil(model: Any) -> None:
    """Make one gradient of this rank NaN, at one step, once."""
    import torch

    from surefoot.train.step import StepRunner

    compute, state = StepRunner.compute, {"now": False, "done": False}

    def armed(runner: Any, step: int, samples: Any, error: Any = None) -> Any:
        state["now"] = step == BAD_STEP and not state["done"]
        return compute(runner, step, samples, error)

    def strike(grad: torch.Tensor) -> torch.Tensor | None:
        if not state["now"]:
            return None
        state["now"], state["done"] = False, True
        return torch.full_like(grad, float("nan"))

    StepRunner.compute = armed  # type: ignore[method-assign]  # for this process's next job only; it is the last
    next(p for p in model.parameters() if p.requires_grad).register_hook(strike)


def long_rows(tiny: bool) -> Any:
    """Rows of one length, as many as a step of both cards needs."""
    import numpy as np

    from helpers import MemoryTable, random_sample

    rng = np.random.default_rng(0)
    length = 64 if tiny else 4096
    return MemoryTable([random_sample(rng, length, i) for i in range(4 * CARDS * (STEPS + 2))])


def short_rows(count: int) -> Any:
    """Rows whose lengths spread like short chats: mean near 193 tokens."""
    import numpy as np

    from helpers import MemoryTable, random_sample

    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(np.log(193) - 0.18, 0.6, count), 16, 1024).astype(int)
    return MemoryTable([random_sample(rng, int(n), i) for i, n in enumerate(lengths)])


def work(name: str, folder: Path, on: str) -> int:
    """Run the jobs of one start in this process."""
    worker, tiny = Worker(name, folder, on), on == "cpu"
    table = long_rows(tiny)
    steps = 8 if tiny else SHORT_STEPS
    chats = short_rows(8 * CARDS * (steps + 2))
    short = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "max_steps": steps}
    if name == "replicas":
        worker.run("trajectory", table, save_strategy="steps", save_steps=KEPT)
        worker.run("short", chats, **short)
        for turn, guard in enumerate(("off", "heal", "heal", "off")):
            worker.run(f"guard-{guard}-{turn}", table, guard=guard)
        worker.run("fault", table, spoilt=True)
    elif name == "fsdp":
        worker.run("sharded", table, fsdp="full_shard auto_wrap")
        worker.run("sharded-short", chats, fsdp="full_shard auto_wrap", **short)
    elif name == "full":
        worker.run("full", table, fsdp="full_shard auto_wrap", finetuning_type="full", learning_rate=1e-6, max_steps=8)
    else:
        worker.run("one", table)
        worker.run("one-both", table, gradient_accumulation_steps=CARDS)
        worker.run("one-short", chats, **short)
        resumed = folder / "resumed"
        shutil.copytree(folder / "trajectory" / f"checkpoint-{KEPT}", resumed / f"checkpoint-{KEPT}")
        worker.run("resumed", table, gradient_accumulation_steps=CARDS, overwrite_output_dir=False,
                   resume_from_checkpoint=True)  # fmt: skip
    if worker.ranks.is_main:
        (folder / f"{name}.json").write_text(json.dumps(worker.found), encoding="utf-8")
    worker.ranks.leave()
    return 0


# ---------------------------------------------------------------- starting and comparing


def start(name: str, folder: Path, on: str) -> str:
    """Run one start's processes to their end; return what went wrong, or nothing."""
    own = [str(Path(__file__).resolve()), "--worker", name, "--folder", str(folder), "--on", on]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={STARTS[name]}"]
    environ = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(launcher if STARTS[name] > 1 else []), *own]
    try:
        done = subprocess.run(
            command, env=environ, timeout=SECONDS[name], stdout=subprocess.PIPE, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{name}: not done after {SECONDS[name]} s"
    return "" if done.returncode == 0 else f"{name}: exit code {done.returncode}"


def shares(tiny: bool) -> float:
    """How far the slowest rank is above the mean of the short chats' steps, in tokens; by the product's own dealing."""
    from surefoot.data.deal import cost_of, deal

    steps = 8 if tiny else SHORT_STEPS
    chats, most, mean = short_rows(8 * CARDS * (steps + 2)), 0, 0.0
    for step in range(steps):
        rows = [chats[i] for i in range(8 * CARDS * step, 8 * CARDS * (step + 1))]
        dealt = deal(rows, [cost_of(row, 4096) for row in rows], CARDS)
        tokens = [sum(len(row.input_ids) for row in part) for part in dealt]
        most, mean = most + max(tokens), mean + sum(tokens) / CARDS
    return most / mean - 1


class Verdicts:
    """The checks, each a line; `broken` counts those that do not hold."""

    def __init__(self, found: dict[str, Numbers], on: str) -> None:
        self.found, self.bound, self.timed, self.broken = found, EQUAL if on == "cpu" else WITHIN, on == "cards", 0

    def say(self, what: str, holds: bool | None, said: str) -> None:
        """Print one check; None where there is nothing to judge."""
        self.broken += holds is False
        print(f"{ {True: 'holds', False: 'BROKEN', None: '-'}[holds]:7} {what}: {said}", flush=True)

    def same(self, what: str, one: str, other: str, skip: int = 0) -> None:
        """Compare two trajectories."""
        if one not in self.found or other not in self.found:
            return self.say(what, False, "was not run")
        ones, others = self.found[one]["losses"], self.found[other]["losses"][skip:]
        bound = self.bound
        off = max(abs(a - b) / abs(b) for a, b in zip(ones, others, strict=True))
        return self.say(
            what, off <= bound, f"losses of {len(ones)} steps within {off:.2e} of each other (bound {bound:.1e})"
        )

    def faster(self, what: str, two: str, one: str, times: float) -> None:
        """Compare two speeds."""
        if two not in self.found or one not in self.found:
            return self.say(what, False, "was not run")
        ratio = self.found[two]["tokens_per_second"] / self.found[one]["tokens_per_second"]
        return self.say(what, ratio >= times if self.timed else None, f"{ratio:.2f} times one card (wanted {times})")

    def guard(self, folder: Path) -> None:
        """Judge the planted fault and the guard's cost."""
        journal = folder / "fault" / "surefoot" / "guard.jsonl"
        events = (
            [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()] if journal.exists() else []
        )
        diagnosis = next((event for event in events if event["event"] == "diagnosis"), {})
        where = diagnosis.get("details", {}).get("rank", diagnosis.get("rank"))
        done = len(self.found.get("fault", {}).get("losses", []))
        said = f"class {diagnosis.get('class', diagnosis.get('fault'))}, rank {where}, {done} of {STEPS} steps done"
        self.say("a NaN gradient on rank 1 only", where == CARDS - 1 and done == STEPS, said)
        times = {guard: [n["step_ms"] for job, n in self.found.items() if job.startswith(f"guard-{guard}")]
                 for guard in ("off", "heal")}  # fmt: skip
        if all(times.values()):
            cost = statistics.fmean(times["heal"]) / statistics.fmean(times["off"]) - 1
            runs = "; ".join(f"{guard} {', '.join(f'{ms:.1f}' for ms in each)} ms" for guard, each in times.items())
            self.say(
                "the guard's cost on both cards", cost <= 0.005 if self.timed else None, f"{100 * cost:+.2f} % ({runs})"
            )


def compare(folder: Path, on: str) -> int:
    """Print the table and the checks; return how many are broken."""
    found: dict[str, Numbers] = {}
    for name in STARTS:
        file = folder / f"{name}.json"
        found |= json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    print(f"{'job':16} {'tokens/s':>10} {'ms a step':>10} {'peak GiB':>9} {'seconds in all':>15}")
    for job, numbers in found.items():
        speed, step = numbers["tokens_per_second"], numbers["step_ms"]
        print(f"{job:16} {speed:10,.0f} {step:10.1f} {numbers['peak']:9.1f} {numbers['all_seconds']:15.0f}")
    verdicts = Verdicts(found, on)
    verdicts.same("replicas, the same losses as one card", "trajectory", "one-both")
    verdicts.same("FSDP2, the same losses as one card", "sharded", "one-both")
    verdicts.same("two cards' checkpoint, resumed on one", "resumed", "trajectory", skip=KEPT)
    verdicts.faster("replicas, 4 x 4096 a card", "trajectory", "one", 1.9)
    verdicts.faster("FSDP2, 4 x 4096 a card", "sharded", "one", 1.8)
    verdicts.faster("short chats", "short", "one-short", 1.7)
    above = shares(on == "cpu")
    verdicts.say("short chats, slowest rank", above <= 0.05, f"{100 * above:.1f} % above the mean, in tokens")
    full = found.get("full")
    verdicts.say(
        "full fine-tuning by FSDP2", full is not None, f"{len(full['losses'])} steps" if full else "was not run"
    )
    verdicts.guard(folder)
    return verdicts.broken


def main() -> int:
    """Start everything, or work as one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=["cards", "one", "cpu"], default="cards", help="two cards, one card, the CPU")
    parser.add_argument("--only", help="starts, comma separated")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker, options.folder, options.on)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        from helpers import save_tiny_model

        folder = Path(place)
        save_tiny_model(folder / "model")
        possible = ["replicas", "one"] if options.on == "one" else list(STARTS)
        for name in options.only.split(",") if options.only else possible:
            wrong = start(name, folder, options.on)
            print(f"{name}: done after {time.perf_counter() - began:.0f} s{' - ' + wrong if wrong else ''}", flush=True)
        broken = compare(folder, options.on)
    print(f"{time.perf_counter() - began:.0f} s in all; {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
