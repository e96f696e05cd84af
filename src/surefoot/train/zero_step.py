"""One optimizer step where DeepSpeed keeps its results: passes and verdict here, reduction and update in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from surefoot.data.batch import count_trained, pack
from surefoot.data.messages import Sample
from surefoot.errors import WorkError
from surefoot.guard.check import DeviceCheck, NonFiniteStepError, check_gradients
from surefoot.guard.consensus import FLAGS, first_to_blame, read_flags, write_flags
from surefoot.guard.scene import Passes, Scene
from surefoot.model.randomness import get_random_state
from surefoot.train.shards import count_passes
from surefoot.train.step import Attempt, StepRunner

if TYPE_CHECKING:
    from surefoot.train.zero_engine import ZeroRun


@dataclass
class ZeroRunner(StepRunner):
    """Computes a step's gradients, and hands them to DeepSpeed when all ranks have found them sound.

    Attributes:
        zero: the engine and its parts.
        check: of the attempt that is applied next.
        max_norm: longest gradient that is let through.
    """

    zero: ZeroRun = None  # type: ignore[assignment]
    check: DeviceCheck = None  # type: ignore[assignment]
    max_norm: float | None = None

    def _compute_share(self, step: int, samples: Sequence[Sample], error: Exception | None) -> Attempt:
        """Compute this rank's share of a step and exchange the verdicts on it; the gradients stay where they are."""
        ranks = self.ranks
        ranks.seed(self.seed, step)
        if error is not None and self.zero.stage == 3:
            raise error
        share, tokens = self.share_of(samples, ranks.place.rank), count_trained(samples)
        scene = self._scene(step, share, get_random_state(self.device), tokens)
        own: DeviceCheck | None = None
        chance = torch.zeros((), device=self.device)
        try:
            self.model.zero_grad(set_to_none=True)
            passes = Passes([], [], [])
            if self.zero.stage == 3:
                scene, passes = self._run_alike(scene, samples)
            elif error is None and count_trained(share):
                scene, passes = self._run(step, share, tokens)
            if passes.losses:
                own = check_gradients(step, self.trained, passes.losses, passes.rows, self.scale.value)
                chance = torch.stack(passes.chances).sum().float()
        except Exception as caught:
            if self.zero.stage == 3:
                raise  # the others wait for this rank inside the model, where no flag reaches them
            error, own = caught, None
            self.model.zero_grad(set_to_none=True)
        check = self._exchange(step, samples, own, chance, error)
        attempt = Attempt(scene, check, check.samples, own, error)
        if self.zero.stage == 3:
            self._end_if_bad(attempt)
        return attempt

    def _exchange(
        self, step: int, samples: Sequence[Sample], own: DeviceCheck | None, chance: torch.Tensor,
        error: Exception | None,
    ) -> DeviceCheck:  # fmt: skip
        """Sum flags, losses and the norms of the shares over all ranks; a sum is finite only if all of them are."""
        ranks, names = self.ranks, list(self.trained)
        raised: dict[Any, torch.Tensor | bool] = {"exception": error is not None, "stop": self.stopping()}
        none = torch.zeros((), device=self.device)
        loss, norms_N = none, torch.zeros(len(names), device=self.device)
        if own is not None:
            raised |= {"loss": ~own.losses_P.isfinite().all(), "gradient": ~own.norm.isfinite()}
            loss = own.losses_P.sum()
            places = {name: place for place, name in enumerate(names)}
            norms_N[torch.tensor([places[name] for name in own.names], device=self.device)] = own.norms_N
        for name, parameter in self.trained.items():  # DeepSpeed reduces what is there: it must be there on all ranks
            if parameter.grad is None and self.zero.stage < 3:
                parameter.grad = torch.zeros(self.zero.parts.shapes[name], device=self.device)
        flags_FR = write_flags(ranks.place.rank, ranks.place.world, raised, self.device)
        words = torch.cat([loss[None], chance[None], norms_N, flags_FR.flatten()])
        ranks.sum_([words])
        loss, chance, norms_N, flags = words[0], words[1], words[2 : 2 + len(names)], words[2 + len(names) :]
        flags_FR = flags.view_as(flags_FR)
        norm = norms_N.sum()
        bad = (~(norm.isfinite() & loss.isfinite())).float()
        bad = torch.maximum(bad, flags_FR[: FLAGS.index("stop")].amax())
        rows = tuple(row for sample in samples for row in sample.row_ids)
        return DeviceCheck(
            step, names, [rows], self.scale.value, loss[None], norms_N, norm, bad, weights_bad=none,
            state_changed=none, moments_lost=none, clip=torch.ones_like(norm), chance=chance, samples=tuple(samples),
            flags_FR=flags_FR,
        )  # fmt: skip

    @property
    def width(self) -> int:
        """Size of the model's hidden states; stage 3 leaves no weight to ask."""
        return self.zero.width

    def finish_gradients(self, check: DeviceCheck, max_norm: float | None) -> None:
        """Remember what the gate will need: the engine scales and clips while it updates.

        Args:
            check: of the attempt whose gradients stand in the parameters.
            max_norm: longest gradient that is let through; None or 0 for no clipping.
        """
        self.check, self.max_norm = check, max_norm

    def reduce(self) -> bool:
        """Have the gradients reduced, and judge their sum, whose norms are known only now.

        Returns:
            False when the sum is not finite though all shares are; the step is dropped then.
        """
        check, world = self.check, self.ranks.place.world
        to_sum = world / check.loss_scale  # DeepSpeed makes a mean of the shares
        check.norms_N = (self.zero.reduce().sqrt() * to_sum).float()
        check.norm = torch.linalg.vector_norm(check.norms_N)
        if bool(check.norm.isfinite()):
            return True
        check.bad = torch.ones_like(check.bad)
        self.zero.drop()
        return False

    def update(self) -> None:
        """Have the update made from the reduced gradients, without the loss scale and clipped."""
        check, world = self.check, self.ranks.place.world
        factor = 1.0
        if self.max_norm and self.max_norm > 0:
            check.clip = (self.max_norm / (check.norm + 1e-6)).clamp_(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            factor = float(check.clip)
        self.zero.apply(check.loss_scale / (world * factor))

    def held(self) -> list[torch.Tensor]:
        """Return the trained weights that this rank can look at: all of them, or its part in stage 3."""
        return self.zero.parts.flats if self.zero.stage == 3 else [p.detach() for p in self.trained.values()]

    # ---- stage 3: every rank fetches every weight for every pass, so that all must make as many passes ----
    def _run_alike(self, scene: Scene, samples: Sequence[Sample]) -> tuple[Scene, Passes]:
        """Run this rank's passes, and as many empty ones as bring it to the most of any rank."""
        shares = [self.share_of(samples, rank) for rank in range(self.ranks.place.world)]
        most = max(count_passes(share, self.tokens_per_pass) for share in shares)

        def work() -> Passes:
            passes = scene.run_passes()
            for _ in range(most - len(passes.losses)):
                self._run_empty(samples[0])
            return passes

        try:
            passes = self.ranks.wait_for(work)
        except torch.OutOfMemoryError as error:
            raise WorkError(
                f"a pass of {self.tokens_per_pass} tokens does not fit into the device's memory",
                hint="lower cutoff_len; in ZeRO stage 3 a rank cannot try again with less, the others wait in the pass",
            ) from error
        if scene.samples and passes.losses:
            self._remember(scene.samples)
        return scene, passes

    def _run_empty(self, like: Sample) -> None:
        """Fetch and reduce along with the others, over two tokens whose loss counts nothing."""
        ids = like.input_ids[:2]
        batch = pack([Sample(("an empty pass",), ids, ids, (len(ids),))], self.forward.round_to).to(self.device)
        if self.before_pass:
            self.before_pass(batch)
        (self.forward(batch).loss * 0.0).backward()

    def _end_if_bad(self, attempt: Attempt) -> None:
        """End the run on all ranks at a step that is not finite: one rank alone cannot compute it again.

        Args:
            attempt: judged.

        Raises:
            NonFiniteStepError: naming the rank and its tensors.
        """
        check, ranks = attempt.check, self.ranks
        if not bool(check.bad):
            return
        assert check.flags_FR is not None
        flagged = read_flags(FLAGS, check.flags_FR.flatten().tolist(), ranks.place.world)
        if "exception" in flagged:
            ranks.stop_for(attempt.error)
        leader = first_to_blame(flagged)
        seen = ranks.on(leader, lambda: attempt.seen(check.read()))
        self.zero.run.guard.journal.write(
            "stopped", None, step=check.step, action="stopped before the update", loss=seen.loss,
            grad_norm=seen.grad_norm, rank=leader,
        )  # fmt: skip
        raise NonFiniteStepError(
            f"{seen.describe()} Found on {ranks.names[leader]}. It was not applied.",
            hint="ZeRO stage 3 leaves no rank the weights to look for the cause: run the same YAML with stage 2",
        )
