"""The article in miniature: one attention layer whose float16 scores pass 65504 after a few steps of LoRA training.

A Qwen2-shaped decoder is saved with large q and k biases in one layer, in the slowest of RoPE's frequencies, so that
every score of that layer carries the same 64,300 and softmax does not see it. Training pushes the scores beyond
float16's largest number. Each policy then trains the same weights on the same rows in the same order; what it learned
is always measured in float32. The plant is in the saved weights and nowhere else.

    python benchmarks/article.py [--seeds 5] [--steps 60] [--quick] [--only POLICY ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import torch

from helpers import MemoryTable
from surefoot.config import make_config
from surefoot.data.batch import count_trained, pack
from surefoot.data.messages import Sample
from surefoot.data.order import TableOrder
from surefoot.errors import WorkError
from surefoot.model.load import load_model
from surefoot.model.probes import build_forward
from surefoot.train.evaluate import evaluate
from surefoot.train.optimizer import build_optimizer, build_scheduler

VOCABULARY, WIDTH, TOKENS, LAYERS, HEADS, KEY_HEADS = 97, 64, 24, 4, 4, 2
HEAD = WIDTH // HEADS
PLANTED_LAYER, SCORE = 1, 64300.0
# As norms of real models have: what the planted layer reads is so much larger, and its weights are smaller by it.
NORM_GAIN = 3.0
ROWS, EVAL_ROWS, PER_STEP = 1024, 256, 8
SUCCESSORS, NOISE = 2, 0.15
START_SCALE = 2.0**16
NAMES = {
    "fp32": "whole model fp32", "heal": "Surefoot, guard: heal", "skip": "skip the step",
    "halve": "halve the scale, skip", "bf16": "bf16", "trainer": "Trainer + PEFT, fp16", "none": "no guard",
}  # fmt: skip


@dataclass
class Outcome:
    """What one policy made of one seed.

    Attributes:
        lost: optimizer steps that were not applied, or applied with NaN.
        actions: changes that the policy made to keep going.
        loss: evaluation loss in float32, nats; NaN when a weight is.
        seconds: of the training.
        first_bad: the first step that was not finite; None when all were.
        note: what else is worth saying.
    """

    lost: int
    actions: int
    loss: float
    seconds: float
    first_bad: int | None = None
    note: str = ""


@dataclass
class Seed:
    """One seed's model, rows and fixed starting adapter."""

    number: int
    steps: int
    folder: Path
    rows: MemoryTable
    held_out: MemoryTable

    def config(self, **changes: Any) -> Any:
        """The YAML of a run."""
        return make_config({
            "model_name_or_path": str(self.folder), "dataset": "rows", "template": "default", "cutoff_len": TOKENS,
            "output_dir": str(self.folder / "out"), "overwrite_output_dir": True, "save_strategy": "no",
            "report_to": "none", "per_device_train_batch_size": PER_STEP, "max_steps": self.steps,
            "learning_rate": 2e-2, "lr_scheduler_type": "cosine", "lora_rank": 4, "lora_alpha": 8,
            "flash_attn": "disabled", "seed": self.number, **changes,
        })  # fmt: skip

    def learned(self, weights: dict[str, torch.Tensor]) -> float:
        """Evaluate trained weights in float32, whatever they were trained in."""
        cfg = self.config(compute_dtype="float32")
        model = load_model(cfg, tokenizer_of_words(), "cpu").model
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(weights[name])
        forward = build_forward(model, None, upcast=False, label_smoothing=0.0)
        return evaluate(forward, self.held_out, "cpu", 4096).loss


class Recorder:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.messages: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def stepped(self, event: Any) -> None:
        """Keep the event."""
        self.steps.append(event)

    def told(self, message: str) -> None:
        """Keep the sentence."""
        self.messages.append(message)


