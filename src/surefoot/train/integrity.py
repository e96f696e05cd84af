"""Between two updates nobody but the run itself may change its state: proved from norms, not guessed from losses.

Per-tensor L2 norms of the trained weights and the optimizer's moments are taken right after an update and again right
before the next; the same numbers in the same order give the same norm, bit for bit. All of it stays on the device and
is read with the step's own numbers. The learning rate is compared with its schedule on the host, as late as torch
allows.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from surefoot.guard.check import DeviceCheck, StepCheck, shown
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.names import leaf_name, owner_name
from surefoot.train.cures import count_transient

if TYPE_CHECKING:
    from surefoot.train.keeper import Keeper
    from surefoot.train.loop import Run

TOLERANCE = 1e-3  # of a norm: far above float32's error in it, and a lost moment falls far below
SMALLEST = 1e-16  # norms of moments below it are not judged: their squares leave float32's range
LOST = 0.5  # a second moment that fell below this share of itself between two updates is lost, not flipped
# On a GPU every so many updates: norms of the 448 tensors of an 8B model's adapter take the host 1.3 ms (H200,
# measured), its moments are twice as many, and a look takes them three times; a step of short chats takes 130 ms.
# A CPU looks at every update.
EVERY_ON_GPU = 100
TOLD_RATES = 3  # changed learning rates that are told; after them each is put back without another word


Key = tuple[str, str]  # a parameter's name, and "" for the weight itself or the name of a moment of it


class StateTensors:
    """Everything that an update changes, listed once: weights first, then one kind of moments after the other.

    Attributes:
        keys: of the tensors.
        tensors: the parameters and their moments themselves.
        places: where each kind lies in them.
    """

    keys: list[Key]
    tensors: list[torch.Tensor]
    places: dict[str, slice]

    def __init__(self, trained: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """List them.

        Args:
            trained: parameters by name.
            optimizer: over them.
        """
        found: dict[str, list[tuple[str, torch.Tensor]]] = {"": list(trained.items())}
        self._entries: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for name, parameter in trained.items():
            state = optimizer.state.get(parameter, {})
            for kind, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim and value.is_floating_point():
                    found.setdefault(kind, []).append((name, value))
                    self._entries.append((state, kind, value))
        self._states = list(optimizer.state.values())
        self._size = sum(map(len, self._states))
        self.keys = [(name, kind) for kind, tensors in found.items() for name, _ in tensors]
        self.tensors = [tensor for tensors in found.values() for _, tensor in tensors]
        self.places = {}
        begin = 0
        for kind, tensors in found.items():
            self.places[kind] = slice(begin, begin + len(tensors))
            begin += len(tensors)

    def still_there(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether the optimizer still holds these very tensors and no others."""
        states = list(optimizer.state.values())
        return (
            len(states) == len(self._states)
            and all(now is then for now, then in zip(states, self._states, strict=True))
            and sum(map(len, states)) == self._size
            and all(state.get(kind) is tensor for state, kind, tensor in self._entries)
        )

    @torch.no_grad()
    def take_norms(self) -> StateNorms:
        """Take the L2 norm of each, in float32, without reading it back."""
        norms_S = torch.stack(torch._foreach_norm(self.tensors, 2.0, dtype=torch.float32))
        return StateNorms(self, torch.get_num_threads() if norms_S.device.type == "cpu" else 0, norms_S)


@dataclass(frozen=True)
class StateNorms:
    """L2 norms of everything that an update changes.

    Attributes:
        of: what they were taken of.
        threads: of the CPU, on which the order of a sum depends.
        norms_S: float32 [tensors].
    """

    of: StateTensors
    threads: int
    norms_S: torch.Tensor

    def kind(self, name: str) -> torch.Tensor:
        """Return the norms of one kind of moments, in the parameters' order; none where there are no such."""
        return self.norms_S[self.of.places.get(name, slice(0, 0))]

    def comparable(self, other: StateNorms) -> bool:
        """Say whether equal tensors have equal norms in both."""
        return self.threads == other.threads and (self.of is other.of or self.of.keys == other.of.keys)

    def differ_from(self, other: StateNorms) -> torch.Tensor:
        """Compare bits, in which a NaN equals itself; bool scalar on the device."""
        return (self.norms_S.view(torch.int32) != other.norms_S.view(torch.int32)).any()


