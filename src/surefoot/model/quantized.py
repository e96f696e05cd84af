"""A frozen base in 4 or 8 bits by bitsandbytes: how it is loaded, read, checked and made anew.

bitsandbytes is optional and imported only where it is needed. Packed weights are held as bytes (uint8, int8), never
in a floating dtype as LLaMA-Factory stores them for FSDP: bytes that pose as numbers would look like NaN to every
check of finite weights, and a cast would destroy them. What is computed is the same.

Legend of tensor suffixes: O outputs, I inputs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from surefoot.errors import UserError

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PretrainedConfig

    from surefoot.config import Config

REQUIREMENT = "bitsandbytes>=0.50.2"
PACKED = ("Params4bit", "Int8Params")  # bitsandbytes' parameter classes, known by name: no import to ask
# What packed bytes pose as where torch cuts weights: 2.11 cuts floating parameters only (2.13 others too). No model's
# numbers are in this dtype, and `holds_numbers` says so to whoever looks at weights.
_POSE = torch.float8_e5m2fnuz
_STATE = "_surefoot_state"  # in the own __dict__ of a module whose packed weight is a plain tensor: what belongs to it
BLOCK, SECOND_BLOCK = 64, 256  # weights that share a scale, and scales that share a second one (bitsandbytes' own)
OTHER_METHODS = ("gptq", "awq", "aqlm", "quanto", "eetq", "hqq")
_SAMPLE = 256  # values of the trial


def quantized_bytes_per_parameter(bits: int, double: bool) -> float:
    """Compute what a quantised weight takes, with its scales.

    4 bits: half a byte, and a float32 scale for each block of 64 weights (QLoRA, arXiv 2305.14314, section 3). Double
    quantisation holds the scale in 8 bits, with a float32 scale of its own for each 256 of them. 8 bits: one byte; a
    float32 scale for each output row is left out (4 / inputs, 0.1 % at 4,096).

    Args:
        bits: 4 or 8.
        double: quantise the scales too; nothing to 8 bits.

    Returns:
        Bytes: 0.5625 or 0.5159 for 4 bits, 1 for 8.
    """
    if bits == 8:
        return 1.0
    scale = 1.0 + 4.0 / SECOND_BLOCK if double else 4.0
    return 0.5 + scale / BLOCK


def quantized_method(config: PretrainedConfig) -> str | None:
    """Name how a checkpoint's weights are quantised already, as "bitsandbytes"; None when they are not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method) or "bitsandbytes")


def quantized_bits(config: PretrainedConfig) -> int | None:
    """Return 4 or 8 for a checkpoint that bitsandbytes has quantised, else None."""
    if quantized_method(config) != "bitsandbytes":
        return None
    settings = config.quantization_config
    four = settings.get("load_in_4bit") if isinstance(settings, dict) else settings.load_in_4bit
    return 4 if four else 8


def bitsandbytes_config(
    cfg: Config, config: PretrainedConfig, compute: torch.dtype, device: str
) -> BitsAndBytesConfig | None:
    """Decide how a model is quantised while it is loaded.

    Args:
        cfg: the YAML; its `quantization_*` keys are read.
        config: the model's configuration.
        compute: dtype that the weights are expanded to.
        device: where the model shall live, as torch names it.

    Returns:
        transformers' settings; None for a model that is loaded as its files are.

    Raises:
        UserError: bitsandbytes is missing or does not work here, or the checkpoint is quantised another way.
    """
    stored = quantized_method(config)
    if stored in OTHER_METHODS:
        raise UserError(
            f"{cfg.model_name_or_path} is quantised by {stored}, which is not supported yet",
            hint="name the model's 16 bit weights, and set `quantization_bit: 4` to train over them in 4 bits",
            key="model_name_or_path",
        )
    if stored != "bitsandbytes" and cfg.quantization_bit is None:
        return None
    require_bitsandbytes(device)
    if stored is not None:
        return None
    from transformers import BitsAndBytesConfig

    if cfg.quantization_bit == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_use_double_quant=cfg.double_quantization,
        bnb_4bit_quant_type=cfg.quantization_type,
        bnb_4bit_quant_storage=torch.uint8,
    )