def tokenizer_of_words() -> Any:
    """A tokenizer whose every token is a word: the script trains on ids, but a model folder must have one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def save_planted_model(folder: Path, seed: int) -> None:
    """Save a random float16 model with the plant."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                size = 1.0 if "embed" in name else (0.25 if "lm_head" in name else 1.0) / math.sqrt(WIDTH)
                parameter.normal_(0, size)
        layer = model.model.layers[PLANTED_LAYER]
        layer.input_layernorm.weight.fill_(NORM_GAIN)
        attention = layer.self_attn
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.weight /= NORM_GAIN
        # RoPE turns dimensions i and i + HEAD / 2 together. The slower half of them turns by less than 0.03 radians
        # in a row: every score is the same there.
        slow = [*range(HEAD // 4, HEAD // 2), *range(HEAD // 4 + HEAD // 2, HEAD)]
        for linear, heads in ((attention.q_proj, HEADS), (attention.k_proj, KEY_HEADS)):
            linear.bias.view(heads, HEAD)[:, slow] = math.sqrt(SCORE / len(slow))
            linear.weight.view(heads, HEAD, WIDTH)[:, slow] = 0.0
    model.to(torch.float16).save_pretrained(folder)
    tokenizer_of_words().save_pretrained(folder)


def markov_rows(seed: int, count: int, name: str) -> MemoryTable:
    """Rows in which each token has few likely successors, the same in every row and seed."""
    rng = np.random.default_rng(seed)
    successors = np.random.default_rng(1000).integers(3, VOCABULARY, (VOCABULARY, SUCCESSORS))
    samples = []
    for row in range(count):
        ids = [int(rng.integers(3, VOCABULARY))]
        while len(ids) < TOKENS:
            likely = int(successors[ids[-1], rng.integers(SUCCESSORS)])
            ids.append(int(rng.integers(3, VOCABULARY)) if rng.random() < NOISE else likely)
        ids_T = np.array(ids, dtype=np.int32)
        samples.append(Sample((f"{name}:{row}",), ids_T, ids_T.copy(), (TOKENS,)))
    return MemoryTable(samples, f"{name}-{seed}")


def run_surefoot(seed: Seed, **changes: Any) -> Outcome:
    """Train through Surefoot as a person would."""
    from surefoot.train.run import run_training

    cfg, tokenizer, recorder = seed.config(**changes), tokenizer_of_words(), Recorder()
    shutil.rmtree(cfg.output_dir, ignore_errors=True)
    loaded = load_model(cfg, tokenizer, "cpu")
    began = time.perf_counter()
    try:
        run_training(cfg, loaded, tokenizer, SimpleNamespace(train=seed.rows, evals={}), [recorder], "cpu")
        ended = ""
    except WorkError as error:
        ended = f"stopped: {str(error).splitlines()[0]}"
    seconds = time.perf_counter() - began
    journal = Path(cfg.output_dir) / "surefoot" / "guard.jsonl"
    events = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    acted = [event for event in events if event["event"] == "action" and event["step"] > 0]
    lost = sum(event["steps_lost"] for event in acted)
    if ended:
        lost = seed.steps - (recorder.steps[-1].step if recorder.steps else 0)
    said = [f"step {e['step']} {e['class']} {e['module']} {e['op']} ({e['place']}): {e['action']}" for e in acted]
    note = "; ".join([*said, *([ended] if ended else [])])
    first = next((event["step"] for event in events if event["event"] == "alarm"), None)
    return Outcome(lost, len(acted), seed.learned(dict(loaded.model.named_parameters())), seconds, first, note)


def run_plain(seed: Seed, on_bad: str) -> Outcome:
    """Train in float16 autocast with the usual loop; `on_bad` is "apply", "skip" or "halve" (and skip)."""
    cfg = seed.config(fp16=True)
    loaded = load_model(cfg, tokenizer_of_words(), "cpu")
    forward = build_forward(loaded.model, loaded.precision.autocast, upcast=False, label_smoothing=0.0)
    order, optimizer = TableOrder(seed.rows, PER_STEP, cfg.seed), build_optimizer(loaded.model, cfg)
    schedule = build_scheduler(optimizer, cfg, seed.steps)
    trained = [p for p in loaded.model.parameters() if p.requires_grad]
    scale, bad = START_SCALE, []
    loaded.model.train()
    began = time.perf_counter()
    for step in range(seed.steps):
        samples = order.samples_of(step)
        optimizer.zero_grad()
        (forward(pack(samples)).loss / count_trained(samples) * scale).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]) / scale
        if not norm.isfinite():
            bad.append(step + 1)
            scale = scale / 2 if on_bad == "halve" else scale
            if on_bad != "apply":
                schedule.step()  # as accelerate does not, and others do; a skipped step is lost either way
                continue
        torch._foreach_mul_([p.grad for p in trained], (1.0 / (norm + 1e-6)).clamp(max=1.0) / scale)
        optimizer.step()
        schedule.step()
        if all(p.isnan().all() for p in trained):
            bad = [*bad, *range(step + 2, seed.steps + 1)]
            break  # nothing can change any more
    seconds = time.perf_counter() - began
    note = f"scale ended at {scale:.1e}" if on_bad == "halve" else ""
    weights = dict(loaded.model.named_parameters())
    return Outcome(len(bad), 0, seed.learned(weights), seconds, bad[0] if bad else None, note)


