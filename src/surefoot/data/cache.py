"""Where encoded rows are kept between runs, and the fingerprints under which they are found again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Generator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import UserError
from surefoot.files import whole_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefoot.data.template import Template

ABANDONED = 24 * 3600.0
"""Seconds after which a half-written folder is taken for abandoned."""


def cache_folder() -> Path:
    """The folder for encoded rows: `$SUREFOOT_CACHE/data`, else `surefoot/data` in the user's cache folder."""
    if own := os.environ.get("SUREFOOT_CACHE"):
        return Path(own).expanduser() / "data"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "surefoot" / "data"


@contextlib.contextmanager
def cache_entry(key: str) -> Generator[Path]:
    """Fill a folder of the cache, which appears whole or not at all.

    Args:
        key: the entry's fingerprint.

    Yields:
        A temporary folder to write into.

    Raises:
        UserError: the cache cannot be written.
    """
    folder = cache_folder() / key
    sweep(folder.parent)
    try:
        with whole_folder(folder) as temporary:
            yield temporary
    except UserError as error:
        if key not in str(error):  # not about this folder, nor about its temporary neighbour
            raise
        raise UserError(
            f"the cache of encoded rows cannot be written: {error.problems[0].message}",
            hint="set the environment variable SUREFOOT_CACHE to a folder with space that you may write to",
        ) from error


def sweep(folder: Path) -> None:
    """Remove what processes that were killed long ago left half written in the cache."""
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_dir() and time.time() - leftover.stat().st_mtime > ABANDONED:
            shutil.rmtree(leftover, ignore_errors=True)


def fingerprint(*parts: Any) -> str:
    """Hash anything whose `repr` tells all of it.

    Args:
        *parts: texts, numbers, tuples, dataclasses of such.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        written = repr(part).encode("utf-8", "surrogatepass")
        digest.update(len(written).to_bytes(8, "little"))
        digest.update(written)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash all of a tokenizer that decides token ids.

    Args:
        tokenizer: any transformers tokenizer.

    Returns:
        32 hexadecimal digits; the same for the same tokenizer loaded from elsewhere.
    """
    special = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        getattr(tokenizer, "add_bos_token", False),
        getattr(tokenizer, "split_special_tokens", False),
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        added = sorted((number, str(token)) for number, token in tokenizer.added_tokens_decoder.items())
        return fingerprint(type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), added, special)
    written = json.loads(backend.to_str())
    for passing in ("truncation", "padding"):  # left behind by whoever called the tokenizer last
        written.pop(passing, None)
    return fingerprint(json.dumps(written, sort_keys=True), special)


def template_fingerprint(template: Template) -> str:
    """Hash all of a template; its tool format, which holds functions, by name."""
    parts = {field.name: getattr(template, field.name) for field in fields(template)}
    return fingerprint({**parts, "tool_format": template.tool_format.name})
