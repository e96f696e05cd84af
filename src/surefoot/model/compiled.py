"""Regional compile: each decoder layer on its own, so that one can be left out.

Layers of one build share what was compiled, and token counts are symbols in it: a run compiles once for its first
layer (whose input needs no gradient), once for the others, and once more for each kind of layer or mode of running.
A layer that cannot be compiled whole runs eagerly from then on, and that is said.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from surefoot.model.forward import base_of
from surefoot.model.structure import decoder_layers

if TYPE_CHECKING:
    from surefoot.model.lora_group import LoraGroup

# Passes are filled up to a multiple of this many tokens: matrix products and the allocator see few sizes, and short
# chats (1,500 tokens a step) pay 2 % for it on average.
ROUND_TO = 64
# Variants of one layer's code: kind of attention, with or without gradients, dtypes, what the guard changed. torch's
# own 8 would be few, and its way on is to run uncompiled without a word.
MAX_VARIANTS = 64
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def is_wanted(asked: bool | None, device: str) -> bool:
    """Say whether a run's layers are compiled.

    Args:
        asked: the YAML's `compile`.
        device: where the model lives, as torch names it.

    Returns:
        What was asked for; unset, True on a GPU: a CPU gains little by it.
    """
    return device != "cpu" if asked is None else asked


def compile_layers(
    model: torch.nn.Module, *, tell: Callable[[str], None] | None = None, fp8: bool = False, **options: Any
) -> list[str]:
    """Compile every decoder layer; the work is done at the first forward.

    Args:
        model: the model, wrapped by PEFT or not; changed in place.
        tell: called with a sentence for the person: how long compiling took, and what could not be compiled.
        fp8: multiply with the frozen weights of LoRA linears in 8-bit floats.
        **options: for `torch.compile`, beside `dynamic=True` and `fullgraph=True`.

    Returns:
        The layers' names, as "model.layers.0".
    """
    keep_compiled_code()
    warm_up = _WarmUp(tell or _say_nothing)
    for layer in decoder_layers(model):
        start_compiling(layer, warm_up=warm_up, name=_name_in(model, layer), fp8=fp8, **options)
    return compiled_layers(model)


def keep_compiled_code() -> None:
    """Keep compiled code in the user's cache folder, unless the person has chosen one or it cannot be written.

    torch's own choice is a folder in the temporary files, gone with the next start of the machine.
    """
    if os.environ.get(CACHE_VARIABLE):
        return
    own, base = os.environ.get("SUREFOOT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own).expanduser() if own else (Path(base) if base else Path.home() / ".cache") / "surefoot"
    folder = root / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ[CACHE_VARIABLE] = str(folder)


def compiled_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that run compiled, in the model's order."""
    return [name for name, module in base_of(model).named_modules() if is_compiled(module)]


def computes_in_fp8(model: torch.nn.Module) -> bool:
    """Tell whether a compiled layer multiplies in 8-bit floats."""
    calls = [module._compiled_call_impl for module in base_of(model).modules()]
    return any(group.narrow is not None for call in calls if call is not None for group in getattr(call, "groups", ()))


def is_compiled(layer: torch.nn.Module) -> bool:
    """Tell whether a module runs compiled."""
    return layer._compiled_call_impl is not None


def start_compiling(
    layer: torch.nn.Module, *, warm_up: _WarmUp | None = None, name: str = "", fp8: bool = False, **options: Any
) -> None:
    """Compile one layer. Token counts differ from pass to pass, so sizes are taken as dynamic.

    Args:
        layer: the layer; changed in place.
        warm_up: who counts the time; None for nobody.
        name: for messages.
        fp8: multiply with the frozen weights of LoRA linears in 8-bit floats.
        **options: for `torch.compile`.
    """
    import surefoot.model.attention_op  # noqa: F401  registers the operator that compiled attention calls
    from surefoot.model.lora_group import group_lora

    warm_up = warm_up or _WarmUp(_say_nothing)
    # The weights of a sharded layer are torch's to place: none can be moved beside another.
    groups = [] if is_sharded(layer) else group_lora(layer, narrow=fp8)
    layer._compiled_call_impl = _CompiledLayer(layer, name or type(layer).__name__, groups, warm_up, options)


def is_sharded(layer: torch.nn.Module) -> bool:
    """Tell whether a layer's weights are gathered for each pass, by hooks around its forward."""
    return hasattr(layer, "unshard")


def stop_compiling(layer: torch.nn.Module) -> None:
    """Let one layer run eagerly from now on."""
    layer._compiled_call_impl = None


