"""How a command ends: one clear message on stderr, and 0 for done, 1 for failed work, 2 for a wrong request."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Generator
from pathlib import Path

import typer

from surefoot.errors import UserError, WorkError
from surefoot.files import write_text

SYSTEM_REFUSALS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
"""What the operating system refuses because of the request, not because of a mistake of ours."""

INTERRUPTED = 130
"""What a shell reports for a program that Ctrl-C ended."""


class CrashPlace:
    """Where the traceback of an unforeseen failure goes.

    Attributes:
        path: the file; None until the command knows its run directory.
    """

    path: Path | None = None


@contextlib.contextmanager
def exit_codes(*, debug: bool) -> Generator[CrashPlace]:
    """Turn what a command raises into a message and an exit code.

    Args:
        debug: show tracebacks instead of writing them to a file.

    Yields:
        Where to put a traceback; the command fills it in once it knows a better place than the temporary folder.

    Raises:
        typer.Exit: with 1, 2 or 130 if the command failed.
    """
    place = CrashPlace()
    try:
        with warnings.catch_warnings():
            if not debug:
                # They tell the authors of libraries what to change; a person who trains can do nothing about them.
                warnings.simplefilter("ignore", FutureWarning)
            yield place
    except (UserError, WorkError) as error:
        if debug:
            traceback.print_exc()
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of a pipe went away (`surefoot env | head`): nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except typer.Exit:
        raise
    # The last line of defence: whatever nobody foresaw becomes one line and a file, not a screen of frames.
    except Exception as error:  # noqa: BLE001
        if isinstance(error, OSError) and error.errno in SYSTEM_REFUSALS and not debug:
            print(f"error: {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
            print("  -> check the name, your permissions there and the space on that disk", file=sys.stderr)
            raise typer.Exit(UserError.exit_code) from None
        where = "below" if debug else f"in {_keep_traceback(place.path)}"
        print(f"error: unexpected {type(error).__name__}: {_first_line(error)} (traceback {where})", file=sys.stderr)
        if debug:
            traceback.print_exc()
        raise typer.Exit(1) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _keep_traceback(path: Path | None) -> Path:
    text = traceback.format_exc()
    if path is not None:
        with contextlib.suppress(UserError, OSError):  # a full disk may be what went wrong: try the temporary folder
            write_text(path, text)
            return path
    with tempfile.NamedTemporaryFile("w", prefix="surefoot-", suffix=".txt", delete=False, encoding="utf-8") as handle:
        handle.write(text)
    return Path(handle.name)
