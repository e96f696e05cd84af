"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Generator
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
def whole_folder(path: Path) -> Generator[Path]:
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
                    _settle(file, temporary)
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
def whole_files(folder: Path) -> Generator[Path]:
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
                _settle(file, temporary)
            for file in files:
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(folder)


@contextlib.contextmanager
def only_writer(folder: Path) -> Generator[None]:
    """Hold a folder so that no second process writes into it; the system lets go of it when the process ends.

    Args:
        folder: made if it is missing, and removed again if nothing was put into it.

    Yields:
        Nothing.

    Raises:
        UserError: another process holds it, or it cannot be made.
    """
    with explain_disk_errors(folder):
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder):
            yield
    finally:
        for place in made:
            with contextlib.suppress(OSError):  # it is in use: that is what it was made for
                place.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Lock the folder itself, so that no lock file stays behind (POSIX; elsewhere nothing is locked)."""
    if os.name != "posix":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait until it ends, stop it, or name another output_dir"
            raise UserError(f"another run is writing into {folder}", hint=hint, key="output_dir") from None
        except OSError as error:
            # Some network file systems have no locks: the run is no less right for that.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
        yield
    finally:
        os.close(handle)


def _settle(file: Path, folder: Path) -> None:
    """Give a file the mode that its folder's makes usual (safetensors leaves 0600) and flush it to disk."""
    file.chmod(folder.stat().st_mode & 0o666)
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


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
def explain_disk_errors(path: Path) -> Generator[None]:
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
    except UserError:
        raise
    # Libraries written in Rust (safetensors, tokenizers) report a full disk with exceptions of their own.
    except Exception as error:
        explained = _explain(error, path)
        if explained is None:
            raise
        raise explained from error


def _explain(error: Exception, path: Path) -> UserError | None:
    in_words = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(in_words.group(1)) if in_words else None
    elsewhere = "name a folder that you may write to"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"the disk is full: {path} could not be written", hint="free some space, or name another disk")
    if number == errno.EFBIG:
        return UserError(
            f"{path} is too large for a file here", hint="raise the limit (ulimit -f), or name another disk"
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(f"no permission to write {path}", hint=elsewhere)
    if number in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return UserError(f"{path} cannot be made: a file stands where a folder must be", hint="name another folder")
    if number == errno.ENAMETOOLONG:
        return UserError(f"{path}: the name is too long", hint="give it a shorter one")
    if number == errno.ENOENT and isinstance(error, OSError) and _is_about(error, path):
        return UserError(f"{path} cannot be written: {error.filename} is not there", hint=elsewhere)
    return None


def _is_about(error: OSError, path: Path) -> bool:
    """Tell whether a missing file is the place that is written to, and not one that should have been read."""
    missing = Path(str(error.filename))
    return path.is_relative_to(missing) or missing.is_relative_to(path.parent)
