"""One optimizer step: its samples in as few passes as fit, checked on the device before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from surefoot.data.batch import PackedBatch, count_trained, split_into_passes
from surefoot.data.deal import cost_of, deal
from surefoot.data.messages import Sample
from surefoot.errors import WorkError
from surefoot.guard.check import DeviceCheck, StepCheck, check_gradients, check_norms
from surefoot.guard.consensus import FLAGS, write_flags
from surefoot.guard.scene import Passes, Scene
from surefoot.model.forward import LossForward
from surefoot.model.memory import MemoryPlan
from surefoot.model.randomness import get_random_state, set_random_state
from surefoot.train.loss_scale import LossScale
from surefoot.train.ranks import Ranks
from surefoot.train.shards import Shards, count_passes

MIN_PASS_TOKENS = 16


@dataclass(frozen=True)
class Attempt:
    """A step whose gradients stand in the parameters, not applied yet.

    Attributes:
        scene: what it takes to compute it again; of several ranks, this one's share.
        check: the verdict on it, on the device; of several ranks, on what all of them made together.
        samples: of the whole step.
        own: the verdict on this rank's share alone; None with one rank, or where nothing of the step fell to it.
        error: that this rank's computation raised, to be raised again when all ranks know.
    """

    scene: Scene
    check: DeviceCheck
    samples: tuple[Sample, ...]
    own: DeviceCheck | None = None
    error: Exception | None = None

    def seen(self, check: StepCheck) -> StepCheck:
        """Return what this rank saw of a step that is not finite: its own share of it, if that is at fault.

        Args:
            check: the verdict on the whole step, read by the host.

        Returns:
            The verdict on the share, or on the whole where the share is sound.
        """
        own = self.own.read() if self.own and not check.finite else check
        return check if own.finite else replace(own, samples=self.scene.samples, flagged=check.flagged)


@dataclass
class StepRunner:
    """What turns a step's samples into gradients.

    Attributes:
        model: the model, wrapped by PEFT or not.
        forward: how its loss is computed.
        device: where it lives, as torch names it.
        scale: the loss scale.
        tokens_per_pass: most tokens in one pass; halved when memory runs out.
        before_pass: called with each batch before it runs (NEFTune hears of the rows' lengths).
        tell: called with a sentence for the person.
        plan: of its memory.
        recompute_more: called when the longest row alone does not fit; returns False when it can do nothing.
        largest_pass: tokens of the largest pass that was run, and fitted.
        most_passes: of a step that was run.
        ranks: that compute a step together.
        seed: of the run; several ranks draw each step's random numbers from it.
        stopping: says whether this process was asked to stop; of several ranks, all must know.
        shards: of a sharded model; None where every rank holds all of it.
        trained: the trained parameters by name; of weights that are cut, this rank's pieces.
    """

    model: Any
    forward: LossForward
    device: str
    scale: LossScale
    tokens_per_pass: int
    before_pass: Callable[[PackedBatch], None] | None = None
    tell: Callable[[str], None] = print
    plan: MemoryPlan | None = None
    recompute_more: Callable[[], bool] | None = None
    largest_pass: int = 0
    most_passes: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    seed: int = 0
    stopping: Callable[[], bool] = bool
    shards: Shards | None = None
    trained: dict[str, torch.nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if self.shards is not None:
            self.trained = self.shards.trained

    def compute(self, step: int, samples: Sequence[Sample], error: Exception | None = None) -> Attempt:
        """Leave a step's scaled gradients in the parameters, and their verdict on the device.

        The loss is the mean over all trained tokens of the step, however the samples are laid out in passes and dealt
        to ranks. A pass that does not fit is computed again with half the tokens and the same random numbers.

        Args:
            step: the step, counted from 1.
            samples: those that make it; at least one trained token among them.
            error: that kept this rank, one of several, from reading its samples: it takes part without any.

        Returns:
            The attempt; nothing of it was read back from the device.

        Raises:
            WorkError: the longest sample alone does not fit into memory. Of several ranks, none raises here.
        """
        if not self.ranks.alone:
            return self._compute_share(step, samples, error)
        scene, passes = self._run(step, samples)
        check = check_gradients(step, self.trained, passes.losses, passes.rows, self.scale.value)
        check.chance, check.samples = torch.stack(passes.chances).sum(), scene.samples
        return Attempt(scene, check, scene.samples)

    def _run(self, step: int, samples: Sequence[Sample], step_tokens: int | None = None) -> tuple[Scene, Passes]:
        """Run the passes of a step, or of this rank's share of it, with as many tokens each as fit."""
        random_state = get_random_state(self.device)
        while True:
            scene = self._scene(step, samples, random_state, step_tokens)
            try:
                passes = scene.run_passes()
            except torch.OutOfMemoryError as error:
                if self.shards is not None:
                    raise WorkError(
                        f"step {step} does not fit into the device's memory with {self.tokens_per_pass} tokens a pass",
                        hint="with fsdp one rank cannot go on alone: give a lower number in `memory`",
                    ) from error
                self._shrink(samples, error)
                set_random_state(random_state, self.device)
                continue
            self._remember(samples)
            return scene, passes

    def _scene(
        self, step: int, samples: Sequence[Sample], random_state: dict[str, Any], step_tokens: int | None
    ) -> Scene:
        return Scene(
            self.model, self.forward, self.device, step, tuple(samples), self.tokens_per_pass, self.scale.value,
            random_state, self.before_pass, step_tokens,
        )  # fmt: skip

    def _compute_share(self, step: int, samples: Sequence[Sample], error: Exception | None) -> Attempt:
        """Compute this rank's share of a step and sum the gradients of all; whatever happens here, it takes part."""
        ranks = self.ranks
        ranks.seed(self.seed, step)
        share = self.share_of(samples, ranks.place.rank)
        tokens = count_trained(samples)
        scene = self._scene(step, share, get_random_state(self.device), tokens)
        own: DeviceCheck | None = None
        chance = torch.zeros((), device=self.device)
        spare = 0 if self.shards is None else self._spare_passes(share, error)
        try:
            self._drop_gradients()
            if error is None and count_trained(share):
                scene, passes = self._run(step, share, tokens)
                own = self._check_own(step, passes)
                chance = torch.stack(passes.chances).sum().float()
            if self.shards is not None:
                self.shards.idle_passes(scene, spare)
        except Exception as caught:  # noqa: BLE001 - whatever this rank died of, the others must hear of it
            if self.shards is not None:
                ranks.fail(caught)
            error, own = caught, None
            self._drop_gradients()
        loss, chance, flags_FR, norms_N = self._sum_up(own, chance, error)
        rows = tuple(row for sample in samples for row in sample.row_ids)
        names = [name for name, p in self.trained.items() if p.grad is not None]
        check = check_norms(step, names, norms_N, [loss], [rows], self.scale.value)
        check.bad = torch.maximum(check.bad, flags_FR[: FLAGS.index("stop")].amax())
        check.chance, check.samples, check.flags_FR = chance, tuple(samples), flags_FR
        return Attempt(scene, check, check.samples, own, error)

    def _spare_passes(self, share: Sequence[Sample], error: Exception | None) -> int:
        """Return how many passes another rank runs more than this one; end the run if one cannot run its own."""
        assert self.shards is not None
        passes = 0 if error else count_passes(list(share), self.tokens_per_pass)
        most, failed = self.ranks.most([passes, int(error is not None)])
        if failed:
            self.ranks.stop_for(error)
        return most - passes

    def _drop_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        if self.shards is not None:
            self.shards.drop_gradients()

    def _check_own(self, step: int, passes: Passes) -> DeviceCheck:
        """Judge this rank's own gradients, before they are summed."""
        if self.shards is None or not self.shards.trains:
            return check_gradients(step, self.trained, passes.losses, passes.rows, self.scale.value)
        norms = self.shards.own_norms()
        names = [name for name in self.trained if name in norms]
        norms_N = torch.stack([norms[name] for name in names])
        return check_norms(step, names, norms_N, passes.losses, passes.rows, self.scale.value)

    def _sum_up(
        self, own: DeviceCheck | None, chance: torch.Tensor, error: Exception | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sum gradients, loss and flags over all ranks; no gradient is left where none of them has one.

        What is returned: loss, loss by chance, flags, and the norms of the gradients that there are, scaled as they.
        """
        ranks = self.ranks
        cut = self.shards is not None and self.shards.trains
        if cut:
            assert self.shards is not None
            self.shards.take_gradients()  # of which each rank has its piece, summed while the passes ran
        raised: dict[Any, torch.Tensor | bool] = {"exception": error is not None, "stop": self.stopping()}
        if own is not None:
            raised |= {"loss": ~own.losses_P.isfinite().all(), "gradient": ~own.norm.isfinite()}
        trained = list(self.trained.values())
        absent = [p.grad is None for p in trained]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flags_FR = write_flags(ranks.place.rank, ranks.place.world, raised, self.device)
        loss = own.losses_P.sum() if own is not None else torch.zeros((), device=self.device)
        present_N = torch.ones(len(trained), device=self.device)
        if any(absent):
            present_N = torch.tensor([float(not gone) for gone in absent], device=self.device)
        grads = [p.grad for p in trained if p.grad is not None]
        words = torch.cat([loss[None], chance[None], flags_FR.flatten(), present_N])
        if cut:
            # In float64: the square of a large norm leaves float32's range.
            squares_N = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)).double().square()
            words = torch.cat([words.double(), squares_N])
            ranks.sum_([words])
            words, squares_N = words.split([len(words) - len(trained), len(trained)])
            words, norms_N = words.float(), squares_N.sqrt().float()
        else:
            ranks.sum_([*grads, words])
            norms_N = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32))
        loss, chance, flags, present_N = words[0], words[1], words[2 : 2 + flags_FR.numel()], words[-len(trained) :]
        if any(absent):  # read only where this rank lacks one: then another has it, or nobody (an expert not chosen)
            there = [bool(present) for present in present_N.tolist()]
            for parameter, present in zip(trained, there, strict=True):
                if not present:
                    parameter.grad = None
            norms_N = norms_N[torch.tensor(there, device=norms_N.device)]
        return loss, chance, flags.view_as(flags_FR), norms_N

    @property
    def width(self) -> int:
        """Size of the model's hidden states."""
        return int(self.forward.model.get_input_embeddings().weight.shape[1])

    def share_of(self, samples: Sequence[Sample], rank: int) -> list[Sample]:
        """Return a rank's share of a step's samples, dealt so that all ranks take about as long.

        Args:
            samples: of the step.
            rank: whose.

        Returns:
            Its samples, in the step's order.
        """
        width = self.width
        return deal(samples, [cost_of(sample, width) for sample in samples], self.ranks.place.world)[rank]

    def finish_gradients(self, check: DeviceCheck, max_norm: float | None) -> None:
        """Take the loss scale off the gradients and clip them, on the device.

        Args:
            check: of the attempt whose gradients stand in the parameters.
            max_norm: longest gradient that is let through; None or 0 for no clipping.
        """
        grads = [p.grad for p in self.trained.values() if p.grad is not None]
        factor = torch.ones_like(check.norm)
        if max_norm and max_norm > 0:
            factor = (max_norm / (check.norm + 1e-6)).clamp_(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            check.clip = factor
        elif not self.scale.enabled:
            return
        torch._foreach_mul_(grads, factor / check.loss_scale)

    def _shrink(self, samples: Sequence[Sample], error: BaseException) -> None:
        longest = max(len(sample.input_ids) for sample in samples)
        if self.tokens_per_pass > max(MIN_PASS_TOKENS, longest):
            self.tokens_per_pass = max(MIN_PASS_TOKENS, longest, self.tokens_per_pass // 2)
            remedy = f"{self.tokens_per_pass} tokens a pass"
        elif self.recompute_more is not None and self.recompute_more():
            remedy = "all decoder layers recomputed in the backward pass"
        else:
            raise WorkError(
                f"one row of {longest} tokens does not fit into the device's memory",
                hint="lower cutoff_len, or train fewer parameters",
            ) from error
        self.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.tell(f"Out of memory: going on with {remedy}; the step is computed again.")

    def _remember(self, samples: Sequence[Sample]) -> None:
        passes = split_into_passes(samples, self.tokens_per_pass)
        self.largest_pass = max(self.largest_pass, *(sum(len(s.input_ids) for s in group) for group in passes))
        self.most_passes = max(self.most_passes, len(passes))
