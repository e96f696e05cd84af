"""Speed of one GPU on Llama-3-8B shapes: the usual path, the best plain peer, Surefoot eager, compiled and in fp8.

Random bfloat16 weights made on the device, LoRA of rank 16 on all linear layers, fused AdamW, the same rows for every
arm, the same optimizer steps. Two jobs: "short" is 8 short chats a step (mean 193 tokens; the usual way runs them one
row at a time), "long" is 4 rows of 4,096 tokens. Each line is printed as soon as its arm is done; an arm that fails
says why and the others go on. Tokens are real tokens: padding does not count.

    python benchmarks/speed.py [--quick] [--arms compiled,fp8,eager,usual,peer1,peer] [--jobs short,long] [--steps 6]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from surefoot.data.batch import count_trained, pack, split_into_passes
from surefoot.data.messages import Sample

SHAPES = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
TINY = SHAPES | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
# usual: recomputes, one short row at a time; peer1: the same without recompute; peer: pads rows together.
PEERS = ("usual", "peer1", "peer")
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Parts of kernel names, first match counts: attention kernels have "cutlass" in their names too.
KINDS = {
    "attention": ("flash", "fmha", "attn", "attention"),
    "GEMM": ("gemm", "nvjet", "cutlass", "xmma", "cijk", "splitk", "cublas", "gemv"),
    "elementwise": ("triton", "elementwise", "vectorized", "reduce", "softmax", "index", "gather", "scatter", "cat",
                    "copy", "memcpy", "memset", "fill", "adam", "multi_tensor"),
}  # fmt: skip
Rows = list[Sample]
Step = Callable[[Rows], torch.Tensor]  # returns the step's loss, still on the device: no arm waits for it


def say(*parts: Any) -> None:
    """Print now: the run may be cut off."""
    print(*parts, flush=True)


def sync() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rows_of(job: str, steps: int, vocabulary: int, tiny: bool) -> list[Rows]:
    """Make each step's rows, random ids whose first third carries no label."""
    rng = np.random.default_rng(0)
    table = []
    for step in range(steps):
        if job == "short":
            # Log-normal with sigma 0.6: mean exp(mu + 0.18) = 193.
            lengths = np.clip(rng.lognormal(np.log(193) - 0.18, 0.6, 8), 16, 1024).astype(int)
        else:
            lengths = np.full(4, 64 if tiny else 4096)
        rows = []
        for place, length in enumerate(lengths):
            ids = rng.integers(0, vocabulary, length).astype(np.int32)
            labels = ids.copy()
            labels[: length // 3] = -100
            rows.append(Sample((f"rows:{step * 8 + place}",), ids, labels, (int(length),)))
        table.append(rows)
    return table


def plain_model(shapes: dict[str, Any], device: str) -> Any:
    """Random bfloat16 weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**shapes))
    finally:
        torch.set_default_dtype(before)
    model.config.use_cache = False
    return model


def adapted(model: Any) -> Any:
    """LoRA of rank 16 on every linear layer; adapters in float32, as PEFT makes them."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS, task_type="CAUSAL_LM")
    return get_peft_model(model, config).train()


def make_model(shapes: dict[str, Any], device: str) -> Any:
    """Random weights with LoRA."""
    return adapted(plain_model(shapes, device))


def optimizer_of(model: Any, device: str, rate: float = 1e-4) -> torch.optim.Optimizer:
    """Fused AdamW over the adapters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, fused=device != "cpu")


def peer_step(model: Any, device: str, rows_at_once: int) -> Step:
    """A step as transformers and PEFT do it: rectangles of rows, the model's own loss, gradients accumulated."""
    optimizer = optimizer_of(model, device)

    def step(rows: Rows) -> torch.Tensor:
        trained, losses = count_trained(rows), []
        for start in range(0, len(rows), rows_at_once):
            group = rows[start : start + rows_at_once]
            longest = max(len(row.input_ids) for row in group)
            ids = np.zeros((len(group), longest), dtype=np.int64)
            labels = np.full((len(group), longest), -100, dtype=np.int64)
            for place, row in enumerate(group):
                ids[place, : len(row.input_ids)], labels[place, : len(row.labels)] = row.input_ids, row.labels
            ids_NT, labels_NT = torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                loss = model(input_ids=ids_NT, labels=labels_NT, num_items_in_batch=trained).loss
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    return step


def surefoot_step(model: Any, device: str, round_to: int, tokens_per_pass: int, rate: float = 1e-4) -> tuple[Step, Any]:
    """A step as Surefoot does it: all rows packed, each pass attended by its layout, chunked loss; and its forward."""
    from surefoot.model.attention import use_packed_attention
    from surefoot.model.lora import fuse_lora
    from surefoot.model.probes import build_forward

    use_packed_attention(model.get_base_model())
    fuse_lora(model)
    forward = build_forward(model, torch.bfloat16, upcast=False, label_smoothing=0.0)
    optimizer = optimizer_of(model, device, rate)

    def step(rows: Rows) -> torch.Tensor:
        trained, losses = count_trained(rows), []
        for group in split_into_passes(rows, tokens_per_pass):
            loss = forward(pack(group, round_to).to(device)).loss / trained
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    return step, forward


def refuse_wrong_gradients(model: Any, forward: Any, device: str, rows: Rows, round_to: int) -> None:
    """Raise when compiled layers do not give the eager gradients: a fast wrong step is not timed."""
    from surefoot.guard.preflight_compiled import check_compiled
    from surefoot.guard.scene import Scene
    from surefoot.model.randomness import get_random_state

    forward.round_to = round_to
    finding = check_compiled(Scene(model, forward, device, 1, tuple(rows), 16384, 1.0, get_random_state(device)))
    if finding:
        raise RuntimeError(" ".join(finding.diagnosis.evidence))


def compile_model(model: Any, options: list[str], narrow: bool) -> None:
    """Compile the layers, once; told of as a run tells it."""
    from surefoot.model.compiled import compile_layers, compiled_layers

    if compiled_layers(model):
        return
    pairs = dict(pair.split("=", 1) for pair in options)
    values = {key: json.loads(text) for key, text in pairs.items()}
    compile_layers(
        model, tell=lambda sentence: say(f"       {sentence}"), fp8=narrow, **({"options": values} if values else {})
    )


@contextlib.contextmanager
def liger(model: Any) -> Iterator[str]:
    """Put Liger's kernels into a model where they can be imported; what they change beside it is put back."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        yield "no Liger here"
        return
    from transformers.models.llama import modeling_llama

    saved = dict(vars(modeling_llama))
    try:
        _apply_liger_kernel_to_instance(model=model.get_base_model())
        yield "Liger"
    finally:
        vars(modeling_llama).update(saved)


def measure(name: str, job: str, step: Step, table: list[Rows], warm: int) -> None:
    """Run the first steps apart, then time the rest; print the line."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    sync()
    began = time.perf_counter()
    first = [step(rows) for rows in table[:warm]]
    sync()
    warm_up = time.perf_counter() - began
    began = time.perf_counter()
    last = [step(rows) for rows in table[warm:]]
    sync()
    seconds = time.perf_counter() - began
    tokens = sum(len(row.input_ids) for rows in table[warm:] for row in rows)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    say(
        f"{job:6} {name:30} {tokens / seconds:9,.0f} {seconds / len(last) * 1e3:9.1f} {peak:7.1f} {warm_up:8.1f}"
        f"   {first[0]:.4f} {last[-1]:.4f}"
    )


def profile(step: Step, rows: Rows) -> None:
    """Print where the device's time of one step goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    sync()
    began = time.perf_counter()
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step(rows)
        sync()
    wall = (time.perf_counter() - began) * 1e3
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in found.events():
        if str(event.device_type).endswith("CUDA"):
            times[event.name] += event.device_time_total / 1e3
            counts[event.name] += 1
    kinds: Counter[str] = Counter()
    for name, milliseconds in times.items():
        kinds[kind_of(name)] += milliseconds
    busy = sum(kinds.values())
    shares = ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds.most_common())
    total = sum(counts.values())
    say(f"       device ms of one step: {shares}; together {busy:.1f} of {wall:.1f} (profiled), {total} kernels")
    for name, milliseconds in times.most_common(14):
        say(f"         {milliseconds:8.1f} ms {counts[name]:6} × {kind_of(name):12} {name[:110]}")


def kind_of(name: str) -> str:
    """Sort a kernel by its name."""
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in low for word in words)), "other")


def run_job(arm: str, job: str, model: Any, arguments: argparse.Namespace, table: list[Rows], device: str) -> None:
    """Run one arm's job with the largest passes that fit; say so where that took more than one try."""
    if arm in PEERS:
        as_asked = job == "short" and arm in ("usual", "peer1")  # batch 1 x accumulation 8, as the job's YAML says
        sizes = [1] if as_asked else [8, 4, 2, 1] if job == "short" else [4, 2, 1]
    else:
        sizes = [size for size in (16384, 8192, 4096) if size <= arguments.pass_tokens]
    for size in sizes:
        try:
            if arm in PEERS:
                step, name = peer_step(model, device, size), f"{arm}, {size} row(s) at once"
            else:
                compiled = arm in ("compiled", "fp8")
                rounding = arguments.round_to if compiled else 1
                step, forward = surefoot_step(model, device, rounding, size)
                name = f"{arm}, {size} tokens a pass"
                if compiled:
                    compile_model(model, arguments.inductor, arm == "fp8")
                    refuse_wrong_gradients(model, forward, device, table[0], rounding)
            warm = 2 if arm in ("compiled", "fp8") else 1
            measure(name, job, step, table, warm)
            if arm in ("compiled", "fp8") or arguments.profile_all:
                profile(step, table[-1])
            return
        except torch.OutOfMemoryError:
            say(f"{job:6} {arm}: out of memory with {size}")
            model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()


def run_arm(arm: str, jobs: list[str], arguments: argparse.Namespace, device: str) -> None:
    """Build one arm's model and run its jobs."""
    shapes = TINY if arguments.tiny else SHAPES
    steps = (3 if arguments.quick else arguments.steps) + (2 if arm in ("compiled", "fp8") else 1)
    if arm == "usual":
        steps = min(steps, 3)
    began = time.perf_counter()
    model = make_model(shapes, device)
    sync()
    with contextlib.ExitStack() as stack:
        note = ""
        if arm == "usual":
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if arm in ("peer", "peer1"):
            note = stack.enter_context(liger(model))
        say(f"       {arm}: model made in {time.perf_counter() - began:.1f} s {note}")
        for job in jobs:
            # Steps are counted from the end, so that every arm times the same last rows.
            table = rows_of(job, 16, shapes["vocab_size"], arguments.tiny)[-steps:]
            try:
                run_job(arm, job, model, arguments, table, device)
            except Exception:  # noqa: BLE001  whatever a peer or a compiler may raise: the other jobs and arms shall still run
                say(f"{job:6} {arm} failed:\n{traceback.format_exc(limit=-6)}")
            gc.collect()


def main() -> int:
    """Run all arms."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="three timed steps")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--arms", default="compiled,eager,usual,peer")
    parser.add_argument("--jobs", default="short,long")
    parser.add_argument("--pass-tokens", type=int, default=16384, help="most tokens in one pass of ours")
    parser.add_argument("--round-to", type=int, default=64)
    parser.add_argument("--profile-all", action="store_true")
    parser.add_argument("--inductor", nargs="*", default=[], metavar="KEY=VALUE", help="options of inductor")
    parser.add_argument("--tiny", action="store_true", help="a model of three small layers, to try the script")
    arguments = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    import peft
    import transformers

    where = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    say(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    say(f"{'job':6} {'arm':30} {'tokens/s':>9} {'ms/step':>9} {'GiB':>7} {'warm-up':>8}   first and last loss")
    began = time.perf_counter()
    for arm in arguments.arms.split(","):
        try:
            run_arm(arm, arguments.jobs.split(","), arguments, device)
        except Exception:  # noqa: BLE001  as above
            say(f"       {arm} failed:\n{traceback.format_exc(limit=-6)}")
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    say(f"all in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
