"""Rows per second from a JSON Lines file to token ids and labels: Surefoot against `datasets.map`.

Both read the same alpaca-like rows, use the same tokenizer and the same chat format, two processes each, from a cold
cache, and end with ids and labels on disk. The peer renders with the tokenizer's own chat template, once row by row
(the usual way) and once in batches (its fast way). Each run has a process of its own, whose memory is measured with
that of its children. Imports and the loading of the tokenizer are not counted, the starting of processes is.

    python benchmarks/preprocess.py [--rows 100000] [--workers 2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "demo:smollm2-135m-instruct"
CUTOFF = 1024
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "data" / "alpaca_en_demo.json"
Count = Callable[[], tuple[int, int]]
WAYS = {
    "surefoot": "Surefoot, prepare_data",
    "map": "datasets.map, row by row",
    "map-batched": "datasets.map, batched",
}


def write_rows(path: Path, count: int) -> None:
    """Write rows whose words follow English: those of the example dataset, and rarer made-up ones."""
    rng = random.Random(7)
    text = " ".join(" ".join(row.values()) for row in json.loads(EXAMPLES.read_text(encoding="utf-8")))
    words = text.split()
    syllables = [a + b + c for a in "bdfglmnprst" for b in "aeiou" for c in ("", "n", "r", "st")]
    rare = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(20_000)]

    def sentence(shortest: int, longest: int) -> str:
        size = rng.randint(shortest, longest)
        return " ".join(rng.choice(rare) if rng.random() < 0.15 else rng.choice(words) for _ in range(size)) + "."

    with path.open("w", encoding="utf-8") as handle:
        for _ in range(count):
            query = sentence(5, 60) if rng.random() < 0.4 else ""
            row = {"instruction": sentence(5, 25), "input": query, "output": sentence(5, 120)}
            handle.write(json.dumps(row) + "\n")


def run_surefoot(path: Path, tokenizer: Any, workers: int, folder: Path) -> Count:
    """Prepare with Surefoot; return what counts rows and tokens."""
    from surefoot.config import make_config
    from surefoot.data.prepare import prepare_data
    from surefoot.data.template import get_template

    os.environ["SUREFOOT_CACHE"] = str(folder / "cache")
    keys = {"model_name_or_path": MODEL, "dataset": str(path), "cutoff_len": CUTOFF}
    cfg = make_config({**keys, "preprocessing_num_workers": workers})
    template = get_template(None, tokenizer)
    template.fix_tokenizer(tokenizer)
    table = prepare_data(cfg, tokenizer, template).train
    assert table is not None and not hasattr(table, "one_pass")
    return lambda: (len(table), int(table.lengths.sum()))


def run_map(path: Path, tokenizer: Any, workers: int, folder: Path, batched: bool) -> Count:
    """Prepare with `datasets.map` and the tokenizer's chat template; return what counts rows and tokens."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()

    def turns(instruction: str, query: str, output: str) -> list[dict[str, str]]:
        asked = f"{instruction}\n{query}" if query else instruction
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]

    def one(row: dict[str, str]) -> dict[str, list[int]]:
        messages = turns(row["instruction"], row["input"], row["output"])
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        return {"input_ids": ids[:CUTOFF], "labels": labels[:CUTOFF]}

    def many(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        conversations = [turns(*row) for row in zip(rows["instruction"], rows["input"], rows["output"], strict=True)]
        texts = tokenizer.apply_chat_template(conversations, tokenize=False)
        asked = [conversation[:1] for conversation in conversations]
        prompts = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        lengths = [len(prompt) for prompt in tokenizer(prompts, add_special_tokens=False)["input_ids"]]
        labels = [[-100] * length + row[length:] for row, length in zip(ids, lengths, strict=True)]
        return {"input_ids": [row[:CUTOFF] for row in ids], "labels": [row[:CUTOFF] for row in labels]}

    rows = load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))
    mapped = rows.map(many if batched else one, batched=batched, num_proc=workers, remove_columns=rows.column_names)
    return lambda: (len(mapped), sum(len(ids) for ids in mapped.with_format("numpy")["input_ids"]))


class Memory:
    """The largest resident memory of this process and its children together, looked at ten times a second."""

    def __init__(self) -> None:
        import psutil

        self.me, self.gone = psutil.Process(), psutil.NoSuchProcess
        self.peak, self.done = 0, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.done.wait(0.1):
            total = 0
            for process in [self.me, *self.me.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except self.gone:
                    continue
            self.peak = max(self.peak, total)


def measure(way: str, path: Path, workers: int) -> None:
    """Run one way in this process and print what it took as JSON."""
    from transformers import AutoTokenizer

    from surefoot.model.demo import resolve_model_path

    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(MODEL))
    if way == "surefoot":
        pass
    else:
        import datasets  # noqa: F401  # its import is not counted
    with tempfile.TemporaryDirectory() as folder:
        memory = Memory()
        before, began = sum(os.times()[:4]), time.perf_counter()
        if way == "surefoot":
            count = run_surefoot(path, tokenizer, workers, Path(folder))
        else:
            count = run_map(path, tokenizer, workers, Path(folder), way == "map-batched")
        seconds = time.perf_counter() - began
        cpu = sum(os.times()[:4]) - before  # of this process and of the children that have ended
        memory.done.set()
        rows, tokens = count()
    print(json.dumps({"rows": rows, "tokens": tokens, "seconds": seconds, "cpu": cpu, "gib": memory.peak / 2**30}))


def main() -> None:
    """Measure every way in a process of its own and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure[0], Path(arguments.measure[1]), arguments.workers)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, arguments.rows)
        print(f"{arguments.rows:,} rows, {path.stat().st_size / 2**20:.0f} MiB, {arguments.workers} processes")
        print(
            f"{'':26} {'rows':>8} {'tokens':>11} {'seconds':>8} {'CPU s':>7} {'rows/s':>8} {'ratio':>6} {'peak GiB':>9}"
        )
        first = 0.0
        for way, name in WAYS.items():
            command = [sys.executable, __file__, "--workers", str(arguments.workers), "--measure", way, str(path)]
            outcome = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            told = json.loads(outcome.stdout.splitlines()[-1])
            first = first or told["seconds"]
            numbers = f"{told['rows']:>8,} {told['tokens']:>11,} {told['seconds']:>8.1f} {told['cpu']:>7.1f}"
            speed = f"{told['rows'] / told['seconds']:>8,.0f} {told['seconds'] / first:>6.2f} {told['gib']:>9.2f}"
            print(f"{name:26} {numbers} {speed}", flush=True)
        print("ratio: how many times as long as Surefoot")


if __name__ == "__main__":
    main()
