"""LLaMA-Factory's keys about the data (28)."""

from __future__ import annotations

from typing import Literal

from surefoot.config import reasons as why
from surefoot.config.key import ALWAYS, Keys, accepted, not_yet, works
from surefoot.config.values import Names, Numbers


class DataKeys(Keys):
    """Which rows to train on, and how they become tokens."""

    template: str | None = works(None, "Chat template; without it, the tokenizer's own is used.", purposes=ALWAYS)
    dataset: Names | None = works(None, "Data sets to train on, by their names in `dataset_info.json`.")
    eval_dataset: Names | None = works(None, "Data sets to evaluate on.")
    dataset_dir: str = works("data", "Folder with `dataset_info.json`, or ONLINE, or REMOTE:repository.")
    media_dir: str | None = accepted(None, "Folder with images, videos and audio.", why.TEXT_ONLY)
    cutoff_len: int = works(2048, "Most tokens of a sample; longer ones are cut, and counted.", ge=1)
    train_on_prompt: bool = works(False, "Train on the prompt's tokens too.")
    mask_history: bool = works(False, "Train on the last answer of a conversation only.")
    streaming: bool = works(False, "Read rows while training instead of before; needs `max_steps`.")
    buffer_size: int = works(16384, "Rows among which a stream is shuffled.", ge=1)
    mix_strategy: Literal["concat", "interleave_under", "interleave_over", "interleave_once"] = works(
        "concat", "How several data sets are joined."
    )
    interleave_probs: Numbers | None = works(None, "Share of each data set when interleaving.")
    overwrite_cache: bool = works(False, "Tokenise again although the cache fits.")
    preprocessing_batch_size: int = works(1000, "Rows that are tokenised, and packed, together.", ge=1)
    preprocessing_num_workers: int | None = works(None, "Processes that tokenise.", ge=1)
    max_samples: int | None = works(None, "Take only the first rows of each data set.", ge=1)
    eval_num_beams: int | None = accepted(None, "Beams when generating in evaluation.", why.WITH_GENERATE)
    ignore_pad_token_for_loss: bool = not_yet(True, "Leave padding out of the loss.", why.PAD_LABELS)
    val_size: int | float = works(0.0, "Rows held out for evaluation: a share below 1, or a number of rows.", ge=0)
    eval_on_each_dataset: bool = works(False, "Evaluate each data set on its own.")
    packing: bool = works(None, "Put several samples into one sequence. Default: on for `stage: pt`, off otherwise.")
    neat_packing: bool = works(False, "Pack, and keep the samples of a pack apart.")
    tool_format: str | None = works(None, "How tools and their calls are written.")
    default_system: str | None = works(None, "System prompt in place of the template's.", purposes=ALWAYS)
    enable_thinking: bool | None = works(True, "Thinking blocks of reasoning templates.", purposes=ALWAYS)
    preserve_thinking: bool = works(False, "Keep thinking in earlier answers.", purposes=ALWAYS)
    tokenized_path: str | None = works(None, "Folder to save tokenised rows to, or to load them from.")
    data_shared_file_system: bool = accepted(False, "All nodes see the same disk.", why.ONCE_A_MACHINE)
