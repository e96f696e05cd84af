"""DeepSpeed's engine under one run: what reduces, applies and drops, and the optimizer that the run sees."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from surefoot.config.zero import engine_settings, read_deepspeed, stage_of
from surefoot.errors import WorkError
from surefoot.model.forward import base_of
from surefoot.model.lora import unfuse_lora
from surefoot.train.zero_gather import gather_states, gather_weights
from surefoot.train.zero_parts import Parts, Whole

if TYPE_CHECKING:
    from surefoot.train.loop import Run
    from surefoot.train.ranks import Ranks
    from surefoot.train.rewind import RestorePoint
    from surefoot.train.zero_step import ZeroRunner


class ZeroRun:
    """DeepSpeed's engine under one run, and what it holds of it.

    Attributes:
        engine: DeepSpeed's.
        stage: 1, 2 or 3.
        parts: which rank holds what.
        base: torch's optimizer, over this rank's part.
        ranks: of the run.
        width: of the model's hidden states.
        hooks: called before each update.
    """

    engine: Any
    stage: int
    parts: Parts
    base: Any
    ranks: Ranks
    width: int
    hooks: list[Callable[..., None]]

    def __init__(self, run: Run, deepspeed: Any) -> None:
        """Hand model and optimizer to DeepSpeed.

        Args:
            run: whose they are.
            deepspeed: the package.
        """
        device = torch.device(run.runner.device)
        if device.type == "cpu":  # a kernel that is compiled at first use, for something that is not used here
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        warnings.filterwarnings("ignore", "`torch.distributed.*_tensor` is deprecated", FutureWarning)
        settings = read_deepspeed(run.cfg.deepspeed or {})
        self.run, self.ranks, self.stage = run, run.ranks, stage_of(settings)
        self.base = run.optimizer
        model = base_of(run.model)
        if self.stage == 3:
            unfuse_lora(model)
        trained, shapes = run.runner.trained, {name: p.shape for name, p in run.runner.trained.items()}
        of = {id(parameter): name for name, parameter in trained.items()}
        self.names = [[of[id(p)] for p in group["params"]] for group in self.base.param_groups]
        before = self.base.state_dict()
        self.width = int(model.get_input_embeddings().weight.shape[1])
        filled = engine_settings(settings, dict(run.cfg), run.ranks.place.world, self.width)
        place = SimpleNamespace(device_rank=device.index or 0)
        self.engine, *_ = deepspeed.initialize(
            args=place, model=model, optimizer=self.base, config=filled, dist_init_required=False
        )
        self.parts = Parts(self.engine.optimizer, self.stage, trained, shapes, run.ranks.place.world)
        self.base.state.clear()
        self.load(before)
        self.hooks = []
        self._whole: Whole | None = None
        self._held = ExitStack()
        self.hold()

    def hold(self) -> None:
        """Keep DeepSpeed from reducing gradients until `apply`."""
        self._held.enter_context(self.engine.coalesce_grad_reduction())

    def reduce(self) -> torch.Tensor:
        """Let DeepSpeed reduce the gradients that stand in the parameters, and cut them into parts.

        Returns:
            Squares of the norms of all trained tensors' mean gradients, with the loss scale, float64 [tensors].
        """
        self.ranks.wait_for(self._held.close)
        device = self.run.runner.device
        places = {name: place for place, name in enumerate(self.parts.trained)}
        squares_N = torch.zeros(len(places), dtype=torch.float64, device=device)
        found = self.parts.gradients(self.ranks.place.rank)
        if found:
            norms = torch.stack(torch._foreach_norm([part for _, part in found], 2.0, dtype=torch.float32))
            index = torch.tensor([places[name] for name, _ in found], device=device)
            squares_N.index_add_(0, index, norms.to(device, torch.float64) ** 2)
        self.ranks.sum_([squares_N])
        return squares_N

    def apply(self, loss_scale: float) -> None:
        """Let the engine make the update from the reduced gradients.

        Args:
            loss_scale: what they are divided by before.

        Raises:
            WorkError: DeepSpeed has left the update out on its own.
        """
        for hook in self.hooks:  # once, though DeepSpeed updates group by group
            hook(self)
        self._step(loss_scale, applies=True)

    def drop(self) -> None:
        """Have DeepSpeed drop reduced gradients that are not finite, as it does by itself."""
        for _, part in self.parts.gradients(self.ranks.place.rank):
            part.fill_(float("inf"))
        self._step(1.0, applies=False)

    def _step(self, loss_scale: float, *, applies: bool) -> None:
        self.engine.optimizer.override_loss_scale(loss_scale)
        self.ranks.wait_for(self.engine.step)
        self.hold()
        if self.engine.was_step_applied() != applies:
            done = "left out a step whose gradients are" if applies else "applied a step whose gradients are not"
            raise WorkError(f"DeepSpeed has {done} finite", hint="please report this")

    def flat_states(self) -> list[dict[str, Any]]:
        """Return the optimizer's state of each of this rank's flat tensors."""
        return [dict(self.base.state.get(flat, {})) for flat in self.parts.flats]

    def load(self, state: Whole) -> None:
        """Take up an optimizer's state, whole or this rank's flat part of it.

        Args:
            state: as `ZeroOptimizer.state_dict` or torch's own gives it.
        """
        rank = self.ranks.place.rank
        if "flat" in state:
            copies = [state["state"].get(i, {}) for i in range(len(self.parts.flats))]
            states = [{k: v.to(f.device, copy=True) if isinstance(v, torch.Tensor) else v for k, v in s.items()}
                      for f, s in zip(self.parts.flats, copies, strict=True)]  # fmt: skip
        else:
            states = self.parts.to_flat(state, self.names, rank)
        self.base.state.clear()
        for flat, held in zip(self.parts.flats, states, strict=True):
            if held:
                self.base.state[flat] = held
        for group, saved in zip(self.base.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if self.stage < 3:
            self.parts.take_weights(rank)

    def flattened(self, point: RestorePoint) -> RestorePoint:
        """Return a restore point that was taken before DeepSpeed took over, with this rank's part of its optimizer."""
        if "flat" in point.optimizer:
            return point
        _, whole = point.copies()
        states = self.parts.to_flat(whole, self.names, self.ranks.place.rank)
        return point.with_optimizer(self._flat_dict(states, whole["param_groups"]))

    def _flat_dict(self, states: list[dict[str, Any]], groups: list[dict[str, Any]]) -> Whole:
        numbered = [
            group | {"params": [i for i, of in enumerate(self.parts.groups) if of == number]}
            for number, group in enumerate(groups)
        ]
        return {"flat": True, "state": {i: s for i, s in enumerate(states) if s}, "param_groups": numbered}

    def state_dict(self) -> Whole:
        """Return the whole state while it is gathered, else this rank's part of it."""
        if self._whole is not None:
            return self._whole
        return self._flat_dict(self.flat_states(), self.base.param_groups)

    @contextmanager
    def gathered(self, optimizer: bool) -> Iterator[None]:
        """Gather what a checkpoint holds on the main rank, in the host's memory; a collective.

        Args:
            optimizer: gather the optimizer's state too.

        Yields:
            While the model and the optimizer answer as if they were whole there.
        """
        with ExitStack() as stack:
            if optimizer:
                states = gather_states(self.flat_states(), self.ranks)
                if self.ranks.is_main:
                    self._whole = self._whole_dict(self.parts.to_whole(states, self.names))
            if self.stage == 3:
                model = self.run.model
                everything = self.run.guard.memory.embeddings_mended
                weights = self.ranks.wait_for(lambda: gather_weights(model, self.ranks, everything=everything))
                hook = model._register_state_dict_hook(lambda _, state, *rest: state.update(weights))
                stack.callback(hook.remove)
            try:
                yield
            finally:
                self._whole = None

    def _whole_dict(self, states: dict[int, dict[str, Any]]) -> Whole:
        numbers = iter(range(sum(map(len, self.names))))
        groups = zip(self.base.param_groups, self.names, strict=True)
        numbered = [group | {"params": [next(numbers) for _ in names]} for group, names in groups]
        return {"state": states, "param_groups": numbered}


