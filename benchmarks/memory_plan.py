"""Planned against measured memory on one GPU: each case is a line, printed as soon as it is done.

Random bfloat16 weights made on the device. "8B" is Llama-3-8B shapes with LoRA of rank 16 on 4 rows of 4,096 tokens in
one pass, eager and compiled, with nothing, all MLPs and all layers recomputed, and what the plan itself chooses for 24
GiB over the weights, in passes of its own and in one; "short" are its short chats; "1B" is full fine-tuning of
Llama-3.2-1B shapes under autocast.

    python benchmarks/memory_plan.py [--tiny] [--cases 8B,short,1B]
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
from speed import SHAPES, TINY, Rows, make_model, optimizer_of, rows_of, say, sync

from surefoot.data.batch import count_trained, pack, split_into_passes
from surefoot.model.activations import Numerics
from surefoot.model.memory import GIB, SPENT_SHARE, Choice, MemoryModel, make_plan
from surefoot.model.recompute import recompute
from surefoot.model.shapes import Shapes, read_shapes

ONE_B = SHAPES | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
SMALL_ONE_B = TINY | {"tie_word_embeddings": True}


def memory_of(shapes: Shapes, model: Any, *, full: bool, compiled: bool) -> MemoryModel:
    """Describe a run of this script as the plan of a real one would."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    numerics = Numerics(
        compute=2, stream=4 if full else 2, weight=4 if full else 2, whole=full, compiled=compiled,
        adapted=frozenset() if full else frozenset(x.name for x in shapes.linears), rank=0 if full else 16,
    )  # fmt: skip
    return MemoryModel(shapes, numerics, frozen, trained, 8, shapes.layers, trained_head=full)


def run_case(name: str, sizes: dict[str, Any], table: list[Rows], arguments: argparse.Namespace, **case: Any) -> None:
    """Build a model, run two steps and print planned and measured peak.

    Args:
        name: of the case.
        sizes: of the model.
        table: two steps' rows.
        arguments: of the command line.
        **case: "choice" (or None to let the plan choose in 24 GiB), "one_pass", "compiled", "full".
    """
    from surefoot.model.attention import use_packed_attention
    from surefoot.model.compiled import ROUND_TO, compile_layers, compiled_layers
    from surefoot.model.probes import build_forward

    device = arguments.device
    compiled, full, choice = case.get("compiled", False), case.get("full", False), case.get("choice", Choice())
    began = time.perf_counter()
    model = make_model(sizes, device)
    if full:
        model = model.unload()
        model.requires_grad_(True).float()
    else:
        from surefoot.model.lora import fuse_lora

        fuse_lora(model)
    base = model if full else model.get_base_model()
    use_packed_attention(base)
    shapes = read_shapes(base.config.to_dict())
    memory = memory_of(shapes, model, full=full, compiled=compiled)
    longest, tokens = (max(map(of, table)) for of in (longest_of, tokens_of))
    limit = tokens
    if choice is None:
        room = (memory.frozen_bytes + arguments.over * GIB) / SPENT_SHARE
        fixed = tokens if case.get("one_pass") else None
        plan = make_plan(memory, free_bytes=room, longest=longest, step_tokens=tokens, tokens=fixed)
        choice, limit = plan.choice, plan.tokens_per_pass
    recompute(model, choice)
    forward = build_forward(model, torch.bfloat16, upcast=False, label_smoothing=0.0)
    optimizer = optimizer_of(model, device)
    if compiled:
        options = {"backend": "aot_eager"} if arguments.tiny else {}
        compile_layers(model, tell=lambda sentence: say(f"       {sentence}"), **options)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    largest = most = 0
    for rows in table:
        sync()
        started, trained = time.perf_counter(), count_trained(rows)
        passes = split_into_passes(rows, limit)
        for group in passes:
            batch = pack(group, ROUND_TO if compiled else 1).to(device)
            (forward(batch).loss / trained).backward()
            largest = max(largest, batch.tokens)
        most = max(most, len(passes))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sync()
        speed = tokens_of(rows) / (time.perf_counter() - started)
    planned = memory.peak_bytes(largest, choice, longest, passes=most) / GIB
    measured = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    off = f"{(planned / measured - 1) * 100:+6.1f} %" if measured else "       "
    note = "" if not compiled or len(compiled_layers(model)) == shapes.layers else "  (not all layers compiled)"
    say(
        f"{name:34} {choice.layers:3} {choice.mlps:4} {most:6} {largest:7,} {planned:8.2f} {measured:8.2f} {off} "
        f"{speed:9,.0f} {time.perf_counter() - began:6.1f}{note}"
    )


def longest_of(rows: Rows) -> int:
    """Tokens of the longest row."""
    return max(len(row.input_ids) for row in rows)


def tokens_of(rows: Rows) -> int:
    """Tokens of all rows."""
    return sum(len(row.input_ids) for row in rows)


def cases_of(arguments: argparse.Namespace) -> list[tuple[str, dict[str, Any], str, dict[str, Any]]]:
    """List name, sizes, job and settings of each case, the cheap ones first."""
    large = TINY if arguments.tiny else SHAPES
    layers, found = large["num_hidden_layers"], []
    wanted = arguments.cases.split(",")
    for compiled in (False, True):
        word = "compiled" if compiled else "eager"
        choices = {"none": Choice(), "MLPs": Choice(0, layers), "all": Choice(layers), "24 GiB over": None}
        if "8B" in wanted:
            found += [
                (f"8B {word}, recomputed: {name}", large, "long", {"compiled": compiled, "choice": choice})
                for name, choice in choices.items()
            ]
            name = f"8B {word}, 24 GiB over, in one pass"
            found.append((name, large, "long", {"compiled": compiled, "choice": None, "one_pass": True}))
        if "short" in wanted:
            found.append((f"8B {word}, short chats", large, "short", {"compiled": compiled}))
    if "1B" in wanted:
        sizes = SMALL_ONE_B if arguments.tiny else ONE_B
        found.insert(0, ("1B full, recomputed: none", sizes, "long", {"full": True}))
        found.insert(1, ("1B full, recomputed: MLPs", sizes, "long",
                         {"full": True, "choice": Choice(0, sizes["num_hidden_layers"])}))  # fmt: skip
    return found


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a model of three small layers, to try the script")
    parser.add_argument("--cases", default="8B,short,1B")
    parser.add_argument("--only", default="", help='words in a case\'s name, as "compiled, 24 GiB"')
    parser.add_argument("--over", type=float, default=24.0, help="GiB over the weights in the case of the same name")
    arguments = parser.parse_args()
    arguments.device = "cuda:0" if torch.cuda.is_available() else "cpu"
    import peft
    import transformers

    where = torch.cuda.get_device_name() if arguments.device != "cpu" else "CPU"
    say(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    say(f"{'case':34} all MLPs passes largest  planned measured     off  tokens/s      s")
    began = time.perf_counter()
    wanted = [case for case in cases_of(arguments) if arguments.only in case[0]]
    for name, sizes, job, case in wanted:
        table = rows_of(job, 2, sizes["vocab_size"], arguments.tiny)
        try:
            run_case(name, sizes, table, arguments, **case)
        except Exception:  # noqa: BLE001  whatever a case may raise, out of memory first of all: the others shall still run
            say(f"{name} failed:\n{traceback.format_exc(limit=-4)}")
        gc.collect()
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
    say(f"all in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
