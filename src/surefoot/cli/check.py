"""`surefoot check`: everything that can be known about a job before weights are loaded."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from surefoot.cli.outcome import exit_codes
from surefoot.cli.request import split_request
from surefoot.errors import Problem, UserError


def check(
    ctx: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document and nothing else."),
    gpu: str | None = typer.Option(
        None, "--gpu", metavar="CARD", help="Plan the memory for a card that is not here, as mi300x or gfx942."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    """Check a job: settings, data, memory.

    surefoot check job.yaml [--gpu CARD] [key=value ...] [--key value ...]
    """
    with exit_codes(debug=debug):
        answer = _answer(ctx.args, gpu, quiet=as_json)
        if as_json:
            print(json.dumps(answer, ensure_ascii=False, allow_nan=False))
        else:
            _show(answer)
        if not answer["ok"]:
            raise typer.Exit(2)


def _answer(tokens: list[str], gpu: str | None, *, quiet: bool) -> dict[str, Any]:
    from surefoot.config import load_config

    try:
        path, overrides = split_request(tokens, "check")
        cfg = load_config(path, overrides, purpose="check")
    except UserError as error:
        # Answered here, before anything that imports torch is touched: a typo costs no ten seconds.
        return failed_answer(error.problems)

    from surefoot.cli.console import make_console
    from surefoot.run.check import check_job

    return check_job(cfg, None if quiet else make_console(stderr=False), gpu)


def failed_answer(problems: list[Problem]) -> dict[str, Any]:
    """The document for a request that could not be read at all."""
    errors = [{"key": problem.key, "message": problem.message, "hint": problem.hint} for problem in problems]
    return {"ok": False, "errors": errors, "warnings": [], "data": {}, "plan": {}}


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """Write a memory plan as a short table.

    Args:
        plan: as `check_job` gives it.

    Returns:
        The lines.
    """
    sizes = [
        ("weights that stay", plan["weights_gib"]),
        ("trained weights, gradients, optimizer", plan["trained_gib"]),
        ("activations of a pass", plan["activations_gib"]),
        ("loss of a pass", plan["loss_gib"]),
        ("peak", plan["memory_gib"]),
        ("spare", plan["spare_gib"]),
    ]
    parts = {"layers": plan["recompute_layers"], "MLPs": plan["recompute_mlps"]}
    again = " and ".join(f"{count} {name}" for name, count in parts.items() if count) or "none"
    host = ", their inputs wait in the host's memory" if plan["offload"] else ""
    return [
        f"Memory on {plan['where']}, {plan['available_gib']:.1f} GiB free:",
        *(f"  {name:<38} {gib:>8.2f} GiB" for name, gib in sizes),
        f"  {plan['tokens_per_pass']:,} tokens a pass, {plan['passes']} passes a step; "
        f"recomputed of {plan['layers']} layers: {again}{host}",
        f"  {plan['trainable_parameters']:,} of {plan['parameters']:,} parameters are trained",
    ]


def _show(answer: dict[str, Any]) -> None:
    """The report is on stdout already; what is wrong goes to stderr, as from every other command."""
    for kind in ("error", "warning"):
        for found in answer[f"{kind}s"]:
            problem = Problem(found["message"], found["hint"], found["key"])
            print(f"{kind}: {problem}", file=sys.stderr)
    if answer["plan"]:
        print("\n".join(plan_lines(answer["plan"])))
    print("ok" if answer["ok"] else "not ok")