class ZeroOptimizer:
    """What the loop and the guard see of an optimizer whose state lies on all ranks.

    Attributes:
        param_groups: torch's own, with the learning rates.
        state: this rank's part, by flat tensor.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Any, dict[str, Any]]

    def __init__(self, zero: ZeroRun) -> None:
        """Stand for the optimizer of a run on DeepSpeed's engine.

        Args:
            zero: the engine and its parts.
        """
        self._zero = zero
        self.param_groups, self.state = zero.base.param_groups, zero.base.state

    def register_step_pre_hook(self, hook: Callable[..., None]) -> None:
        """Have something called before each update."""
        self._zero.hooks.append(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients in the parameters."""
        for parameter in self._zero.parts.trained.values():
            parameter.grad = None

    def state_dict(self) -> Whole:
        """Return the whole state while it is gathered, else this rank's part of it."""
        return self._zero.state_dict()

    def load_state_dict(self, state: Whole) -> None:
        """Take up a state, whole or this rank's part of it, and the weights that stand in the parameters."""
        self._zero.load(state)


class ZeroGate:
    """Lets the engine make an update, or keeps it from hearing of the step; the host reads the verdict for that.

    Attributes:
        fused: True: nothing of a dropped step has to be taken back.
    """

    fused = True

    def __init__(self, runner: ZeroRunner) -> None:
        """Take the runner, which has the step's gradients and its check.

        Args:
            runner: of the run.
        """
        self._runner = runner

    @torch.no_grad()
    def step(self, bad: torch.Tensor) -> torch.Tensor:
        """Make the update unless the step is bad.

        Args:
            bad: 1.0 when nothing may change, else 0.0; alike on all ranks; changed when the summed gradient is bad.

        Returns:
            1.0 when the update made a weight that is not finite, else 0.0; float32 scalar.
        """
        runner, none = self._runner, torch.zeros_like(bad)
        if bool(bad) or not runner.reduce():
            return none
        runner.update()
        norms = torch.stack(torch._foreach_norm(runner.held(), 2.0, dtype=torch.float32))
        return (~norms.isfinite().all()).float().to(bad.device)

    def undo_counters(self) -> None:
        """Nothing to do: a dropped step has counted nothing."""
