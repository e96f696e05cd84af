"""Every recipe of `tests/faults` over seeds, through real runs: is the class right, and the place, and is it healed?

    python benchmarks/recipes.py [--seeds 5] [--first 0] [--quick] [--only R1,R7] [--workers 2]

Prints what was planted against what `guard.jsonl` says, a line for each recipe, and the count of precision changes
prescribed where precision is no cure. Ends with exit code 1 below 90 % of classes right, or above 0 such changes.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes_lab import Case, Lab
from recipes_planted import RECIPES

from surefoot.errors import UserError

PRECISION = {"island", "scores", "region", "float32", "logits_float32", "attention_fused"}
NEVER = {"MATH", "DATA", "WEIGHTS", "KERNEL"}  # classes that precision must not be prescribed for
NEAR = 0.05  # of the reference's final loss
GOAL = 0.9


@dataclass(frozen=True)
class Seen:
    """What came of one planted run.

    Attributes:
        recipe: its number.
        seed: its seed.
        expected: first of the classes that are right.
        said: class of the first finding, or "none", "told", "refused", "too early"; "crash" when the benchmark failed.
        right: class, module, op and phase, each as expected; None where nothing is expected.
        recovered: ended as it must.
        actions: written to the journal, findings before step 1 included.
        lost: optimizer steps without a finite loss; None for a run that stopped.
        precision: kinds of changes that were kept and that count as precision.
        note: a sentence about a miss.
    """

    recipe: str
    seed: int
    expected: str
    said: str
    right: tuple[bool | None, ...]
    recovered: bool
    actions: int
    lost: int | None
    precision: tuple[str, ...]
    note: str = ""


def plant_and_run(recipe: str, seed: int) -> Seen:
    """Plant one recipe for one seed, train, and read the journal.

    Args:
        recipe: its number.
        seed: from 0.

    Returns:
        What came of it.
    """
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    with pytest.MonkeyPatch.context() as patch:
        lab = Lab(folder, seed, patch)
        try:
            return _judge(recipe, seed, RECIPES[recipe][1](lab))
        except Exception:  # noqa: BLE001  whatever a run throws is a miss of that run, not the end of the benchmark
            return Seen(recipe, seed, "?", "crash", (False,) * 4, False, 0, None, (), traceback.format_exc()[-1500:])
        finally:
            for undo in lab.undo:
                undo()
            shutil.rmtree(folder)


def _judge(recipe: str, seed: int, case: Case) -> Seen:
    expected = case.expected
    try:
        outcome = case.job.train()
    except UserError as error:
        found = "refused" if expected.told and expected.told in str(error) else "error"
        fine = expected.classes == (found,)
        return Seen(recipe, seed, expected.classes[0], found, (fine, None, None, None), fine, 0, None, (), str(error))
    findings = [event for event in outcome.events if event["event"] in ("preflight", "diagnosis")]
    first: dict[str, Any] = findings[0] if findings else {"module": None, "op": None, "phase": None}
    told = bool(expected.told) and any(expected.told in message for message in case.job.recorder.messages)
    said = first["class"] if findings else "told" if told else "none"
    said = "too early" if findings and first["step"] < expected.since else said
    place = [(expected.module, "module"), (expected.op, "op"), (expected.phase, "phase")]
    right = (said in expected.classes, *(None if want == "*" else first[key] == want for want, key in place))
    finite = [loss for loss in outcome.losses.values() if loss is not None and math.isfinite(loss)]
    steps = max(outcome.losses, default=0)
    last = [loss for _, loss in sorted(outcome.losses.items())][-2:]
    note = ""
    if expected.ends == "stops":
        recovered = outcome.error is not None and not outcome.weights and outcome.all_saved_finite
    else:
        assert case.reference is not None
        final, wanted = sum(loss or math.nan for loss in last) / max(1, len(last)), case.reference.final_loss
        near = abs(final - wanted) <= NEAR * wanted
        recovered = outcome.error is None and bool(outcome.weights) and outcome.all_saved_finite and near
        note = f"final loss {final:.4f} against {wanted:.4f}. "
    acts = [event for event in outcome.events if event["event"] == "action"]
    acts += [event for event in outcome.events if event["event"] == "preflight" and event["verified"]]
    swapped = first.get("place") == "attention mask"  # a kernel that bears emptied rows, in the same dtype
    kinds = PRECISION - {"attention_fused"} if swapped else PRECISION
    precision = tuple(c["kind"] for c in outcome.changes if c["kind"] in kinds)
    lost = None if outcome.error else steps - min(outcome.losses, default=1) + 1 - len(finite)
    return Seen(
        recipe, seed, said if said in expected.classes else expected.classes[0], said, right, recovered, len(acts),
        lost, precision, f"{note}expected {expected}\n{outcome.story()}",
    )  # fmt: skip


def print_tables(seen: Sequence[Seen]) -> bool:
    """Print all tables.

    Args:
        seen: all runs.

    Returns:
        Whether the goals are met.
    """
    columns = sorted({s.said for s in seen} | {s.expected for s in seen})
    matrix = Counter((s.expected, s.said) for s in seen)
    print("### Planted (rows) against said (columns)\n")
    print(f"| | {' | '.join(columns)} |")
    print("| --- " * (1 + len(columns)) + "|")
    for want in sorted({s.expected for s in seen}):
        print(f"| {want} | {' | '.join(str(matrix[want, said] or '') for said in columns)} |")
    print("\n### Each recipe\n")
    print("| Recipe | Planted | Expected | Class | Module | Op | Phase | Recovered | Actions | Steps lost |")
    print("| --- " * 10 + "|")
    for recipe, (title, _) in RECIPES.items():
        own = [s for s in seen if s.recipe == recipe]
        if own:
            print(_line(recipe, title, own))
    wrong = [s for s in seen if s.expected in NEVER and s.precision]
    right = sum(bool(s.right[0]) for s in seen)
    print("\nFused attention in R11 is no precision: it is the kernel that bears a row which a mask has emptied.")
    print(f"Precision changes prescribed for {', '.join(sorted(NEVER))}: {sum(len(s.precision) for s in wrong)}")
    for s in wrong:
        print(f"- {s.recipe}, seed {s.seed}: {', '.join(s.precision)}")
    print(f"Class right: {right} of {len(seen)} ({right / len(seen):.1%})")
    print(f"Recovered: {sum(s.recovered for s in seen)} of {len(seen)}")
    return right >= GOAL * len(seen) and not wrong


def _line(recipe: str, title: str, own: Sequence[Seen]) -> str:
    cells = []
    for place in range(4):
        judged = [s.right[place] for s in own if s.right[place] is not None]
        cells.append(f"{sum(map(bool, judged))}/{len(judged)}" if judged else "-")
    lost = sorted({"stopped" if s.lost is None else str(s.lost) for s in own})
    actions = sorted({s.actions for s in own})
    expected = " or ".join(sorted({s.expected for s in own}))
    return (
        f"| {recipe} | {title} | {expected} | {' | '.join(cells)} | {sum(s.recovered for s in own)}/{len(own)} "
        f"| {', '.join(map(str, actions))} | {', '.join(lost)} |"
    )


def main() -> int:
    """Run the benchmark.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--quick", action="store_true", help="two seeds")
    parser.add_argument("--only", default="", help="recipes, as R1,R7b")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    seeds = 2 if arguments.quick else arguments.seeds
    recipes = [name for name in arguments.only.split(",") if name] or list(RECIPES)
    jobs = [(recipe, arguments.first + seed) for seed in range(seeds) for recipe in recipes]
    began, seen = time.perf_counter(), []
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        futures = [pool.submit(plant_and_run, *job) for job in jobs]
        for future in as_completed(futures):
            one = future.result()
            seen.append(one)
            miss = "" if all(r is not False for r in one.right) and one.recovered else f" MISS\n{one.note}"
            seconds = time.perf_counter() - began
            print(
                f"{len(seen)}/{len(jobs)} {seconds:.0f} s {one.recipe} seed {one.seed}: {one.said}{miss}",
                file=sys.stderr,
            )
    fine = print_tables(sorted(seen, key=lambda s: (s.recipe, s.seed)))
    print(f"Seconds: {time.perf_counter() - began:.0f}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
