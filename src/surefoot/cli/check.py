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
    cards: int = typer.Option(1, "--cards", min=1, help="Also plan for this many cards of one machine."),
    speed: float | None = typer.Option(
        None, "--speed", metavar="TOKENS", min=0.001, help="Tokens/s that one card was measured to train."
    ),
    price: float | None = typer.Option(None, "--price", min=0, help="Price of a card for an hour."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    """Check a job: settings, data, memory.

    surefoot check job.yaml [--gpu CARD] [--cards N] [key=value ...] [--key value ...]
    """
    with exit_codes(debug=debug):
        answer = _answer(ctx.args, {"gpu": gpu, "cards": cards, "speed": speed, "price": price}, quiet=as_json)
        if as_json:
            print(json.dumps(answer, ensure_ascii=False, allow_nan=False))
        else:
            _show(answer)
        if not answer["ok"]:
            raise typer.Exit(2)


def _answer(tokens: list[str], wanted: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    from surefoot.config import load_config

    try:
        path, overrides = split_request(tokens, "check")
        cfg = load_config(path, overrides, purpose="check")
    except UserError as error:
        # Answered here, before anything that imports torch is touched: a typo costs no ten seconds.
        return failed_answer(error.problems)

    from surefoot.cli.console import make_console
    from surefoot.run.check import Wanted, check_job

    return check_job(cfg, None if quiet else make_console(stderr=False), Wanted(**wanted))


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


def cards_lines(cards: dict[str, Any]) -> list[str]:
    """Write a forecast for several cards as a short table.

    Args:
        cards: as `check_job` gives it under `plan`.

    Returns:
        The lines.
    """
    link = f"{cards['bus_gbs']:.0f} GB/s among them" if cards["bus_gbs"] else "speed of their links unknown"
    lines = [f"On {cards['number']} cards, {cards['rows_per_step']} rows a step, {link} (arithmetic, not measured):"]
    for way, words in (("replicas", "replicas, the model on each"), ("sharded", "sharded, `fsdp: full_shard`")):
        one = cards[way]
        if not one["fits"]:
            lines.append(f"  {words:<38} does not fit: {one['missing']}")
            continue
        wait = one["link_seconds_per_step"]
        lines.append(
            f"  {words:<38} {one['memory_gib']:>8.2f} GiB a card, {one['spare_gib']:.2f} spare; each sends "
            f"{one['sent_gib_per_step']:.3f} GiB a step" + (f", {wait * 1e3:.1f} ms" if wait is not None else "")
        )
        if one["tokens_per_second"]:
            price = f", price {one['price']:,.2f}" if one["price"] is not None else ""
            lines.append(f"  {'':<38} about {one['tokens_per_second']:,.0f} tokens/s, {one['hours']:.2f} hours{price}")
    if not cards["replicas"]["tokens_per_second"] and not cards["sharded"]["tokens_per_second"]:
        lines.append("  tokens/s and price: need --speed (as `surefoot bench` measures it on one card) and known links")
    return lines


def _show(answer: dict[str, Any]) -> None:
    """The report is on stdout already; what is wrong goes to stderr, as from every other command."""
    for kind in ("error", "warning"):
        for found in answer[f"{kind}s"]:
            problem = Problem(found["message"], found["hint"], found["key"])
            print(f"{kind}: {problem}", file=sys.stderr)
    if answer["plan"]:
        cards = answer["plan"].get("cards")
        lines = plan_lines(answer["plan"]) if "where" in answer["plan"] else []
        print("\n".join([*lines, *(cards_lines(cards) if cards else [])]))
    print("ok" if answer["ok"] else "not ok")
