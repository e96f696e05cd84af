"""Trained weights in 16 bits: where an optimizer's small numbers vanish, and most updates are rounded away.

Surefoot loads trained weights in float32; this is for models that come here otherwise.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.names import clean

if TYPE_CHECKING:
    from surefoot.train.keeper import Keeper
    from surefoot.train.loop import Run

SAMPLED = 4096  # weights of each tensor that are watched
LOOK_AFTER = 3  # steps; by then every weight with a gradient should have moved
MOVED_SHARE = (
    0.5  # of them; below it the masters must be wider (float32 moves all; bfloat16 at 1e-5 moved 4 %: measured)
)


class Masters:
    """Watches whether 16-bit trained weights move."""

    def __init__(self, run: Run, keeper: Keeper) -> None:
        """Look at the trained weights before the first step; float16 ones are widened at once.

        Args:
            run: the run.
            keeper: its guard.
        """
        self._keeper = keeper
        narrow = narrow_weights(run)
        half = [name for name, p in narrow.items() if p.dtype == torch.float16]
        if half:
            evidence = (
                f"{len(half)} trained tensors are float16, first {clean(half[0])}: Adam's eps of 1e-8 is 0 there and "
                "its second moments vanish, so that finite gradients make infinite updates."
            )
            tensors = {"tensors": [clean(name) for name in half]}
            step, module = run.state.step + 1, clean(half[0]).rpartition(".")[0]
            found = Diagnosis(step, "OPTIMIZER", "optimizer", module, None, "optimizer", (), (evidence,), tensors)
            self._mend(run, found)
            narrow = narrow_weights(run)
        self._began = run.state.step
        self._before = {name: p.detach().flatten()[:SAMPLED].clone() for name, p in narrow.items()}

    def look(self, run: Run, step: int) -> None:
        """After a few steps: widen the masters if most weights with a gradient have not moved.

        Args:
            run: the run.
            step: committed last.
        """
        if not self._before or step < self._began + LOOK_AFTER:
            return
        moved = watched = 0
        for name, before in self._before.items():
            parameter = run.runner.trained[name]
            moment = run.optimizer.state.get(parameter, {}).get("exp_avg")
            live = torch.ones_like(before, dtype=torch.bool)
            if moment is not None:
                live = moment.flatten()[:SAMPLED] != 0
            watched += int(live.sum())
            moved += int(((parameter.detach().flatten()[:SAMPLED] != before) & live).sum())
        self._before = {}
        if not watched or moved >= MOVED_SHARE * watched:
            return
        evidence = (
            f"After {step - self._began} updates only {moved / watched:.1%} of the trained 16-bit weights with a "
            "gradient have moved: the others' updates are below half of their last bit."
        )
        names = list(narrow_weights(run))
        self._mend(run, Diagnosis(step, "STAGNATION", "optimizer", None, None, "optimizer", (), (evidence,),
                                  {"tensors": [clean(name) for name in names[:8]]}))  # fmt: skip

    def _mend(self, run: Run, diagnosis: Diagnosis) -> None:
        keeper, began = self._keeper, time.perf_counter()
        keeper.journal.write("alarm", None, step=diagnosis.step)
        keeper.journal.write("diagnosis", diagnosis)
        if keeper.mode == "heal":
            count = widen(run)
            if keeper.integrity:
                keeper.integrity.forget()
            keeper.acted(run, diagnosis, f"{count} trained tensors are held in float32 from now on", None, began)


def narrow_weights(run: Run) -> dict[str, torch.nn.Parameter]:
    """Return the trained weights in 16 bits, by name."""
    return {name: p for name, p in run.runner.trained.items() if p.dtype in (torch.float16, torch.bfloat16)}


def widen(run: Run) -> int:
    """Hold all trained weights and their moments in float32; the parameters stay the same objects.

    Args:
        run: changed in place.

    Returns:
        The number of tensors that were widened.
    """
    narrow = narrow_weights(run)
    for parameter in narrow.values():
        parameter.data = parameter.data.float()
        parameter.grad = None
        state = run.optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                state[key] = value.float()
    return len(narrow)
