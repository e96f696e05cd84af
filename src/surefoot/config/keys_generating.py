"""LLaMA-Factory's keys about generating text (10)."""

from __future__ import annotations

from surefoot.config.key import Keys, works


class GeneratingKeys(Keys):
    """How `surefoot chat` picks the next token."""

    do_sample: bool = works(True, "Draw the next token; otherwise take the likeliest.")
    temperature: float = works(0.95, "How widely to draw.", ge=0)
    top_p: float = works(0.7, "Draw among the likeliest tokens that reach this share.", gt=0, le=1)
    top_k: int = works(50, "Draw among this many tokens; 0 for all.", ge=0)
    num_beams: int = works(1, "Beams of beam search; 1 for none.", ge=1)
    max_length: int = works(1024, "Most tokens of prompt and answer, where `max_new_tokens` is not positive.", ge=1)
    max_new_tokens: int = works(1024, "Most tokens of the answer; wins over `max_length` if positive.")
    repetition_penalty: float = works(1.0, "Above 1 makes repeated tokens less likely.", gt=0)
    length_penalty: float = works(1.0, "Above 0 favours long answers in beam search.")
    skip_special_tokens: bool = works(True, "Leave special tokens out of the shown text.")
