"""What a run takes on N cards: memory of each card, and what it sends to the others in a step. Arithmetic only.

Nothing here was measured on several cards. Where a speed is not known it is left out rather than guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surefoot.errors import UserError
from surefoot.model.activations import FLOAT32
from surefoot.model.forecast import plan_for
from surefoot.model.memory import GIB, MemoryModel, MemoryPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surefoot.config import Config

COPIED_AT_ONCE = 512 * 2**20  # bytes of gradients that are copied together to be summed, as `ranks.MOST_BYTES`
GATHERED_LAYERS = 2  # the one that computes, and the next, which comes meanwhile


@dataclass(frozen=True)
class Spread:
    """A run spread over cards in one of two ways.

    Attributes:
        way: "replicas" (each card holds all) or "sharded" (FSDP: each holds a part of the weights).
        plan: of one card; None when it does not fit.
        missing: why it does not fit; empty when it does.
        sent_bytes: that each card sends in a step.
    """

    way: str
    plan: MemoryPlan | None
    missing: str
    sent_bytes: float


@dataclass(frozen=True)
class Known:
    """What is known beside the YAML.

    Attributes:
        cards: how many.
        bus_gbs: bus bandwidth among them, GB/s; None where no table has it.
        speed: trained on one card, tokens/s, as a person measured it; None for not measured.
        price: of a card for an hour, in any currency; None for not asked.
        step_tokens: of one card's share of a step, on average.
        run_tokens: of the whole run.
    """

    cards: int
    bus_gbs: float | None
    speed: float | None
    price: float | None
    step_tokens: float
    run_tokens: float


def spread_run(
    cfg: Config, model: MemoryModel, lengths: Mapping[str, float], cards: int, *, free_bytes: float, cpu: bool
) -> list[Spread]:
    """Plan a run on each of N cards, as replicas and sharded.

    Args:
        cfg: the YAML; each card does `per_device_train_batch_size` × `gradient_accumulation_steps` rows a step.
        model: bytes of the run on one card.
        lengths: "longest" and "mean" tokens of the training items.
        cards: how many.
        free_bytes: memory that is free on each.
        cpu: whether they are CPUs.

    Returns:
        Both ways.
    """
    found = []
    for way, part in (("replicas", replica(model)), ("sharded", shard(model, cards))):
        plan, missing = None, ""
        try:
            plan = plan_for(cfg, part, lengths, free_bytes=free_bytes, cpu=cpu)
        except UserError as error:
            missing = error.problems[0].message
        step_tokens = lengths["mean"] * cfg.per_device_train_batch_size * cfg.gradient_accumulation_steps
        passes = max(1, math.ceil(step_tokens / plan.tokens_per_pass)) if plan else 1
        found.append(Spread(way, plan, missing, sent_bytes(model, cards, sharded=way == "sharded", passes=passes)))
    return found


def replica(model: MemoryModel) -> MemoryModel:
    """Add the copy of the gradients that is summed over the cards."""
    copy = min(COPIED_AT_ONCE, FLOAT32 * model.trained)
    return replace(model, frozen_bytes=model.frozen_bytes + copy)


def shard(model: MemoryModel, cards: int) -> MemoryModel:
    """Divide a run among cards as FSDP's full_shard does.

    Frozen weights are divided. What is trained is divided with its gradients and its optimizer's state where it is the
    model's own; adapters stay whole on each card. Whole at a time are the embeddings with the head and two layers, in
    the format that they multiply in, and one layer's float32 gradients.

    Args:
        model: bytes of the run on one card.
        cards: how many.

    Returns:
        Bytes of one card.
    """
    layer, ends = layer_numbers(model), end_numbers(model)
    gathered = number_bytes(model) * (GATHERED_LAYERS * layer + ends)
    if not model.how.whole:
        return replace(model, frozen_bytes=model.frozen_bytes / cards + gathered)
    return replace(
        model, frozen_bytes=model.frozen_bytes / cards + gathered + FLOAT32 * layer,
        trained=math.ceil(model.trained / cards),
    )  # fmt: skip


def sent_bytes(model: MemoryModel, cards: int, *, sharded: bool, passes: int) -> float:
    """Count what each card sends in a step.

    Rings send 2 (n - 1) / n of what is summed, and (n - 1) / n of what is gathered or scattered.

    Args:
        model: bytes of the run on one card.
        cards: how many.
        sharded: whether weights are gathered in each pass, forward and backward, and gradients scattered.
        passes: of a card's share of the step.

    Returns:
        Bytes.
    """
    share = (cards - 1) / cards
    gradients = FLOAT32 * model.trained
    if not sharded:
        return 2 * share * gradients
    weights = number_bytes(model) * (model.shapes.layers * layer_numbers(model) + end_numbers(model))
    own = gradients if model.how.whole else 0  # scattered in each pass; adapters' are summed once
    return passes * share * (2 * weights + own) + (0 if model.how.whole else 2 * share * gradients)


def layer_numbers(model: MemoryModel) -> int:
    """Numbers in a decoder layer."""
    return model.shapes.layer_linears


def end_numbers(model: MemoryModel) -> int:
    """Numbers in the embeddings and the head."""
    return model.shapes.embeddings


def number_bytes(model: MemoryModel) -> float:
    """Bytes of a weight as it travels: packed as it is held where it is frozen, else as it multiplies."""
    if model.how.whole or not model.frozen_bytes:
        return float(model.how.compute)
    return model.frozen_bytes / model.shapes.parameters


def to_json(found: list[Spread], known: Known) -> dict[str, Any]:
    """Write a forecast for N cards.

    Args:
        found: both ways.
        known: what is known beside.

    Returns:
        The document's `cards`; what is not known is null.
    """
    ways = {}
    for one in found:
        plan = one.plan.to_json() if one.plan else {}
        seconds = one.sent_bytes / (known.bus_gbs * 1e9) if known.bus_gbs else None
        ways[one.way] = {
            "fits": one.plan is not None, "missing": one.missing, "memory_gib": plan.get("memory_gib"),
            "spare_gib": plan.get("spare_gib"), "tokens_per_pass": plan.get("tokens_per_pass"),
            "sent_gib_per_step": round(one.sent_bytes / GIB, 4),
            "link_seconds_per_step": None if seconds is None else round(seconds, 5), **_pace(one, known, seconds),
        }  # fmt: skip
    return {"number": known.cards, "bus_gbs": known.bus_gbs, "measured": False, **ways}


def _pace(one: Spread, known: Known, link_seconds: float | None) -> dict[str, Any]:
    """Estimate tokens/s and the price, from a measured speed of one card; waiting for links comes on top of it."""
    if known.speed is None or link_seconds is None or one.plan is None:
        return {"tokens_per_second": None, "hours": None, "price": None}
    seconds = known.step_tokens / known.speed + link_seconds
    pace = known.cards * known.step_tokens / seconds
    hours = known.run_tokens / pace / 3600
    price = None if known.price is None else round(hours * known.cards * known.price, 2)
    return {"tokens_per_second": round(pace, 1), "hours": round(hours, 3), "price": price}
