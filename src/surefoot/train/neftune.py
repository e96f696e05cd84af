"""NEFTune: noise on the embeddings while training (Jain et al., 2023, arXiv 2310.05914)."""

from __future__ import annotations

from typing import Any

import torch

from surefoot.data.batch import PackedBatch


class Neftune:
    """Adds uniform noise of ±alpha / sqrt(row length · width) to each row's embeddings.

    Args:
        embeddings: the model's input embeddings.
        alpha: the YAML's `neftune_noise_alpha`.
    """

    def __init__(self, embeddings: torch.nn.Module, alpha: float) -> None:
        self.alpha = alpha
        self.lengths_1T1: torch.Tensor | None = None
        embeddings.register_forward_hook(self._add_noise)

    def before_pass(self, batch: PackedBatch) -> None:
        """Learn how long each packed token's row is: a row packed with others gets the noise it would get alone."""
        lengths = torch.tensor(batch.layout.lengths, device=batch.input_ids_1T.device)
        self.lengths_1T1 = torch.repeat_interleave(lengths, lengths).view(1, -1, 1)

    def _add_noise(self, module: torch.nn.Module, inputs: Any, output_1TM: torch.Tensor) -> torch.Tensor:
        if not module.training or self.lengths_1T1 is None:
            return output_1TM
        size_1T1 = self.alpha / (self.lengths_1T1 * output_1TM.shape[-1]).sqrt()
        noise = torch.empty_like(output_1TM).uniform_(-1.0, 1.0)
        return output_1TM + noise * size_1T1.to(output_1TM.dtype)
