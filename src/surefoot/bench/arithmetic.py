"""The operations that a training step must do, counted from the model's matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.data.batch import attention_spans, count_trained
from surefoot.data.messages import Sample
from surefoot.model.forward import LossForward, trained_head
from surefoot.model.shapes import read_shapes
from surefoot.model.structure import decoder_layers

# Where in a decoder layer a matrix is used, by parts of its name; what is not named here comes last.
STAGES = (
    ("q_proj", "k_proj", "v_proj", "qkv", "query_key_value", "c_attn"),
    ("o_proj", "out_proj", "attn.c_proj", "attention.dense"),
    ("gate", "up_proj", "c_fc", "dense_h_to_4h"),
)


@dataclass(frozen=True)
class Arithmetic:
    """Floating-point operations; a multiplication with its addition is two.

    Attributes:
        frozen: of products with frozen matrices of the decoder layers.
        trained: of products with trained ones, adapters first of all.
        attention: of scores and of weighted sums of values.
        head: of the products that make logits.
    """

    frozen: float
    trained: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.frozen + self.trained + self.attention + self.head

    def __add__(self, other: Arithmetic) -> Arithmetic:
        """Add another step's."""
        return Arithmetic(
            self.frozen + other.frozen, self.trained + other.trained, self.attention + other.attention,
            self.head + other.head,
        )  # fmt: skip

    def least_seconds(self, tflops: float, frozen_tflops: float) -> float:
        """Compute how long they take if everything else took no time.

        Args:
            tflops: rate of products in the computation's dtype, in 10¹² a second.
            frozen_tflops: rate of products with frozen matrices, which may be held in another dtype.

        Returns:
            Seconds.
        """
        return self.frozen / (frozen_tflops * 1e12) + (self.total - self.frozen) / (tflops * 1e12)


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of a decoder layer.

    Attributes:
        name: of its parameter, in the layer.
        inputs: its width.
        outputs: its height.
        used: numbers in it that one token is multiplied by; of experts, those that it is sent to.
        trained: whether it is trained.
    """

    name: str
    inputs: int
    outputs: int
    used: float
    trained: bool

    @property
    def short_name(self) -> str:
        """Its module's name, as "q_proj"."""
        return self.name.removesuffix(".weight").removesuffix(".base_layer").rpartition(".")[2]


def count_step(forward: LossForward, samples: Sequence[Sample]) -> Arithmetic:
    """Count the operations of one optimizer step.

    For each number of a matrix and each token 2 in the forward pass, 2 for the gradient of its input where something
    below it is trained, 2 more for its own gradient where it is trained. Attention, for a row of L tokens, H heads of
    width D: 4 · L · L · H · D forward, half of it under the causal mask, and twice as much backward. The head only over
    the tokens that carry loss. What recompute does a second time is no part of it, nor are norms and activations: a
    share of the ceiling is then what others call model FLOPs utilisation (arXiv 2204.02311, appendix B).

    Args:
        forward: how the model computes its loss.
        samples: of the step.

    Returns:
        The operations.
    """
    base = forward.model
    layers = decoder_layers(base)
    tokens = sum(len(sample.input_ids) for sample in samples)
    all_below = any(p.requires_grad for p in base.get_input_embeddings().parameters())
    trains = [any(p.requires_grad for p in layer.parameters()) for layer in layers]
    first = trains.index(True) if True in trains else len(layers)
    sums = {False: 0.0, True: 0.0}
    attention = 0.0
    queries = read_shapes(base.config.to_dict()).queries
    for place, layer in enumerate(layers):
        if all_below or place > first:
            lowest = -1
        else:
            lowest = lowest_trained_stage(layer) if place == first else len(STAGES) + 1
        for matrix in matrices_of(layer, base.config):
            input_gradient = "lora_B" in matrix.name or lowest < stage_of(matrix.name)
            parts = 1 + input_gradient + matrix.trained
            sums[matrix.trained] += 2.0 * matrix.used * tokens * parts
        pairs = causal_pairs(samples, window_of(base.config, place))
        attention += 4.0 * pairs * queries * (3 if lowest < 1 else 1)
    head = trained_head(base).weight
    below = all_below or first < len(layers)
    products = 2.0 * head.numel() * count_trained(samples) * (1 + below + head.requires_grad)
    return Arithmetic(sums[False], sums[True], attention, products)


def matrices_of(layer: torch.nn.Module, config: Any) -> Iterator[Matrix]:
    """List a decoder layer's matrices.

    Args:
        layer: with adapters, if it has any.
        config: the model's, for the experts that a token is sent to.

    Yields:
        Each matrix that tokens are multiplied by.
    """
    modules = dict(layer.named_modules())
    text = config.get_text_config()
    for name, parameter in layer.named_parameters():
        if parameter.ndim < 2 or "original_module" in name:  # PEFT keeps what a trained copy stands for
            continue
        owner: Any = modules[name.rpartition(".")[0]]
        if parameter.ndim == 3:
            count, outputs, inputs = parameter.shape
            used = inputs * outputs * int(getattr(text, "num_experts_per_tok", None) or count)
        else:
            # Packed weights do not have the shape of what they stand for.
            outputs = int(getattr(owner, "out_features", parameter.shape[0]))
            inputs = int(getattr(owner, "in_features", parameter.shape[1]))
            used = inputs * outputs
        yield Matrix(name, inputs, outputs, float(used), parameter.requires_grad)


def stage_of(name: str) -> int:
    """Tell where in its layer a parameter is used; a norm comes before everything."""
    if "norm" in name or "ln_" in name:
        return -1
    return next((stage for stage, parts in enumerate(STAGES) if any(part in name for part in parts)), len(STAGES))


def lowest_trained_stage(layer: torch.nn.Module) -> int:
    """Return the first place in a layer where something is trained."""
    return min(stage_of(name) for name, p in layer.named_parameters() if p.requires_grad)


def causal_pairs(samples: Sequence[Sample], window: int | None) -> float:
    """Count pairs of tokens that see each other: half of all, and none further apart than the window.

    Args:
        samples: of the step.
        window: tokens that one sees at most; None for all before it.

    Returns:
        The pairs, L · L / 2 for a row of L tokens.
    """
    pairs = 0.0
    for span in (span for sample in samples for span in attention_spans(sample)):
        seen = min(span, window or span)
        pairs += span * seen - seen * seen / 2
    return pairs


def window_of(config: Any, place: int) -> int | None:
    """Read how far a decoder layer sees; None without a window."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not window or getattr(text, "use_sliding_window", True) is False:
        return None
    return window if kinds is None or kinds[place] == "sliding_attention" else None
