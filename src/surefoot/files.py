"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefoot.errors import UserError


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole: into a temporary neighbour, flushed to disk, then renamed over `path`.

    Args:
        path: where the file shall stand; its folder is made if it is missing.
        content: every byte of it.

    Raises:
        UserError: the folder cannot be written to, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def write_text(path: Path, content: str) -> None:
    """Write a UTF-8 text file whole; see `write_bytes`."""
    write_bytes(path, content.encode("utf-8"))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole; numbers that are not finite are refused, since JSON has no word for them."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that appears under its name only once everything in it is on disk.

    Args:
        path: the final name; a folder that stands there is replaced.

    Yields:
        A temporary folder beside it to write into. It is removed if the block raises.

    Raises:
        UserError: the place cannot be written to, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_disk_errors(path):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
            sync_folder(temporary)
            replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
            if path.exists():
                path.rename(replaced)
            temporary.rename(path)
            shutil.rmtree(replaced, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(path.parent)


@contextlib.contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """Write several files into a folder that already stands; each appears whole, none before all are on disk.

    Args:
        folder: where the files shall stand; made if it is missing.

    Yields:
        A temporary folder inside it to write into, flat. It is removed if the block raises.

    Raises:
        UserError: the place cannot be written to, or the disk is full.
    """
    temporary = folder / f".writing.{os.getpid()}.tmp"
    with explain_disk_errors(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            files = sorted(temporary.iterdir())
            for file in files:
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            for file in files:
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(folder)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut (POSIX; a no-op on Windows)."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals about `path` into errors that say what to do.

    Args:
        path: what is being written.

    Yields:
        Nothing.

    Raises:
        UserError: no permission, a read-only file system, no space, or a file where a folder must be.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk is full: {path} could not be written", hint="free some space, or name another output_dir") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"no permission to write {path}", hint="name a folder that you may write to") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise UserError(f"{path} cannot be made: a file stands where a folder must be", hint="name another folder") from error
        raise