def require_bitsandbytes(device: str) -> None:
    """Refuse a machine where bitsandbytes is missing, or does not pack and unpack on the device.

    Args:
        device: where the model shall live, as torch names it.

    Raises:
        UserError: naming the command that installs it, or what the library says.
    """
    install = f'{sys.executable} -m pip install --no-deps "{REQUIREMENT}"'
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("4 and 8 bit weights need the package bitsandbytes", hint=install, key="quantization_bit")
    try:
        from bitsandbytes import functional

        values = torch.linspace(-1.0, 1.0, _SAMPLE, device=device).view(-1, BLOCK)
        packed, state = functional.quantize_4bit(values, compress_statistics=True, quant_type="nf4")
        error = float((functional.dequantize_4bit(packed, state) - values).abs().max())
    # Whatever a native library that does not fit this torch or this GPU raises.
    except (ImportError, OSError, RuntimeError, AttributeError) as failure:
        reason = str(failure).strip().splitlines()[:1] or [type(failure).__name__]
        raise UserError(
            f"bitsandbytes does not work on {device}: {reason[0]}",
            hint=f"`surefoot doctor` names the cause; {install} gets the newest, or leave the key out",
            key="quantization_bit",
        ) from failure
    if not error < 0.2:  # NF4's widest gap is 0.30 of a block's largest value, so 0.15 is its largest error
        raise UserError(
            f"bitsandbytes computes wrongly on {device}: values come back {error:.2g} away",
            hint=f"{install} gets the newest, or leave the key out",
            key="quantization_bit",
        )


def describe(model: Any) -> str:
    """Say what a quantised base is held in, for the person; "" when nothing is quantised."""
    packed: Any = next((module for module in model.modules() if is_quantized(module)), None)
    if packed is None:
        return ""
    version = importlib.metadata.version("bitsandbytes")
    if _in_8_bits(packed):
        return f"Base: 8 bit weights (bitsandbytes {version})."
    state = _state_of(packed)
    double = ", double quantisation" if state.nested else ""
    size = quantized_bytes_per_parameter(4, state.nested)
    return f"Base: 4 bit weights, {state.quant_type}{double} (bitsandbytes {version}), {size:.2f} bytes each."


def is_quantized(module: torch.nn.Module) -> bool:
    """Tell whether a module's own weight is packed by bitsandbytes."""
    return _STATE in vars(module) or type(module._parameters.get("weight")).__name__ in PACKED


def detach_states(model: torch.nn.Module, device: str) -> None:
    """Hold packed weights as plain parameters and their states at their modules, so that torch can cut the weights.

    Args:
        model: changed in place.
        device: where the states shall be.
    """
    packed: list[Any] = [module for module in model.modules() if is_quantized(module) and _STATE not in vars(module)]
    for module in packed:
        if _in_8_bits(module):
            state = _row_scales(module).to(device)
        else:
            state = module.weight.quant_state
            state.to(device)
        vars(module)[_STATE] = state
        plain = module.weight.data.as_subclass(torch.Tensor).view(_POSE)
        module.weight = torch.nn.Parameter(plain, requires_grad=False)


