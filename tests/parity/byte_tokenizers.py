"""The tokenizers that the vectors were made with: every byte is a token, and so is every special string."""

from __future__ import annotations

from typing import Any

SPECIALS: dict[str, dict[str, str]] = {
    "plain": {"<s>": "bos_token", "</s>": "eos_token", "<unk>": "unk_token"},
    "qwen": {"<|endoftext|>": "eos_token pad_token", "<|im_start|>": "", "<|im_end|>": ""},
    "llama3": {
        "<|begin_of_text|>": "bos_token",
        "<|end_of_text|>": "eos_token",
        "<|start_header_id|>": "",
        "<|end_header_id|>": "",
        "<|eot_id|>": "",
        "<|eom_id|>": "",
    },
    "phi": {
        "<s>": "bos_token",
        "</s>": "",
        "<|user|>": "",
        "<|assistant|>": "",
        "<|end|>": "",
        "<|system|>": "",
        "<|endoftext|>": "eos_token",
    },
}
"""For each tokenizer its special strings and which of the tokenizer's own tokens each is."""


def byte_level_tokenizer(name: str) -> Any:
    """A fresh tokenizer, since templates change its eos, pad and special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert name in SPECIALS, f"the vectors name a tokenizer {name!r} whose special strings are not known here"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS[name]])
    own = {role: text for text, roles in SPECIALS[name].items() for role in roles.split()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **own)
