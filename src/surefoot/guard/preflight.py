"""What can be known before step 1: is the model whole, the batch sound, and does the arithmetic hold?

Each check leaves the model, its gradients and every random generator as it found them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from surefoot.guard.preflight_base import Finding
from surefoot.guard.preflight_device import check_products
from surefoot.guard.preflight_leaves import check_rows, check_trainables, scan_weights
from surefoot.guard.preflight_numbers import check_silent_infinity, check_sum
from surefoot.guard.preflight_vocabulary import check_first_loss, check_tied
from surefoot.guard.scene import Scene
from surefoot.model.randomness import get_random_state, set_random_state

__all__ = ["Finding", "preflight"]


def preflight(scene: Scene, *, tell: Callable[[str], None], learning_rate: float | None = None) -> list[Finding]:
    """Check a run before its first step.

    Args:
        scene: of step 1, with the model as it will be trained.
        tell: called with a sentence for the person: what is odd but no fault, or could not be looked at.
        learning_rate: the run's highest, for what 16-bit parameters could learn; None when it is not known.

    Returns:
        The faults, the most basic first. Whatever needs sound weights and rows is not tried without them.
    """
    from surefoot.model.variants import without_compile

    before = get_random_state(scene.device)
    try:
        with without_compile(scene.model):
            return _checks(scene, tell, learning_rate)
    finally:
        scene.model.zero_grad(set_to_none=True)
        set_random_state(before, scene.device)


def _checks(scene: Scene, tell: Callable[[str], None], learning_rate: float | None) -> list[Finding]:
    findings: list[Finding] = []

    def run(name: str, check: Callable[[], Finding | None]) -> bool:
        try:
            found = check()
        except torch.OutOfMemoryError:
            scene.model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            tell(f"Before step 1: no memory to look at {name}.")
            return True
        if found is not None:
            findings.append(found)
        return found is None

    whole = run("the weights", lambda: scan_weights(scene))
    sound = run("the rows", lambda: check_rows(scene))
    run("the trained parameters", lambda: check_trainables(scene, learning_rate))
    run("tied weights", lambda: check_tied(scene))
    run("matrix products", lambda: check_products(scene))
    if whole and sound:
        known = run("the first loss", lambda: check_first_loss(scene, tell))
        run("the sum over passes", lambda: check_sum(scene))
        if known:  # rows fifty times too long overflow where sound ones do not
            run("silent infinities", lambda: check_silent_infinity(scene, tell))
    return findings