def run_trainer(seed: Seed) -> Outcome:
    """Train with transformers' Trainer and PEFT in float16, from the same starting adapter, over the same rows."""
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    cfg = seed.config(fp16=True)
    start = dict(load_model(cfg, tokenizer_of_words(), "cpu").model.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(seed.folder, dtype=torch.float16, attn_implementation="eager")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(start[name])
    order = TableOrder(seed.rows, PER_STEP, cfg.seed)
    batches = [torch.from_numpy(np.stack([s.input_ids for s in order.samples_of(k)])).long() for k in range(seed.steps)]
    rows = [{"input_ids": ids, "labels": ids} for batch in batches for ids in batch]

    class InOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(rows, batch_size=PER_STEP)  # type: ignore[arg-type]

    arguments = TrainingArguments(
        str(seed.folder / "peer"), per_device_train_batch_size=PER_STEP, max_steps=seed.steps, learning_rate=2e-2,
        lr_scheduler_type="cosine", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, seed=cfg.seed, fp16=True,
    )  # fmt: skip
    trainer = InOrder(model, arguments, train_dataset=rows)  # type: ignore[arg-type]
    # accelerate leaves fp16 out on a CPU without a word. This is what it sets up on a GPU.
    trainer.accelerator.native_amp, trainer.accelerator.scaler = True, torch.amp.GradScaler("cpu")
    trainer.remove_callback(next(type(c) for c in trainer.callback_handler.callbacks if "Printer" in type(c).__name__))
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    lost = round(math.log2(START_SCALE / trainer.accelerator.scaler.get_scale()))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    zeros = [entry["step"] for entry in logged if float(entry["loss"]) == 0.0]
    note = f"its log says loss 0 at {len(zeros)} of {len(logged)} steps, and it ends without an error"
    weights = dict(model.named_parameters())
    return Outcome(lost, 0, seed.learned(weights), seconds, zeros[0] if zeros else None, note)


POLICIES: dict[str, Callable[[Seed], Outcome]] = {
    "fp32": lambda seed: run_surefoot(seed, compute_dtype="float32", guard="off"),
    "heal": lambda seed: run_surefoot(seed, fp16=True, guard="heal"),
    "skip": lambda seed: run_plain(seed, "skip"),
    "halve": lambda seed: run_plain(seed, "halve"),
    "bf16": lambda seed: run_surefoot(seed, bf16=True, guard="off"),
    "trainer": run_trainer,
    "none": lambda seed: run_plain(seed, "apply"),
}


def step_cost(seed: Seed, steps: int, **changes: Any) -> tuple[float, float]:
    """Median seconds of a step, and MiB of weights and of what a step's forward keeps for its backward."""
    cfg = seed.config(**changes)
    loaded = load_model(cfg, tokenizer_of_words(), "cpu")
    forward = build_forward(loaded.model, loaded.precision.autocast, upcast=False, label_smoothing=0.0)
    if cfg.precision_plan:
        from surefoot.guard.plan import apply_plan, read_plan

        apply_plan(loaded.model, forward, read_plan(Path(cfg.precision_plan)).changes)
    loaded.model.train()
    samples = TableOrder(seed.rows, PER_STEP, cfg.seed).samples_of(0)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward(pack(samples)).loss
    kept |= {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in loaded.model.parameters()}
    del loss
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        loaded.model.zero_grad()
        (forward(pack(samples)).loss / count_trained(samples)).backward()
        times.append(time.perf_counter() - began)
    return statistics.median(times), sum(kept.values()) / 2**20


def print_table(outcomes: dict[str, list[Outcome]]) -> bool:
    """Print what each policy came to; return whether `heal` kept its promise (True when it did not run)."""
    reference = [one.loss for one in outcomes.get("fp32", [])]
    print(
        f"\n{'policy':24} {'steps lost':18} {'actions':12} {'eval loss per seed':38} {'mean':>6} {'gap':>8}  in spread"
    )
    kept = True
    for name, ones in outcomes.items():
        losses = [one.loss for one in ones]
        mean = statistics.fmean(losses)
        gap = 100 * (mean / statistics.fmean(reference) - 1) if reference else math.nan
        inside = bool(reference) and min(reference) <= mean <= max(reference)
        each = " ".join(f"{loss:.3f}" for loss in losses)
        lost, actions = (" ".join(str(getattr(one, field)) for one in ones) for field in ("lost", "actions"))
        print(
            f"{NAMES[name]:24} {lost:18} {actions:12} {each:38} {mean:6.3f} {gap:+7.2f}%  {'yes' if inside else 'no'}"
        )
        if name == "heal":
            one_action = all(one.lost == 0 and one.actions == 1 for one in ones)
            kept = one_action and (not reference or (abs(gap) <= 1.0 and inside))
    print("gap: of the mean to fp32's. in spread: the mean lies between fp32's best and worst seed.\n")
    for name, ones in outcomes.items():
        first = [one.first_bad for one in ones if one.first_bad is not None]
        seconds = statistics.median(one.seconds for one in ones)
        bad = f"first bad step {', '.join(map(str, first))}; " if first else ""
        print(f"{NAMES[name]:24} {bad}{seconds:.1f} s a run. {ones[0].note}")
    return kept


def print_costs(seed: Seed, plan: Path, steps: int) -> None:
    """Print what the cure costs in this miniature, where one of four attentions is a large part of the model."""
    cases: dict[str, dict[str, Any]] = {"plain fp16": {"fp16": True}}
    if plan.exists():
        cases["fp16 with the cure"] = {"fp16": True, "precision_plan": str(plan)}
    cases["whole model fp32"] = {"compute_dtype": "float32"}
    costs = {name: step_cost(seed, steps, **changes) for name, changes in cases.items()}
    time_0, memory_0 = costs["plain fp16"]
    print("\ncost on this CPU, where float16 is slow (on a GPU, at 8B shapes: guard_cost.py)")
    print(f"{'':24} {'ms a step':>10} {'':>8} {'MiB held':>10}")
    for name, (seconds, memory) in costs.items():
        ratios = f"{seconds / time_0:7.2f}x", f"{memory / memory_0:7.3f}x"
        print(f"{name:24} {1e3 * seconds:10.1f} {ratios[0]} {memory:10.2f} {ratios[1]}")


def quiet() -> None:
    """Keep library notes out of the table."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")


def main() -> int:
    """Run all policies over all seeds; 1 when `heal` lost a step or learned less than fp32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--only", nargs="+", choices=[*POLICIES], default=[*POLICIES])
    parser.add_argument("--json", type=Path, help="write every run's numbers here")
    options = parser.parse_args()
    quiet()
    outcomes: dict[str, list[Outcome]] = {name: [] for name in POLICIES if name in options.only}
    with tempfile.TemporaryDirectory() as place:
        plan = Path(place) / "plan.json"
        for number in range(options.first_seed, options.first_seed + (1 if options.quick else options.seeds)):
            folder = Path(place) / str(number)
            save_planted_model(folder, number)
            rows, held_out = markov_rows(number, ROWS, "rows"), markov_rows(100_000 + number, EVAL_ROWS, "held")
            seed = Seed(number, options.steps, folder, rows, held_out)
            for name in outcomes:
                outcomes[name].append(POLICIES[name](seed))
                one = outcomes[name][-1]
                print(f"seed {number} {name}: {one.loss:.3f}, {one.lost} lost, {one.seconds:.1f} s", file=sys.stderr)
                written = folder / "out" / "surefoot" / "precision_plan.json"
                if name == "heal" and written.exists():
                    shutil.copy(written, plan)
        kept = print_table(outcomes)
        print_costs(seed, plan, 30)
    if options.json:
        runs = {name: [asdict(one) for one in ones] for name, ones in outcomes.items()}
        options.json.write_text(json.dumps(runs, indent=2))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
