"""A model whose weights are cut into one piece a rank by torch's `fully_shard` (FSDP2).

Each decoder layer is gathered when it is about to run and let go of afterwards; what stands around the layers is one
more group. Only what is frozen is cut where adapters are trained: they are small and stay whole on every rank, plain
parameters as without sharding. A step's passes hold collectives then: all ranks must run the same number of them.

The rest of Surefoot does not know torch's sharded tensors. It sees the pieces of this rank as plain tensors, by the
parameters' names, or the whole model for as long as it is gathered.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from surefoot.errors import UserError
from surefoot.model.forward import base_of
from surefoot.model.quantized import detach_states
from surefoot.model.structure import decoder_layers

T = TypeVar("T")

_HELD = "_surefoot_sharded"  # in the own __dict__ of the transformers model


@dataclass(frozen=True)
class How:
    """How a model is cut.

    Attributes:
        reshard: let go of a layer's weights after its forward pass, and gather them again for the backward pass.
        offload: keep the pieces in the host's memory.
        gather_dtype: what trained layers are gathered in, where products are computed in 16 bits; None for their own.
    """

    reshard: bool = True
    offload: bool = False
    gather_dtype: torch.dtype | None = None


class Root(nn.Module):
    """The module whose forward is a whole pass with its loss: torch gathers what stands around the layers for it."""

    def __init__(self, model: nn.Module) -> None:
        """Take the model.

        Args:
            model: wrapped by PEFT or not.
        """
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        """Do the work.

        Args:
            work: what runs the model; its tensors with a graph must be returned in a plain tuple.

        Returns:
            What it returned.
        """
        return work()


@dataclass
class Sharded:
    """The pieces of one model on this rank.

    Attributes:
        root: around the model.
        rank: of this process.
        world: number of processes.
        parameters: torch's sharded parameters by name; those that stay whole are left out.
        pieces: this rank's part of each as a plain tensor in the same memory, cut along the first dimension; empty
            where there are fewer rows than ranks.
        trains: True where trained weights are cut, False where only frozen ones are.
        gathered_bytes: that are there at once during a pass: what stands around the layers, the layer that runs and
            the one that is fetched ahead.
    """

    root: Root
    rank: int
    world: int
    parameters: dict[str, Any]
    pieces: dict[str, torch.Tensor]
    trains: bool
    gathered_bytes: int = 0
    _depth: int = field(default=0, init=False)
    _sum_dtypes: dict[Any, torch.dtype | None] = field(default_factory=dict, init=False)

    def within(self, work: Callable[[], T]) -> T:
        """Run a forward pass with its loss; all ranks must, unless the model is gathered.

        Args:
            work: returns a plain tuple where it returns tensors with a graph.

        Returns:
            What it returned.
        """
        try:
            made = self.root(work)
            if not (torch.is_grad_enabled() or self.gathered):
                self.root.reshard()  # type: ignore[operator]  # no backward pass will do it
            return made
        except Exception:
            self._settle()
            if not self.gathered:
                for module in self._modules():
                    module.reshard()
            raise

    @property
    def gathered(self) -> bool:
        """True while the whole model is on every rank."""
        return self._depth > 0

    @property
    def whole_bytes(self) -> int:
        """What gathering the whole model takes beside the pieces."""
        return sum(p.numel() * p.element_size() for p in self.parameters.values())

    @contextlib.contextmanager
    def whole(self) -> Generator[None]:
        """Gather the whole model on every rank, so that one rank alone can run it; all ranks must enter.

        Parameters are plain tensors inside, and gradients stay on the rank that made them. What is written into them
        is lost, unless `write_back` is called.

        Yields:
            Nothing.
        """
        self._depth += 1
        try:
            if self._depth == 1:
                self._settle()
                for module in self._modules():
                    module.unshard()
                    self._let_go(module, on=False)
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._settle()
                for module in self._modules():
                    self._let_go(module, on=True)
                    module.reshard()

    def gathered_one_by_one(self) -> Generator[tuple[str, torch.Tensor]]:
        """Gather a group after the other; all ranks must go through all of them.

        Yields:
            Each sharded parameter's name, and the tensor that stands for it in every pass: the same one each time,
            whose memory is there only while it is gathered.
        """
        for module in self._modules():
            module.unshard()
            whole = {n: p for n, p in named_parameters(self.root.model).items() if n in self.pieces}
            yield from ((n, p) for n, p in whole.items() if not hasattr(p, "_local_tensor"))
            module.reshard()

    def piece_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor: a view, empty where there are fewer rows than ranks."""
        rows = -(-whole.shape[0] // self.world)
        return whole[min(self.rank * rows, whole.shape[0]) : min((self.rank + 1) * rows, whole.shape[0])]

    @torch.no_grad()
    def write_back(self, only: str | None = None) -> None:
        """While the model is gathered: put what was changed in it into this rank's pieces.

        Args:
            only: the name of one parameter; None for all.
        """
        for name, tensor in named_parameters(self.root.model).items():
            if name in self.pieces and only in (None, name):
                piece = self.pieces[name]
                now = self.piece_of(tensor.detach()).to(piece.device)
                if now.element_size() == 1:  # bytes of packed weights
                    now, piece = now.view(torch.uint8), piece.view(torch.uint8)
                piece.copy_(torch.where(now != piece.to(now.dtype), now.to(piece.dtype), piece))

    def _modules(self) -> list[Any]:
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self.root.modules() if isinstance(module, FSDPModule)]

    def _let_go(self, module: Any, *, on: bool) -> None:
        how: How = vars(self.root)["how"]
        module.set_reshard_after_forward(on and how.reshard and module is not self.root, recurse=False)
        module.set_reshard_after_backward(on, recurse=False)
        module.set_requires_gradient_sync(on, recurse=False)
        for group in groups_of(module._get_fsdp_state()):
            for part in group.fsdp_params:
                if not on:
                    # torch would put gradients aside in the dtype that they are summed in, to add them to later ones:
                    # they shall be where everybody looks for them, and gone with the experiment.
                    self._sum_dtypes[part], part.reduce_dtype = part.reduce_dtype, None
                elif part in self._sum_dtypes:
                    part.reduce_dtype = self._sum_dtypes.pop(part)
                    part._unsharded_param.grad = None

    def _settle(self) -> None:
        """Forget a pass that an exception has cut short.

        torch keeps where it is in a pass in private state, and has had a public way to clear it only since 2.13.
        """
        for module in self._modules():
            state = module._get_fsdp_state()
            idle = type(state._training_state).IDLE
            state._training_state = idle
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            state._comm_ctx.post_forward_order.clear()
            for group in groups_of(state):
                group._training_state = idle
                group._post_forward_indices.clear()