class Integrity:
    """Watches one run's weights, moments and learning rate."""

    def __init__(self, run: Run, keeper: Keeper) -> None:
        """Start watching.

        Args:
            run: its optimizer gets a hook that looks at the rates last of all.
            keeper: the run's guard.
        """
        self._run, self._keeper = run, keeper
        self._tensors: StateTensors | None = None
        self._known: StateNorms | None = None
        self._compared: tuple[StateNorms | None, StateNorms] | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._step = 0
        self._rates_told = 0
        self._applied_before = self._applied()

    def forget(self) -> None:
        """The state was changed on purpose: take it as it is after the next update."""
        self._known = self._tensors = None

    def before_update(self, check: DeviceCheck) -> None:
        """Close the gate if the state is not what the last update left; put the schedule's learning rate back.

        Args:
            check: of the step that is about to be applied; its verdict is changed on the device.
        """
        run, self._step = self._run, check.step
        if run.optimizer is not self._optimizer:  # the first, or one that was built anew
            self._optimizer = run.optimizer
            run.optimizer.register_step_pre_hook(lambda *_: self._look_at_rates(run.guard.learning_rate_factor(run)))
            self.forget()
        self._look_at_rates(1.0)
        known, self._compared = self._known, None
        if known is None and not self._due(check.step):
            return
        now = self._take_norms()
        if known is not None and known.comparable(now):
            check.state_changed = now.differ_from(known).float()
        elif known is not None and set(known.of.keys) - set(now.of.keys):
            check.state_changed = torch.ones_like(check.bad)  # the optimizer has lost its state
        check.bad = torch.maximum(check.bad, check.state_changed)
        self._compared = (known, now)

    def after_update(self, check: DeviceCheck) -> None:
        """Take the norms that the next update must find, and judge whether an update can have made these moments.

        Args:
            check: of the step that was applied behind its gate.
        """
        due_next = self._due(check.step + 1)
        if self._compared is None and not due_next:
            return
        after = self._take_norms()
        if self._compared is not None and self._compared[1].comparable(after):
            check.moments_lost = self._lost_by_update(self._compared[1], after, check)
        self._known = after if due_next else None

    def mend(self, check: StepCheck) -> bool:
        """Act on a step's verdict.

        Args:
            check: read by the host; the step is not committed.

        Returns:
            True when the state was damaged and the run was put back to before it.
        """
        if not (check.state_changed or check.moments_lost):
            return False
        self._run.gate.undo_counters()
        self._run.model.zero_grad(set_to_none=True)
        self._go_back(check)
        return True

    def mend_at_rest(self, check: StepCheck) -> bool:
        """Look at the state once more before it is saved; reading the answer waits for the device.

        Args:
            check: of the step that was committed last.

        Returns:
            True when the state was damaged and the run was put back to before it.
        """
        now, known = self._take_norms(), self._known
        differs = known is not None and known.comparable(now) and bool(now.differ_from(known))
        found = self._run.ranks.gather(differs)
        if not any(found):
            return False
        self._compared = (known, now)
        ranks = tuple(rank for rank, there in enumerate(found) if there)
        self._go_back(replace(check, state_changed=True, flagged={"state": ranks}))
        return True

    def _go_back(self, check: StepCheck) -> None:
        run, keeper, began = self._run, self._keeper, time.perf_counter()
        leader = check.leader
        diagnosis = run.ranks.on(leader, lambda: self._diagnose(check))
        if not run.ranks.alone:
            diagnosis = replace(diagnosis, details=diagnosis.details | {"rank": leader})
        no_more = keeper.memory.add_alarm(check.step)
        keeper.journal.write("alarm", None, step=check.step, loss=check.loss, grad_norm=check.grad_norm)
        keeper.journal.write("diagnosis", diagnosis)
        if keeper.mode != "heal":
            keeper.stop(run, diagnosis, "stopped, as `guard: watch` asks")
        keeper.stop_if(run, diagnosis, no_more)
        count_transient(keeper, run, diagnosis)
        before = run.state.step
        # A point taken since the last sound look may hold the damage already.
        at = keeper.go_back(run, max(0, before - 1) if check.state_changed else before)
        action = f"went back to step {at} to do the same steps again"
        keeper.acted(run, diagnosis, action, None, began, steps_redone=before - at)

    def _due(self, step: int) -> bool:
        return self._run.runner.device == "cpu" or step % EVERY_ON_GPU == 0

    def _take_norms(self) -> StateNorms:
        run = self._run
        if self._tensors is None or not self._tensors.still_there(run.optimizer):
            self._tensors = StateTensors(run.runner.trained, run.optimizer)
        return self._tensors.take_norms()

    def _lost_by_update(self, before: StateNorms, after: StateNorms, check: DeviceCheck) -> torch.Tensor:
        """Say, 1.0 or 0.0, whether Adam's moments are smaller than its update can make them.

        v' = b2 v + (1 - b2) g² is at least b2 v in every element, hence in norm; m' = b1 m + (1 - b1) g has a norm of
        at least b1 |m| - (1 - b1) |g| (triangle inequality). A closed gate leaves both as they were.
        """
        betas: set[Any] = {group.get("betas") for group in self._run.optimizer.param_groups}
        second, now = before.kind("exp_avg_sq"), after.kind("exp_avg_sq")
        if len(betas) != 1 or not isinstance(self._run.optimizer, torch.optim.Adam) or not len(second):
            return torch.zeros_like(check.bad)
        beta1, beta2 = betas.pop()
        lost = ((now < beta2 * (1 - TOLERANCE) * second) & (second > SMALLEST)).any()
        first = before.kind("exp_avg")
        if isinstance(self._run.optimizer, torch.optim.AdamW) and len(first) == len(check.norms_N) == len(check.names):
            least = beta1 * first - (1 - beta1) * check.norms_N * check.clip  # all trained tensors have a gradient
            lost = lost | ((after.kind("exp_avg") < least - TOLERANCE * 10 * first) & (first > SMALLEST)).any()
        return lost.float()

    def _diagnose(self, check: StepCheck) -> Diagnosis:
        if not check.state_changed:
            evidence = (
                "Adam's moments were lost: an update lets them shrink by its betas at most; they have shrunk by more."
            )
            return Diagnosis(check.step, "SPIKE", "optimizer", phase="optimizer", evidence=(evidence,))
        assert self._compared is not None
        known, now = self._compared
        assert known is not None
        values = dict(zip(now.of.keys, now.norms_S.tolist(), strict=True))
        pairs = [(key, old, values.get(key)) for key, old in zip(known.of.keys, known.norms_S.tolist(), strict=True)]
        changed = [key for key, old, new in pairs if new is None or new != old]
        labels = [_label(key) for key in changed]
        fell = [key for key, old, new in pairs if key[1] and old > 0 and (new is None or new < LOST * old)]
        moments = [key for key, old, _ in pairs if key[1] and old > 0]
        if all(kind for _, kind in changed) and len(fell) > len(moments) / 4:
            words = {"exp_avg": "first moments", "exp_avg_sq": "second moments"}
            names = " and ".join(words.get(kind, kind) for kind in sorted({kind for _, kind in fell}))
            evidence = f"The optimizer's {names} were lost between two updates: {len(fell)} of {len(moments)} fell."
            return Diagnosis(check.step, "SPIKE", "optimizer", phase="optimizer", evidence=(evidence,),
                             details={"tensors": labels[:8]})  # fmt: skip
        evidence = (
            f"{shown(labels)} changed between two updates, where nothing may change: "
            "the norm taken right after the last update is another right before this one."
        )
        broken = [label for key, label in zip(changed, labels, strict=True) if not math.isfinite(values.get(key, 0.0))]
        if broken:
            evidence += f" {shown(broken)} {'is' if len(broken) == 1 else 'are'} not finite now."
        place, phase = ("optimizer", "optimizer") if changed[0][1] else (None, "forward")
        return Diagnosis(check.step, "TRANSIENT", place, owner_name(changed[0][0]), None, phase, (), (evidence,),
                         {"tensors": labels[:8]})  # fmt: skip

    def _look_at_rates(self, factor: float) -> None:
        """Put the schedule's learning rates back where a group holds another.

        Args:
            factor: on the schedule's rates, of the warm-up after a rollback.
        """
        run = self._run
        scheduled, held = self._scheduled(), [float(group["lr"]) for group in run.optimizer.param_groups]
        wanted = [rate * factor for rate in scheduled]
        off = [(a, b) for a, b in zip(held, wanted, strict=True) if not math.isclose(a, b, rel_tol=1e-6, abs_tol=0.0)]
        if not off:
            return
        began = time.perf_counter()
        for group, rate in zip(run.optimizer.param_groups, wanted, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        was, right = off[0]
        evidence = f"The learning rate was changed from outside: {was:.4g} where the schedule says {right:.4g}."
        diagnosis = Diagnosis(self._step, "SPIKE", "optimizer", phase="optimizer", evidence=(evidence,),
                              details={"held": was, "scheduled": right})  # fmt: skip
        keeper = self._keeper
        if keeper.mode == "heal" and self._rates_told >= TOLD_RATES:
            return
        self._rates_told += 1
        keeper.journal.write("alarm", None, step=self._step)
        keeper.journal.write("diagnosis", diagnosis)
        if keeper.mode != "heal":
            keeper.stop(run, diagnosis, "stopped before the update, as `guard: watch` asks")
        action = f"put back to {right:.4g} before the update was made"
        if self._rates_told == TOLD_RATES:
            action += "; from here on it is put back without another word"
        keeper.acted(run, diagnosis, action, True, began)

    def _scheduled(self) -> list[float]:
        """Return the schedule's rates of the groups; where it can be, computed from the count of applied steps."""
        run = self._run
        scheduler = run.scheduler
        applied = self._applied()
        # The first rate of a resumed run is its checkpoint's, also where the schedule is another now.
        if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) or applied <= self._applied_before:
            return [float(rate) for rate in scheduler.get_last_lr()]
        rates = [
            float(base) * scale(applied) for base, scale in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        if scheduler.last_epoch != applied:
            scheduler.last_epoch = applied  # stepped from outside
        scheduler._last_lr = list(rates)
        return rates

    def _applied(self) -> int:
        """Return the count of updates in the run so far."""
        return self._run.state.step - self._keeper.memory.steps_lost


def _label(key: Key) -> str:
    """Name a tensor for a person: a weight, or a moment of it."""
    name, moment = key
    return f"{moment} of {leaf_name(name)}" if moment else leaf_name(name)
