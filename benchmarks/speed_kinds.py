"""Speed of full fine-tuning (1B shapes) and of QLoRA (8B shapes, NF4, double quantisation) against transformers + PEFT.

The jobs, rows and columns of `speed.py`, whose parts are used. `usual` recomputes and runs short chats one row at a
time; `peer` is the best that transformers + PEFT do without other kernels; `surefoot` is packed, with chunked loss, and
compiled where layers compile. Full fine-tuning holds float32 weights and computes in bfloat16, as LLaMA-Factory does.

    python benchmarks/speed_kinds.py [--kinds full,qlora] [--arms surefoot,usual,peer] [--jobs short,long] [--tiny]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from speed import SHAPES, TINY, Rows, Step, adapted, measure, peer_step, plain_model, rows_of, say, surefoot_step, sync

ONE_B = SHAPES | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}


def quantise(model: Any, device: str) -> None:
    """Put bitsandbytes' NF4 linears, their scales quantised too, in place of a model's; the head stays."""
    import bitsandbytes as bnb

    for parent in list(model.model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is torch.nn.Linear:
                packed = bnb.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
                    compress_statistics=True, quant_type="nf4", device="meta",
                )  # fmt: skip
                packed.weight = bnb.nn.Params4bit(
                    linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
                ).to(device)
                setattr(parent, name, packed)
    model.is_loaded_in_4bit = model.is_quantized = True


def model_of(kind: str, shapes: dict[str, Any], device: str) -> Any:
    """The model that an arm trains: all of it in float32, or LoRA r=16 over NF4."""
    model = plain_model(shapes, device)
    if kind == "full":
        return model.float().train()
    quantise(model, device)
    model.requires_grad_(False)
    return adapted(model)


def step_of(arm: str, kind: str, model: Any, device: str, size: int) -> tuple[Step, str]:
    """An arm's step and its name; `size` is rows at once for peers, tokens of a pass for us."""
    if arm != "surefoot":
        return peer_step(model, device, size), f"{kind} {arm}, {size} row(s) at once"
    from surefoot.model.compiled import ROUND_TO, compile_layers, compiled_layers

    if kind == "qlora":
        from surefoot.model.lora_quantized import fuse_quantized

        fuse_quantized(model)
    if kind == "full":
        model.get_base_model = lambda: model  # as PEFT's wrapper has it: speed.py asks for it
    step, _ = surefoot_step(model, device, ROUND_TO, size)
    if not compiled_layers(model) and device != "cpu":
        compile_layers(model, tell=lambda sentence: say(f"       {sentence}"))
    return step, f"{kind} surefoot, {size} tokens a pass"


def run_job(arm: str, kind: str, job: str, model: Any, table: list[Rows], device: str) -> None:
    """Run one job with the largest passes that fit."""
    peer_sizes = [1] if arm == "usual" and job == "short" else [8, 4, 2, 1] if job == "short" else [4, 2, 1]
    for size in [16384, 8192, 4096] if arm == "surefoot" else peer_sizes:
        try:
            step, name = step_of(arm, kind, model, device, size)
            measure(name, job, step, table, 2 if arm == "surefoot" else 1)
            return
        except torch.OutOfMemoryError:
            say(f"{job:6} {kind} {arm}: out of memory with {size}")
            model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()


def run_arm(arm: str, kind: str, arguments: argparse.Namespace, device: str) -> None:
    """Build one arm's model and run its jobs."""
    shapes = TINY if arguments.tiny else ONE_B if kind == "full" else SHAPES
    steps = (min(arguments.steps, 3) + 1) if arm == "usual" else arguments.steps + (2 if arm == "surefoot" else 1)
    began = time.perf_counter()
    model = model_of(kind, shapes, device)
    sync()
    say(f"       {kind} {arm}: model made in {time.perf_counter() - began:.1f} s")
    if arm == "usual":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for job in arguments.jobs.split(","):
        table = rows_of(job, 16, shapes["vocab_size"], arguments.tiny)[-steps:]
        try:
            run_job(arm, kind, job, model, table, device)
        except Exception:  # noqa: BLE001  whatever a peer or a library may raise: the other jobs and arms shall still run
            say(f"{job:6} {kind} {arm} failed:\n{traceback.format_exc(limit=-6)}")
        gc.collect()


def main() -> int:
    """Run all arms."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default="full,qlora")
    parser.add_argument("--arms", default="surefoot,usual,peer")
    parser.add_argument("--jobs", default="short,long")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="a model of three small layers, to try the script")
    arguments = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    say(f"{torch.cuda.get_device_name() if device != 'cpu' else 'CPU'}, torch {torch.__version__}")
    say(f"{'job':6} {'arm':30} {'tokens/s':>9} {'ms/step':>9} {'GiB':>7} {'warm-up':>8}   first and last loss")
    for kind in arguments.kinds.split(","):
        for arm in arguments.arms.split(","):
            try:
                run_arm(arm, kind, arguments, device)
            except Exception:  # noqa: BLE001  as above
                say(f"       {kind} {arm} failed:\n{traceback.format_exc(limit=-6)}")
            gc.collect()
            if device != "cpu":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