class _CompiledLayer:
    """What a compiled layer's call goes through."""

    def __init__(
        self, layer: torch.nn.Module, name: str, groups: list[LoraGroup], warm_up: _WarmUp, options: dict[str, Any]
    ) -> None:
        self.layer = layer
        self.name = name
        self.groups = groups
        self.warm_up = warm_up
        self.called = False
        self.settings = _compiler_settings()
        warm_up.awaited += 1
        chosen: dict[str, Any] = {"dynamic": True, "fullgraph": True} | options
        self.sharded = is_sharded(layer)
        self.eager = MethodType(type(layer).forward, layer) if self.sharded else layer._call_impl
        self.call: Callable[..., Any] = torch.compile(self.eager, **chosen)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            return self.layer._call_impl(*args, **kwargs)  # somebody watches each operation: none may be hidden
        if not self.sharded:
            return self._compiled(*args, **kwargs)
        own = vars(self.layer)
        if "forward" in own:
            return self.layer._call_impl(*args, **kwargs)  # something stands in for it already
        # The hooks that gather weights hold collectives, which are no part of a graph: only the forward is compiled.
        own["forward"] = self._compiled
        try:
            return self.layer._call_impl(*args, **kwargs)
        finally:
            del own["forward"]

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        for group in self.groups:
            group.look()
        layout = kwargs.get("packed_layout")
        inputs = kwargs if layout is None else kwargs | {"packed_layout": layout.tensors}
        began = time.perf_counter()
        try:
            with contextlib.ExitStack() as stack:
                for setting in self.settings:
                    stack.enter_context(setting)
                output = self.call(*args, **inputs)
        except _failures() as error:
            stop_compiling(self.layer)
            self.warm_up.failed(self.name, error)
            output = self.eager(*args, **kwargs)
        if not self.called:
            self.called = True
            self.warm_up.first_call(time.perf_counter() - began)
        return output


class _WarmUp:
    """Counts the time of the layers' first calls, and says it once all have run."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.awaited = 0
        self.layers = 0
        self.seconds = 0.0
        self.uncompiled: list[str] = []

    def first_call(self, seconds: float) -> None:
        """Hear how long a layer's first call took."""
        self.layers += 1
        self.seconds += seconds
        self.awaited -= 1
        if self.awaited == 0 and self.layers > len(self.uncompiled):
            count = self.layers - len(self.uncompiled)
            self.tell(f"Compiled {count} decoder layers in {self.seconds:.0f} s; what was made is kept for later runs.")

    def failed(self, name: str, error: BaseException) -> None:
        """Hear that a layer could not be compiled."""
        first = not self.uncompiled
        self.uncompiled.append(name)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        self.tell(f"{name} runs uncompiled: {reason[:300]}" if first else f"{name} runs uncompiled too.")


def _compiler_settings() -> list[contextlib.AbstractContextManager[Any]]:
    """Return what a compile during a call shall go by; to be entered at each call, whether it compiles or not."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    import torch.fx.experimental._config as symbols

    limits: dict[str, Any] = {"recompile_limit": MAX_VARIANTS, "accumulated_recompile_limit": 16 * MAX_VARIANTS}
    # Grouped LoRA hands outputs from one linear to the next by an attribute, empty again when the layer is done: that
    # need not be done again where a layer or its MLP is recomputed.
    side_effects = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    limits |= {side_effects: True} if hasattr(dynamo, side_effects) else {}
    # As a symbol, an adapter's scale would be made a tensor at each call, and read back from it.
    limits |= {"specialize_float": True}
    # Sizes that happen to be equal the first time are different things: spans, buckets, tokens.
    settings = [dynamo.patch(limits), symbols.patch({"use_duck_shape": False})]  # type: ignore[attr-defined]
    if torch.cuda.is_available() and torch.version.hip is None:
        # Adapters are cast by a dozen tiny kernels a layer: side by side in few, since short chats wait for the host
        # (H200, 8 layers of 8B shapes: 685 kernels a step for 789, 28 ms for 37; measured there only).
        settings.append(inductor.patch({"combo_kernels": True}))
    # The backward graph at once too: what it fails at must show here, where the layer can still run eagerly.
    early = "force_non_lazy_backward_lowering"
    settings += [functorch.patch({early: True})] if hasattr(functorch, early) else []
    return [*settings, _Silenced(logging.getLogger("torch._higher_order_ops.wrap"))]


class _Silenced(contextlib.AbstractContextManager[None]):
    """Keeps a logger quiet: torch warns of each tagged checkpoint that it must change nothing in place; none does."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self.before = False

    def __enter__(self) -> None:
        self.before, self.logger.disabled = self.logger.disabled, True

    def __exit__(self, *_: object) -> None:
        self.logger.disabled = self.before


def _failures() -> tuple[type[BaseException], ...]:
    """What a failed compile raises; an error of the layer itself, out of memory first of all, is none."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def _name_in(model: torch.nn.Module, layer: torch.nn.Module) -> str:
    return next(name for name, module in base_of(model).named_modules() if module is layer)


def _say_nothing(sentence: str) -> None:
    del sentence
