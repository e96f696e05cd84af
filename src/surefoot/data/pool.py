"""Rows spread over processes, their results in the rows' order.

Processes are spawned, not forked: a fork of a process that holds threads or a GPU may hang. A process takes about a
second to start, so few rows are encoded right here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from surefoot.errors import WorkError

if TYPE_CHECKING:
    from surefoot.data.rows import Block, RowEncoder

CHUNK = 1000  # rows that a process takes at a time
WORTH_A_POOL = 5  # chunks: fewer are done before a second process has started
MOST_WORKERS = 60  # Windows cannot wait for more

Chunk = tuple[list[int], list[Any], float | None]
"""Positions of rows, the rows, and the share of the source that has been read with them."""


@dataclass(frozen=True)
class LightTokenizer:
    """The part of a fast tokenizer that encoding needs; a process loads it without importing transformers.

    Attributes:
        backend_tokenizer: the `tokenizers.Tokenizer`.
        bos_token: text or None.
        eos_token: text or None.
        bos_token_id: id or None.
        eos_token_id: id or None.
        unk_token_id: id or None.
        add_bos_token: True when the tokenizer begins a text with bos.
        split_special_tokens: True when special tokens' texts inside rows are plain text.
        is_fast: always True.
    """

    backend_tokenizer: Any
    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    add_bos_token: bool
    split_special_tokens: bool
    is_fast: bool = True

    @classmethod
    def of(cls, tokenizer: Any) -> Any:
        """Take the part out of a tokenizer; one that is not fast, or that is set to cut or pad, comes back as it is."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not getattr(tokenizer, "is_fast", False):
            return tokenizer
        if backend.truncation is not None or backend.padding is not None:
            return tokenizer
        return cls(
            backend,
            tokenizer.bos_token,
            tokenizer.eos_token,
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.unk_token_id,
            bool(getattr(tokenizer, "add_bos_token", False)),
            bool(getattr(tokenizer, "split_special_tokens", False)),
        )

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of one token, as transformers finds it."""
        found = self.backend_tokenizer.token_to_id(token)
        return self.unk_token_id if found is None else found


def count_workers(wanted: int | None) -> int:
    """Choose how many processes to use at most: what the YAML wants, but no more than there are processors."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(wanted or usable, usable, MOST_WORKERS))


def encode_in_order(chunks: Iterator[Chunk], encoder: RowEncoder, workers: int) -> Iterator[tuple[Block, float | None]]:
    """Encode chunks of rows, in several processes when there are enough of them.

    Args:
        chunks: the rows.
        encoder: what to do with them.
        workers: most processes.

    Yields:
        Each chunk's result and its share of the source, in the order of the chunks.

    Raises:
        WorkError: a process died.
    """
    first = list(islice(chunks, WORTH_A_POOL))
    if workers == 1 or len(first) < WORTH_A_POOL:
        for numbers, rows, share in chain(first, chunks):
            yield encoder.encode(numbers, rows), share
        return
    light = replace(encoder, tokenizer=LightTokenizer.of(encoder.tokenizer))
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(light,)
    )
    waiting: deque[tuple[Future[Block], float | None]] = deque()
    try:
        for numbers, rows, share in chain(first, chunks):
            waiting.append((pool.submit(_encode, numbers, rows), share))
            if len(waiting) > 2 * workers:  # bounds the rows in memory
                yield _take(waiting)
        while waiting:
            yield _take(waiting)
    except BrokenProcessPool:
        raise WorkError(
            "a preprocessing process died without a word; often the machine ran out of memory",
            hint="set preprocessing_num_workers: 1; a script that calls Surefoot must do so under"
            ' `if __name__ == "__main__":`',
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _take(waiting: deque[tuple[Future[Block], float | None]]) -> tuple[Block, float | None]:
    future, share = waiting.popleft()
    return future.result(), share


# Filled in a worker process alone: tasks of a pool have no other way to share what the process was started with.
_worker_encoder: list[RowEncoder] = []


def _start_worker(encoder: RowEncoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker_encoder[:] = [encoder]


def _die_with_parent() -> None:
    """A killed parent cannot end its workers, and they would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(numbers: list[int], rows: list[Any]) -> Block:
    return _worker_encoder[0].encode(numbers, rows)
