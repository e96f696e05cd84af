"""Small models, tokenizers and tables that tests of every room share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefoot.data.messages import Sample

VOCABULARY = 97


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """A random Llama of two layers, width 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def byte_tokenizer(specials: Sequence[str] = ("<pad>", "<s>", "</s>")) -> Any:
    """A tokenizer in which every byte is a token, after the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="right"
    )


def save_tiny_model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a tiny Llama with a byte tokenizer as a folder that `model_name_or_path` can name."""
    tokenizer = byte_tokenizer()
    tiny_llama(seed, **({"vocab_size": len(tokenizer)} | changes)).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_sample(rng: np.random.Generator, length: int, row: int, prompt: int | None = None) -> Sample:
    """Random ids whose first `prompt` tokens (a third by default) carry no label."""
    ids = rng.integers(3, VOCABULARY, length).astype(np.int32)
    labels = ids.copy()
    labels[: length // 3 if prompt is None else prompt] = -100
    return Sample((f"rows:{row}",), ids, labels, (length,))


class MemoryTable:
    """A token table in memory."""

    def __init__(self, samples: Sequence[Sample], fingerprint: str = "test") -> None:
        self.samples = list(samples)
        self.lengths = np.array([len(s.input_ids) for s in samples], dtype=np.int64)
        self.max_token_id = int(max(s.input_ids.max() for s in samples))
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def random_table(
    count: int, seed: int = 0, shortest: int = 4, longest: int = 40, fingerprint: str = "test"
) -> MemoryTable:
    """A table of random samples of unequal lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    return MemoryTable([random_sample(rng, int(n), i) for i, n in enumerate(lengths)], fingerprint)