def holds_numbers(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds numbers that can be finite or not: floating ones, and no packed bytes."""
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != _POSE


class Packed(NamedTuple):
    """A packed weight as operators take it: tensors and numbers, nothing of bitsandbytes' own.

    Attributes:
        tensors: the bytes and the scales; with double quantisation what the scales are expanded from as well: their
            scales, their code, and their mean.
        kind: "nf4", "fp4" or "int8".
        blocks: how many weights share a scale, and how many scales a second one; nothing to 8 bits.
        shape: outputs and inputs.
    """

    tensors: list[torch.Tensor]
    kind: str
    blocks: list[int]
    shape: list[int]


def packed_parts(base_layer: Any) -> Packed:
    """Return what a quantised linear's weight is expanded from.

    Args:
        base_layer: bitsandbytes' Linear4bit or Linear8bitLt, its weight packed.

    Returns:
        The parts, in place, not copies.
    """
    weight, shape = base_layer.weight, [base_layer.out_features, base_layer.in_features]
    if _in_8_bits(base_layer):
        return Packed([_bytes_of(weight, torch.int8), _row_scales(base_layer)], "int8", [], shape)
    state = _state_of(base_layer)
    tensors, blocks = [_bytes_of(weight, torch.uint8), state.absmax], [state.blocksize]
    if state.nested:
        tensors += [state.state2.absmax, state.state2.code, state.offset]
        blocks += [state.state2.blocksize]
    return Packed(tensors, state.quant_type, blocks, shape)


def expand(
    tensors: Sequence[torch.Tensor], kind: str, blocks: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Expand a packed weight.

    4-bit weights are expanded into `dtype` at once, whatever dtype they were packed from, so that float32 holds what
    the scales and the code say, without a rounding to 16 bits on the way. The operators are bitsandbytes' own.

    Args:
        tensors: as in `Packed`.
        kind: as in `Packed`.
        blocks: as in `Packed`.
        shape: as in `Packed`.
        dtype: float32, bfloat16 or float16.

    Returns:
        The weight, [outputs, inputs], a tensor of its own.
    """
    weight, scales, *second = tensors
    if kind == "int8":
        return (weight * (scales.unsqueeze(1) / 127.0)).to(dtype)  # rounded once
    operators = torch.ops.bitsandbytes
    if second:
        absmax, code, mean = second
        scales = operators.dequantize_blockwise(scales, absmax, code, blocks[1], torch.float32) + mean
    return operators.dequantize_4bit(weight, scales, blocks[0], kind, shape, dtype)


def dequantized(base_layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Expand a quantised linear's weight.

    Args:
        base_layer: bitsandbytes' Linear4bit or Linear8bitLt, its weight packed.
        dtype: float32, bfloat16 or float16.

    Returns:
        The weight, [outputs, inputs], a tensor of its own.
    """
    return expand(*packed_parts(base_layer), dtype)


def state_tensors(module: Any) -> dict[str, torch.Tensor]:
    """List what a packed weight means nothing without.

    Args:
        module: a quantised linear.

    Returns:
        The tensors by the names that files have for them: "absmax", "quant_map", "nested_absmax", "nested_quant_map"
        and "nested_offset" for 4 bits, "SCB" for 8. In place, not copies.
    """
    if _in_8_bits(module):
        return {"SCB": _row_scales(module)}
    state = _state_of(module)
    found = {"absmax": state.absmax, "quant_map": state.code}
    if state.nested:
        found |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
        found["nested_offset"] = state.offset
    return found


def named_states(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the states of all packed weights of a model, each named after its weight.

    Args:
        model: the model, wrapped by PEFT or not.

    Yields:
        As "model.layers.0.mlp.up_proj.weight[absmax]", and the tensor.
    """
    for name, module in model.named_modules():
        if is_quantized(module):
            for part, tensor in state_tensors(module).items():
                yield f"{name}.weight[{part}]", tensor


def weight_of(name: str) -> str:
    """Return the weight that a name of `named_states` belongs to; any other name as it is."""
    return name.partition("[")[0]


@torch.no_grad()
def restore_quantized(module: Any, read: Callable[[str], torch.Tensor | None]) -> bool:
    """Make a packed weight and its state anew, in place, from the files that it came from.

    Args:
        module: a quantised linear.
        read: gives the tensor that files hold under the weight's name and a suffix: "" for the weight itself,
            ".absmax" and the like where the files are quantised; None when there is none.

    Returns:
        False, with nothing changed, when the files do not hold what is needed.
    """
    stored = read("")
    if stored is None:
        return False
    states = state_tensors(module)
    as_stored = read(f".{next(iter(states))}") is not None
    fresh = _as_stored(states, stored, read) if as_stored else _packed_again(module, stored)
    if fresh is None or fresh[0].numel() != module.weight.numel() or fresh[1].keys() != states.keys():
        return False
    _bytes_of(module.weight, fresh[0].dtype).copy_(fresh[0].view(module.weight.shape))
    for part, tensor in fresh[1].items():
        states[part].copy_(tensor.view(states[part].shape))
    return True


def hold_as_bytes(model: torch.nn.Module) -> None:
    """View weights that a checkpoint keeps packed in a floating dtype as the bytes that they are."""
    packed: list[Any] = [module for module in model.modules() if is_quantized(module)]
    for module in packed:
        if module.weight.is_floating_point():
            module.weight.data = module.weight.data.view(torch.uint8).view(-1, 1)
            module.weight.quant_storage = module.quant_storage = torch.uint8


def parameter_count(module: torch.nn.Module) -> int:
    """Count a model's parameters; a packed byte of a 4-bit weight holds two."""
    packed: dict[int, Any] = {id(part.weight): part for part in module.modules() if is_quantized(part)}
    in_4_bits = {key: part for key, part in packed.items() if not _in_8_bits(part)}
    return sum(
        int(_state_of(in_4_bits[id(p)]).shape.numel()) if id(p) in in_4_bits else p.numel() for p in module.parameters()
    )


def _bytes_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.data.view(dtype) if weight.dtype == _POSE else weight.data


def _in_8_bits(module: Any) -> bool:
    held = vars(module).get(_STATE)
    return type(module.weight).__name__ == "Int8Params" if held is None else isinstance(held, torch.Tensor)


def _state_of(module: Any) -> Any:
    """Return bitsandbytes' state of a 4-bit weight."""
    held = vars(module).get(_STATE)
    return module.weight.quant_state if held is None else held


def _row_scales(module: Any) -> torch.Tensor:
    """Return the largest value of each output row; bitsandbytes moves it at the first forward of its own."""
    if _STATE in vars(module):
        return vars(module)[_STATE]
    scales = module.weight.SCB
    return module.state.SCB if scales is None else scales


def _packed_again(module: Any, stored_OI: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
    """Quantise a weight as it was quantised when it was loaded: the same kernel on the same device."""
    from bitsandbytes import functional

    if getattr(module, "source_cls", torch.nn.Linear).__name__ == "Conv1D":  # GPT-2's, which lies transposed
        stored_OI = stored_OI.T
    if tuple(stored_OI.shape) != (module.out_features, module.in_features):
        return None
    device = module.weight.device
    if _in_8_bits(module):
        packed, scales, _ = functional.int8_vectorwise_quant(stored_OI.contiguous().to(device, torch.float16))
        return packed, {"SCB": scales}
    old = _state_of(module)
    packed, state = functional.quantize_4bit(
        stored_OI.to(old.dtype).contiguous().to(device),
        blocksize=old.blocksize, compress_statistics=old.nested, quant_type=old.quant_type,
    )  # fmt: skip
    found = {"absmax": state.absmax, "quant_map": state.code}
    if state.nested:
        found |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
        found["nested_offset"] = state.offset
    return packed, found


def _as_stored(
    states: dict[str, torch.Tensor], stored: torch.Tensor, read: Callable[[str], torch.Tensor | None]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
    """Read a weight and its state from files that are quantised themselves."""
    found = {}
    for part, now in states.items():
        tensor = _stored_offset(read) if part == "nested_offset" else read(f".{part}")
        if tensor is None or tensor.numel() != now.numel():
            return None
        found[part] = tensor
    return stored.contiguous().view(torch.int8 if stored.dtype == torch.int8 else torch.uint8), found


def _stored_offset(read: Callable[[str], torch.Tensor | None]) -> torch.Tensor | None:
    """Read the mean of the scales, which files keep in a JSON text beside the tensors."""
    for kind in ("nf4", "fp4"):
        text = read(f".quant_state.bitsandbytes__{kind}")
        if text is not None:
            return torch.tensor(float(json.loads(bytes(text.tolist()))["nested_offset"]))
    return None
