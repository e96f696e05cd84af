"""Does a merged model say what base and adapter say? Compared by logits, before an export calls itself done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Largest root mean square difference of logits that rounding explains, as a share of their root mean square.
# Measured on SmolLM2-135M with adapters of all sizes, then about three times that: rounding the saved weights gave
# 2e-6, 7e-4 and 6e-3; computing in half precision, where every layer rounds, gave up to 4e-3 and 3e-2.
SAVED = {"float32": 1e-4, "float16": 3e-3, "bfloat16": 2e-2}
COMPUTED = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}

PROBES = (
    "What is the capital of France?",
    "Write a Python function that returns the sum of a list of numbers.",
    "Translate into Chinese: The weather is fine today.",
    "Convert 3.5 kilometres to metres and answer as JSON.",
)


@dataclass(frozen=True, slots=True)
class MergeCheck:
    """What the comparison found.

    Attributes:
        ok: True when the merged model says what the adapter says, up to rounding.
        finite: True when all logits and all saved weights are finite.
        max_abs_diff: largest difference of two logits.
        rms_diff: root mean square difference, as a share of the logits' root mean square.
        rms_effect: the same for base against adapter; None without an adapter.
        allowed: the largest `rms_diff` that passes.
        top1_agreement: share of positions at which both predict the same token.
        conclusive: False when the adapter changes so little that rounding could hide it.
        positions: that were compared.
        saved: dtype of the merged weights.
        computed: dtype that both were computed in.
    """

    ok: bool
    finite: bool
    max_abs_diff: float
    rms_diff: float
    rms_effect: float | None
    allowed: float
    top1_agreement: float
    conclusive: bool
    positions: int
    saved: str
    computed: str

    def to_json(self) -> dict[str, Any]:
        """The findings as a JSON object; numbers that are not finite become null."""
        return {
            key: None if isinstance(v, float) and not abs(v) < float("inf") else v for key, v in asdict(self).items()
        }

    def __str__(self) -> str:
        effect = "" if self.rms_effect is None else f"; the adapter itself changes them by {self.rms_effect:.2%}"
        return (
            f"merged logits differ by at most {self.max_abs_diff:.3g} ({self.rms_diff:.3%} of their size, "
            f"allowed {self.allowed:.3%}{effect}); same first choice at {self.top1_agreement:.1%} "
            f"of {self.positions} positions"
        )


def compare_logits(
    reference: Sequence[torch.Tensor],
    merged: Sequence[torch.Tensor],
    base: Sequence[torch.Tensor] | None,
    *,
    saved: str,
    computed: str,
) -> MergeCheck:
    """Compare logits, prompt by prompt.

    Args:
        reference: of base and adapter; float32 [tokens, vocabulary] each.
        merged: of the saved model, the same shapes.
        base: without the adapter, the same shapes; None when there is no adapter.
        saved: dtype of the merged weights, as "bfloat16".
        computed: dtype that the logits were computed in.

    Returns:
        The findings.
    """
    import torch

    expected, got = torch.cat(list(reference)), torch.cat(list(merged))
    size = _rms(expected)
    diff = _rms(got - expected) / size if size else _rms(got)
    effect = None if base is None else (_rms(expected - torch.cat(list(base))) / size if size else 0.0)
    allowed = max(SAVED[saved], COMPUTED.get(computed, COMPUTED["float32"]))
    finite = bool(torch.isfinite(got).all() and torch.isfinite(expected).all())
    return MergeCheck(
        ok=finite and diff <= allowed,
        finite=finite,
        max_abs_diff=float((got - expected).abs().max()),
        rms_diff=diff,
        rms_effect=effect,
        allowed=allowed,
        top1_agreement=float((got.argmax(-1) == expected.argmax(-1)).float().mean()),
        conclusive=effect is None or effect > allowed,
        positions=len(expected),
        saved=saved,
        computed=computed,
    )


def logits_of(model: Any, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Compute a model's logits for each prompt on its own.

    Args:
        model: a causal language model in evaluation mode.
        prompts: token ids.

    Returns:
        float32 [tokens, vocabulary] each, on the CPU.
    """
    import torch

    device = next(model.parameters()).device
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False).logits[0].float().cpu()
            for ids in prompts
        ]


def _rms(values: torch.Tensor) -> float:
    return float(values.double().pow(2).mean().sqrt())