def shard(model: nn.Module, device: str, how: How) -> Sharded:
    """Cut a model's weights over all ranks of the run; all must call it with the same model.

    Each layer is moved to the device by itself and cut there, so that the whole model is never on it.

    Args:
        model: loaded, wrapped by PEFT or not, with trainable parameters marked; changed in place. On the host, or on
            the device already.
        device: where it shall run, as torch names it.
        how: to cut it.

    Returns:
        The pieces.

    Raises:
        UserError: torch is too old.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    needed = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
    if "ignored_params" not in inspect.signature(fully_shard).parameters or any(
        not hasattr(FSDPModule, name) for name in needed
    ):
        raise UserError(
            f"torch {torch.__version__} cannot leave adapters whole and sum gradients when it shards",
            hint="use torch 2.9 or newer", key="fsdp",
        )  # fmt: skip
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(torch.device(device).type, (world,))
    adapters = {p for p in model.parameters() if p.requires_grad} if hasattr(model, "peft_config") else set()
    trains = not adapters
    layer_bytes = [_bytes_of(layer, adapters) for layer in decoder_layers(model)]
    gathered = _bytes_of(model, adapters) - sum(layer_bytes) + 2 * max(layer_bytes)
    for parameter in adapters:
        parameter.data = parameter.data.to(device)
    detach_states(model, device)
    names = named_parameters(model)
    cut = [name for name, p in names.items() if p not in adapters]
    root = Root(model)
    vars(root)["how"] = how
    offload = CPUOffloadPolicy(pin_memory=device != "cpu") if how.offload else OffloadPolicy()
    common: dict[str, Any] = {"mesh": mesh, "ignored_params": adapters, "offload_policy": offload}
    layers = how.gather_dtype if trains else None
    # Inputs stay as they are: the stream between layers has its own dtype, which is no business of the weights.
    narrow = MixedPrecisionPolicy(layers, torch.float32 if layers else None, cast_forward_inputs=False)
    for layer in decoder_layers(model):
        fully_shard(layer, reshard_after_forward=how.reshard, mp_policy=narrow, **common)
    fully_shard(root, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **common)
    parameters = {name: p for name, p in named_parameters(model).items() if name in set(cut)}
    sharded = Sharded(root, rank, world, parameters, {}, trains, gathered)
    for module in sharded._modules():
        # Gradients are summed: each rank's loss is divided by the whole step's tokens already.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    with torch.no_grad():
        sharded.within(lambda: None)  # torch prepares the groups at the first pass
    root.reshard()  # type: ignore[operator]
    sharded.pieces = {name: p._local_tensor for name, p in parameters.items()}
    vars(base_of(model))[_HELD] = sharded
    return sharded


def sharded(model: nn.Module) -> Sharded | None:
    """Return the pieces of a model that was sharded; None for any other."""
    return vars(base_of(model)).get(_HELD)


def named_parameters(model: nn.Module) -> dict[str, Any]:
    """Return a model's parameters by name, as they stand now: sharded, or whole while they are gathered."""
    return dict(model.named_parameters())


def _bytes_of(module: nn.Module, left_out: set[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if p not in left_out)


def groups_of(state: Any) -> list[Any]:
    """Return torch's groups of parameters that are gathered together, of the private state of one module."""
    several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
