"""From a YAML to a model on its device, ready to train or to talk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from surefoot.errors import UserError
from surefoot.model.adapters import load_adapters, prepare_trainables
from surefoot.model.attention import use_packed_attention
from surefoot.model.precision import DTYPES, Precision, choose_precision
from surefoot.model.quantized import (
    bitsandbytes_config,
    describe,
    hold_as_bytes,
    parameter_count,
    quantized_bits,
    quantized_method,
)
from surefoot.model.source import checkpoint_dtype, hub_arguments, model_config, model_path, weight_files
from surefoot.model.vocabulary import resize_vocabulary, scale_rope

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from surefoot.config import Config


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for the training loop.

    Attributes:
        model: the transformers model, wrapped by PEFT for LoRA.
        precision: the number formats that it is held and computed in.
        own_attention: the model's own attention implementation, by transformers' name.
        notes: sentences for the person on what was decided.
    """

    model: Any
    precision: Precision
    own_attention: str
    notes: tuple[str, ...]

    @property
    def parameters(self) -> tuple[int, int]:
        """Trainable and total numbers of parameters."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return trained, parameter_count(self.model)


def load_model(cfg: Config, tokenizer: PreTrainedTokenizerBase, device: str, *, on_host: bool = False) -> LoadedModel:
    """Load the model of a training run.

    Args:
        cfg: the YAML.
        tokenizer: its tokenizer, with all added tokens.
        device: where the model shall live, as torch names it.
        on_host: leave it in the host's memory, to be cut before it goes to the device. A base that is packed in 4 or
            8 bits is on the device all the same, where it was packed.

    Returns:
        The model on its device, with trainable parameters marked.

    Raises:
        UserError: the files are missing, unsafe, cut short, of another kind of model, or do not fit the YAML.
    """
    from transformers import set_seed

    set_seed(cfg.seed)
    config = model_config(cfg)
    checkpoint = DTYPES.get(checkpoint_dtype(config, cfg), torch.float32)
    precision = choose_precision(cfg, checkpoint)
    notes = [f"Precision: {precision}."]
    if device == "cpu" and precision.autocast == torch.float16:
        notes.append("float16 products are slow on a CPU; `bf16: true` or `compute_dtype: float32` is faster there.")
    rope = scale_rope(config, cfg.rope_scaling, cfg.cutoff_len, training=True)
    if rope:
        notes.append(rope)
    notes += quantized_notes(cfg, config)
    compute = precision.autocast or precision.load or checkpoint
    model: Any = read_weights(cfg, config, precision.load, bitsandbytes_config(cfg, config, compute, device), device)
    quantized = describe(model)
    if quantized:
        notes.append(quantized)
    resized = resize_vocabulary(model, tokenizer, cfg)
    if resized:
        notes.append(f"The vocabulary grew to {model.get_input_embeddings().weight.shape[0]} rows.")
    wrapped = prepare_trainables(model, cfg, precision.trainable, resized)
    if cfg.upcast_layernorm:
        upcast_norms(wrapped)
    if precision.autocast is not None:
        store_frozen_linears(wrapped, precision.autocast)
    if cfg.finetuning_type == "lora":
        from surefoot.model.lora import fuse_lora  # imports PEFT, which takes seconds

        fuse_lora(wrapped)
    if quantized:
        from surefoot.model.lora_quantized import fuse_quantized  # imports bitsandbytes

        fuse_quantized(wrapped)
    own_attention = use_packed_attention(model)
    model.config.use_cache = False
    return LoadedModel(
        wrapped if on_host and not quantized else wrapped.to(device), precision, own_attention, tuple(notes)
    )


def load_for_inference(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, device: str, dtype: str = "auto", *, original: bool = False
) -> Any:
    """Load the base model, with the YAML's adapters if it names any, for generation or export.

    Args:
        cfg: the YAML.
        tokenizer: its tokenizer, with all added tokens: an adapter may have been trained with a larger vocabulary.
        device: where the model shall live, as torch names it.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
        original: load the weights as the files hold them, whatever `quantization_bit` says.

    Returns:
        The model in evaluation mode; wrapped by PEFT when there is an adapter.

    Raises:
        UserError: as `load_model`.
    """
    config = model_config(cfg)
    scale_rope(config, cfg.rope_scaling, cfg.cutoff_len, training=False)
    compute = DTYPES.get(dtype) or DTYPES.get(checkpoint_dtype(config, cfg), torch.float32)
    quantization = None if original else bitsandbytes_config(cfg, config, compute, device)
    model: Any = read_weights(cfg, config, DTYPES.get(dtype), quantization, device)
    resize_vocabulary(model, tokenizer, cfg)
    if cfg.adapter_name_or_path:
        model = load_adapters(model, list(cfg.adapter_name_or_path), cfg, trainable=False)
    if getattr(model, "is_loaded_in_8bit", False) or (device == "cpu" and getattr(model, "is_loaded_in_4bit", False)):
        from surefoot.model.lora_quantized import fuse_quantized

        # As trained. bitsandbytes' own 8-bit product rounds the inputs too; its 4-bit one on a CPU computes in
        # bfloat16, and fails for widths that are no multiple of 64. On a GPU that one is exact, and fast for one token.
        fuse_quantized(model)
    return model.to(device).eval()


def quantized_notes(cfg: Config, config: PretrainedConfig) -> list[str]:
    """Say where the YAML's quantisation and the checkpoint's differ, and refuse to train what is packed.

    Args:
        cfg: the YAML.
        config: the model's configuration, before any quantisation.

    Returns:
        Sentences for the person.

    Raises:
        UserError: the checkpoint is quantised, and the YAML trains more than an adapter.
    """
    stored = quantized_bits(config)
    if stored is None:
        return []
    if cfg.finetuning_type != "lora":
        raise UserError(
            f"{cfg.model_name_or_path} is quantised to {stored} bits, and packed weights cannot be trained",
            hint="set `finetuning_type: lora`, or name the model's 16 bit weights",
            key="finetuning_type",
        )
    if cfg.quantization_bit in (None, stored):
        return []
    return [f"quantization_bit: {cfg.quantization_bit} has no effect: the checkpoint is quantised to {stored} bits."]


def read_weights(
    cfg: Config,
    config: PretrainedConfig,
    dtype: torch.dtype | None,
    quantization: BitsAndBytesConfig | None = None,
    device: str = "cpu",
) -> PreTrainedModel:
    """Read a causal language model's weights from safetensors, every one of them.

    Args:
        cfg: the YAML, for the place and hub access.
        config: the model's configuration, with any changes.
        dtype: to hold the weights in; None for the checkpoint's own.
        quantization: how to quantise them; None for not at all.
        device: where packed weights shall live: they are packed there, file by file.

    Returns:
        The model, on the CPU; on the device when it is quantised.

    Raises:
        UserError: not a decoder-only model, no safetensors, or tensors that are missing or of another shape.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    path = model_path(cfg)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{path} is an encoder-decoder model",
            hint="Surefoot trains decoder-only models",
            key="model_name_or_path",
        )
    if cfg.train_from_scratch:
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype or config.dtype or torch.float32, trust_remote_code=cfg.trust_remote_code
        )
    weight_files(path)
    logging.disable_progress_bar()
    packed = quantization is not None or quantized_method(config) == "bitsandbytes"
    more: dict[str, Any] = {"quantization_config": quantization} if quantization else {}
    more |= {"device_map": {"": device}} if packed else {}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True,
            attn_implementation="eager" if cfg.flash_attn == "disabled" else None, **more, **hub_arguments(cfg),
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:  # as transformers reports bad files
        raise UserError(
            f"{path} cannot be loaded as a causal language model: {str(error).strip().splitlines()[0]}",
            hint="is it a whole decoder-only model with safetensors weights?",
            key="model_name_or_path",
        ) from error
    lost = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info.get("mismatched_keys", ()))
    if lost:
        raise UserError(
            f"{path} lacks {len(lost)} of the model's tensors, as {lost[0]}; they would have been random",
            hint="the weights belong to another model, or the download is not whole",
            key="model_name_or_path",
        )
    if packed:
        hold_as_bytes(model)
    return model


def upcast_norms(model: torch.nn.Module) -> None:
    """Hold the weights of norms in float32: one-dimensional parameters whose name speaks of a norm."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and ("norm" in name or "ln" in name):
            parameter.data = parameter.data.float()


def store_frozen_linears(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Hold frozen linear weights in the dtype that autocast would cast them to at every use: same numbers, once.

    Weights shared with an embedding stay, since a lookup is not autocast.

    Args:
        model: the model, adapters included; changed in place.
        dtype: of matrix products under autocast.
    """
    shared = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for module in model.modules():
        if type(module) is not torch.nn.Linear or id(module.weight) in shared or module.weight.requires_grad:
            continue
        module.weight.data = module.weight.data.to(dtype)
        if module.bias is not None and not module.bias.requires_grad:
            module.bias.data = module.bias.data.to(dtype)
