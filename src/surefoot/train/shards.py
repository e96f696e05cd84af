"""A run whose model is sharded: what is trained on this rank, equal numbers of passes, and whole states to save.

Trained weights that are cut are trained piece by piece: the optimizer, its gate and the guard see plain parameters that
lie in the same memory as torch's sharded ones, and are handed their gradients after a step's passes. Everything that
works element by element is as it is on one device; norms are summed over the ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from surefoot.config.sharding import Sharding, settled, sharding_of
from surefoot.data.batch import count_trained, pack, split_into_passes
from surefoot.data.messages import IGNORE_INDEX, Sample
from surefoot.errors import UserError, WorkError
from surefoot.guard.scene import Scene
from surefoot.model.forward import base_of
from surefoot.model.memory import GIB, free_memory
from surefoot.model.sharded import How, Sharded, named_parameters, shard
from surefoot.train.ranks import Ranks

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.model.load import LoadedModel

IDLE_TOKENS = 8  # of a pass that a rank runs only because others have one more


class NoRoomError(WorkError):
    """The whole model does not fit onto one device, and something cannot be done without."""


@dataclass
class Shards:
    """The sharded model of one run on this rank.

    Attributes:
        model: its pieces.
        trained: what this rank trains, by name: whole adapters, or pieces of weights.
        ranks: that share it.
        device: where it runs, as torch names it.
    """

    model: Sharded
    trained: dict[str, torch.nn.Parameter]
    ranks: Ranks
    device: str
    _own: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """True where trained weights are cut."""
        return self.model.trains

    @property
    def frozen_bytes(self) -> int:
        """What weights take on this device during a pass, beside what is trained: pieces, and what is gathered."""
        pieces = [tensor for name, tensor in self.model.pieces.items() if not (self.trains and name in self.trained)]
        here = torch.device(self.device).type  # those that wait in the host's memory take nothing of a GPU
        held = sum(tensor.numel() * tensor.element_size() for tensor in pieces if tensor.device.type == here)
        return held + self.model.gathered_bytes

    @property
    def gathered(self) -> bool:
        """True while the whole model is on every rank."""
        return self.model.gathered

    # Passes

    def idle_passes(self, scene: Scene, count: int) -> None:
        """Run passes of a row without labels, so that this rank meets the others' collectives; no gradient stays.

        Args:
            scene: of the step, after its own passes.
            count: of them.
        """
        if not count:
            return
        kept = [] if self.trains else [(p, p.grad) for p in self.trained.values()]
        for parameter, _ in kept:
            parameter.grad = None
        vocabulary = base_of(scene.model).get_input_embeddings().weight.shape[0]
        ids = np.arange(IDLE_TOKENS, dtype=np.int32) % vocabulary
        row = Sample(("idle",), ids, np.full_like(ids, IGNORE_INDEX), (IDLE_TOKENS,))
        for _ in range(count):
            batch = pack([row], scene.forward.round_to).to(scene.device)
            if scene.before_pass:
                scene.before_pass(batch)
            scene.forward(batch).loss.backward()  # a sum over no tokens: every gradient is zero
        for parameter, grad in kept:
            parameter.grad = grad

    def take_gradients(self) -> None:
        """Hand the sharded parameters' gradients, summed over all ranks, to the pieces that are trained."""
        if not self.trains:
            return
        for name, parameter in self.trained.items():
            grad = self.model.parameters[name].grad
            parameter.grad = None if grad is None else grad._local_tensor
            self.model.parameters[name].grad = None

    def drop_gradients(self) -> None:
        """Forget all gradients, and what was seen of this rank's own."""
        for name, parameter in self.trained.items():
            parameter.grad = None
            if self.trains:
                self.model.parameters[name].grad = None
        self._own = {}

    def own_norms(self) -> dict[str, torch.Tensor]:
        """Return L2 norms of the gradients that this rank has made itself, the largest of its passes, by name."""
        return self._own

    def watch_own_gradients(self) -> None:
        """Look at each gradient before it is summed over the ranks, so that a bad one has a rank to its name."""

        def look(name: str, parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            before = self._own.get(name)
            self._own[name] = norm if before is None else torch.maximum(before, norm)

        for name, parameter in self.model.gathered_one_by_one():
            if name in self.trained:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: look(name, p))

    # The whole model

    @contextlib.contextmanager
    def whole(self) -> Generator[None]:
        """Gather the model, so that one rank can run it alone; all ranks must enter.

        Yields:
            Nothing.

        Raises:
            NoRoomError: it does not fit onto every device.
        """
        if not self.gathered:
            needed = self.model.whole_bytes
            free = needed if self.device == "cpu" else _free_on(self.device)
            told = self.ranks.gather(free)
            if min(told) < needed:
                where = self.ranks.names[told.index(min(told))]
                raise NoRoomError(
                    f"the whole model takes {needed / GIB:.1f} GiB, and {where} has {min(told) / GIB:.1f} GiB left",
                    hint="the guard's experiments run on one rank: more memory, or fewer tokens a pass (`memory`)",
                )
        with self.model.whole():
            yield

    # States to keep

    def load_weights(self, whole: dict[str, torch.Tensor]) -> None:
        """Take this rank's pieces of whole weights.

        Args:
            whole: by the parameters' names; names without a piece are passed over.
        """
        with torch.no_grad():
            for name, tensor in whole.items():
                if name in self.model.pieces:
                    self.model.pieces[name].copy_(self.model.piece_of(tensor))

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Gather the model's weights on the main rank's host, a tensor at a time; all ranks must call it.

        Returns:
            By the names of the model's `state_dict`, tied ones too; empty on the other ranks.
        """
        found: dict[str, torch.Tensor] = {}
        by_id: dict[int, torch.Tensor] = {}
        for name, tensor in self.model.root.model.state_dict(keep_vars=True).items():
            key = id(tensor)
            if key not in by_id:
                by_id[key] = self._whole(tensor.detach()) if hasattr(tensor, "_local_tensor") else tensor.detach().cpu()
            if self.ranks.is_main:
                found[name] = by_id[key]
        return found

    def load_optimizer(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
        """Take this rank's pieces of a whole optimizer's state.

        Args:
            optimizer: over `trained`.
            whole: its `state_dict` over whole weights, as a run that is not sharded saves it.
        """
        if self.trains:
            like = self._by_place(optimizer)
            cut = {
                place: {
                    key: self.model.piece_of(value).clone() if _is_moment(value, like[place]) else value
                    for key, value in entry.items()
                }
                for place, entry in whole["state"].items()
            }
            whole = {"state": cut, "param_groups": whole["param_groups"]}
        optimizer.load_state_dict(whole)

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what `torch.distributed.checkpoint` saves in pieces and loads with any number of ranks.

        Args:
            optimizer: over `trained`.

        Returns:
            "model": the trained weights by name, "optimizer": by the same names, their moments. Sharded tensors in the
            memory of the run itself where they are cut.
        """
        names = {id(p): name for name, p in self.trained.items()}
        moments = {}
        for parameter, entry in optimizer.state.items():
            name = names[id(parameter)]
            like = self.model.parameters.get(name)
            moments[name] = {
                key: self._wrapped(value, like) if isinstance(value, torch.Tensor) else value
                for key, value in entry.items()
            }
        weights = {name: self.model.parameters.get(name, p) for name, p in self.trained.items()}
        return {"model": weights, "optimizer": moments}

    def _by_place(self, optimizer: torch.optim.Optimizer) -> dict[int, Any]:
        """Return the sharded parameters by the numbers that an optimizer's `state_dict` gives them."""
        names = {id(p): name for name, p in self.trained.items()}
        ordered = [p for group in optimizer.param_groups for p in group["params"]]
        return {place: self.model.parameters[names[id(p)]] for place, p in enumerate(ordered)}

    def _wrapped(self, value: Any, like: Any) -> Any:
        """Make a moment a sharded tensor as its parameter is one; anything else is returned as it is."""
        if like is None or not isinstance(value, torch.Tensor) or value.shape != like._local_tensor.shape:
            return value
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _whole(self, value: Any) -> Any:
        """Gather a sharded tensor; on the main rank it is returned on the host, elsewhere nothing of use."""
        if not hasattr(value, "_local_tensor"):
            return value.cpu() if isinstance(value, torch.Tensor) else value
        local = value._local_tensor.detach()
        if local.device.type != torch.device(self.device).type:  # kept on the host: the ranks talk on the device
            value = self._wrapped_on(local.to(self.device), value)
        whole = value.detach().full_tensor()
        return whole.cpu() if self.ranks.is_main else whole.new_empty(0)

    def _wrapped_on(self, local: torch.Tensor, like: Any) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def shard_as_asked(
    cfg: Config, loaded: LoadedModel, ranks: Ranks, device: str, tell: Callable[[str], None]
) -> Shards | None:
    """Cut the model over the ranks where the YAML or the launcher asks for it; all ranks must call it.

    Args:
        cfg: the YAML.
        loaded: the model; changed in place.
        ranks: of the run.
        device: where it shall run, as torch names it.
        tell: called with a sentence for the person.

    Returns:
        The shards; None where nothing is cut.

    Raises:
        UserError: something that cannot be done with pieces.
    """
    how = sharding_of(cfg, os.environ)
    if how is None:
        return None
    if said := settled(cfg.fsdp_config):
        tell(f"fsdp_config: {'; '.join(said)}.")
    if ranks.alone:
        tell("fsdp has nothing to shard in a run of one process.")
        return None
    if device != "cpu" and cfg.ddp_backend == "gloo":
        raise UserError("gloo cannot gather what is sharded on cards", hint="leave it out", key="ddp_backend")
    if device != "cpu" and how.offload and cfg.finetuning_type != "lora":
        raise UserError(
            "offload is there for frozen weights, under adapters",
            hint="leave offload out, or set `finetuning_type: lora`",
            key="fsdp",
        )
    shards = make_shards(loaded, how, ranks, device)
    what = "Weights, gradients and moments" if shards.trains else "The frozen weights"
    where = " in the host's memory" if how.offload else ""
    tell(f"{what} are sharded over {ranks.place.world} processes{where} (FSDP2).")
    return shards


