"""From a packed batch to its summed loss, whatever the model's head does to its logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.data.batch import PackedBatch
from surefoot.model.loss import LogitShape, LossSums, linear_cross_entropy, logits_cross_entropy


@dataclass
class LossForward:
    """How one model turns a packed batch into a loss.

    Attributes:
        model: the transformers model without PEFT's wrapper; adapters sit inside it.
        autocast: dtype of matrix products, or None.
        shape: what the model does to its logits after the head.
        chunked: True when the head is a plain linear that `linear_cross_entropy` can stand for; False lets the
            model make the logits of the trained tokens itself.
        packs: True when the model's attention takes the packed layout; False runs one row a pass, by the model's
            own attention.
        upcast: make the logits in float32.
        label_smoothing: share of the target spread over the vocabulary; training only.
        round_to: passes are filled up to a multiple of this many tokens, where layers are compiled.
        within: runs a forward pass where weights are gathered for it; None where they are all there.
    """

    model: Any
    autocast: torch.dtype | None
    shape: LogitShape
    chunked: bool
    packs: bool = True
    upcast: bool = False
    label_smoothing: float = 0.0
    round_to: int = 1
    within: Callable[[Callable[[], Any]], Any] | None = None

    def __call__(self, batch: PackedBatch) -> LossSums:
        """Run the model forward on a packed batch.

        Args:
            batch: on the model's device, with at least one trained token.

        Returns:
            The loss summed over the trained tokens, with its graph, the count of correct predictions, and the loss by
            chance.
        """
        if self.within is None:
            return self._sums(batch)

        def work() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            sums = self._sums(batch)
            return sums.loss, sums.correct, sums.chance

        return LossSums(*self.within(work))

    def _sums(self, batch: PackedBatch) -> LossSums:
        smoothing = self.label_smoothing if self.model.training else 0.0
        with self.precision(batch.input_ids_1T.device.type):
            if not self.chunked:
                return logits_cross_entropy(self.logits(batch), batch.targets_K, smoothing)
            hidden_KM = self.hidden(batch).index_select(0, batch.trained_K)
            head = trained_head(self.model)
            if self.autocast is not None and not self.upcast:
                hidden_KM = hidden_KM.to(self.autocast)
        return linear_cross_entropy(
            hidden_KM, head.weight, head.bias, batch.targets_K,
            shape=self.shape, label_smoothing=smoothing, upcast=self.upcast,
        )  # fmt: skip

    def run(self, work: Callable[[], Any]) -> Any:
        """Run the model in a way of the caller's own, with its weights there.

        Args:
            work: what runs it; returns a plain tuple where it returns several tensors.

        Returns:
            What it returned.
        """
        return work() if self.within is None else self.within(work)

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Return the final hidden states of a packed batch, [tokens, width]."""
        decoder = self.model.get_decoder()
        return decoder(**self._inputs(batch)).last_hidden_state[0]

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """Return the model's own logits of a packed batch's trained tokens, [trained tokens, vocabulary]."""
        return self.model(**self._inputs(batch), logits_to_keep=batch.trained_K).logits[0]

    def precision(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of a forward pass."""
        if self.autocast is None:
            return contextlib.nullcontext()
        # Without the weight cache: frozen weights are stored cast already, and a cached copy of a trainable one
        # would outlive its update.
        return torch.autocast(device_type, dtype=self.autocast, cache_enabled=False)

    def _inputs(self, batch: PackedBatch) -> dict[str, Any]:
        inputs = {"input_ids": batch.input_ids_1T, "position_ids": batch.position_ids_1T, "use_cache": False}
        return inputs | {"packed_layout": batch.layout} if self.packs else inputs


def base_of(model: Any) -> Any:
    """Return the transformers model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def trained_head(model: Any) -> Any:
    """Return the linear module that makes the logits, looking through PEFT's `modules_to_save` wrapper."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return (
        copies[head.active_adapter if isinstance(head.active_adapter, str) else head.active_adapters[0]]
        if copies
        else head
    )


def logit_shape(config: Any) -> LogitShape:
    """Read what a model does to its logits from its configuration.

    Args:
        config: of the text model.

    Returns:
        The scale and the soft cap; `check_head` proves them on the model itself.
    """
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite
        scale = 1.0 / float(config.logits_scaling)
    elif getattr(config, "logit_scale", None):  # Cohere
        scale = float(config.logit_scale)
    return LogitShape(scale, getattr(config, "final_logit_softcapping", None))