def make_shards(loaded: LoadedModel, how: Sharding, ranks: Ranks, device: str) -> Shards:
    """Cut a run's model; all ranks must call it.

    Args:
        loaded: the model, on the host or the device; changed in place.
        how: the YAML's and the launcher's wishes.
        ranks: of the run.
        device: where it shall run, as torch names it.

    Returns:
        The shards.

    Raises:
        UserError: torch is too old.
        WorkError: the ranks have loaded different weights.
    """
    trained = {name: p for name, p in named_parameters(loaded.model).items() if p.requires_grad}
    if hasattr(loaded.model, "peft_config"):
        ranks.copy_from_main_(list(trained.values()))
    else:
        ranks.same("the sum of the weights as they were loaded", _sum_of(trained.values()))
    cut = shard(loaded.model, device, How(how.reshard_after_forward, how.offload, loaded.precision.autocast))
    if cut.trains:
        pieces = {name: torch.nn.Parameter(cut.pieces[name]) for name in trained}
        shards = Shards(cut, pieces, ranks, device)
        shards.watch_own_gradients()
        return shards
    return Shards(cut, trained, ranks, device)


def count_passes(samples: list[Sample], tokens_per_pass: int) -> int:
    """Count the passes of a rank's share of a step: groups of rows without a label are none."""
    return sum(count_trained(group) > 0 for group in split_into_passes(samples, tokens_per_pass))


def _free_on(device: str) -> int:
    """Return the bytes of a GPU that tensors can still take, in torch's own reserve too."""
    return free_memory(device) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _sum_of(tensors: Iterable[torch.Tensor]) -> str:
    # As text a NaN equals itself.
    return str(sum(float(tensor.detach().sum(dtype=torch.float64)) for tensor in tensors))


def _is_moment(value: Any, like: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == like.shape and value.ndim > 0
