"""The only code that touches the operating system: small readers that answer yes, no or why not."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.machine.snapshot import PARTIAL

_LIMIT = 16 * 1024


def _code(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "EIO")


@dataclass
class Probe:
    """Reads a machine below `root` into the snapshot's tree sections.

    Attributes:
        root: `/` for the live machine; tests put a made-up tree there.
        tree: the sections files, dirs, links and nodes, filled as things are looked at.
    """

    root: Path = Path("/")
    tree: dict[str, dict[str, Any]] = field(default_factory=lambda: {"files": {}, "dirs": {}, "links": {}, "nodes": {}})

    def _real(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def file(self, path: str, limit: int = _LIMIT, only: str = "") -> str:
        """Read a text file's beginning into the snapshot.

        Args:
            path: absolute path.
            limit: most bytes to read.
            only: keep only lines that contain one of these `|`-separated words.

        Returns:
            Its text; empty when it is missing or cannot be read.
        """
        try:
            with self._real(path).open("rb") as handle:
                text = handle.read(limit).decode("utf-8", "replace")
        except FileNotFoundError:
            self.tree["files"][path] = None
            return ""
        except IsADirectoryError:
            return ""
        except OSError as error:
            self.tree["files"][path] = {"error": _code(error)}
            return ""
        if only:
            words = only.split("|")
            text = "\n".join(line for line in text.splitlines() if any(w in line for w in words))
        self.tree["files"][path] = text
        return text

    def files(self, pattern: str, limit: int = _LIMIT, most: int = 200, only: str = "") -> list[str]:
        """Read every file that matches a shell pattern, at most `most`, and name them."""
        found = self.glob(pattern)[:most]
        for path in found:
            self.file(path, limit, only)
        return found

    def glob(self, pattern: str) -> list[str]:
        """Paths that match a shell pattern, sorted, without reading them."""
        prefix = str(self.root).rstrip("/")
        return sorted(str(p)[len(prefix) :] for p in self.root.glob(pattern.lstrip("/")))

    def folder(self, path: str, most: int = 400, only: str = "") -> list[str]:
        """List a folder into the snapshot; `only` keeps names that contain one of its `|`-separated words."""
        try:
            names = sorted(entry.name for entry in self._real(path).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            self.tree["dirs"][path] = None
            return []
        except OSError as error:
            self.tree["dirs"][path] = {"error": _code(error)}
            return []
        kept = [n for n in names if not only or any(w in n for w in only.split("|"))][:most]
        # A listing that leaves names out says so, lest a name that was left out counts as missing.
        self.tree["dirs"][path] = kept if len(kept) == len(names) else [*kept, PARTIAL]
        return kept

    def link(self, path: str) -> str:
        """Read a symbolic link into the snapshot."""
        try:
            target = str(self._real(path).readlink())
        except FileNotFoundError:
            self.tree["links"][path] = None
            return ""
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: it exists and is no link
                self.tree["links"][path] = {"error": _code(error)}
            return ""
        self.tree["links"][path] = target
        return target

    def node(self, path: str, try_open: bool = True) -> None:
        """Record a device node's owner and mode, and how really opening it read-write goes."""
        real = self._real(path)
        try:
            facts = real.stat()
        except FileNotFoundError:
            self.tree["nodes"][path] = None
            return
        except OSError as error:
            self.tree["nodes"][path] = {"error": _code(error)}
            return
        self.tree["nodes"][path] = {
            "mode": f"{stat.S_IMODE(facts.st_mode):04o}",
            "uid": facts.st_uid,
            "gid": facts.st_gid,
            "group": group_name(facts.st_gid),
            "open": self._open(real) if try_open and stat.S_ISCHR(facts.st_mode) else "",
        }

    @staticmethod
    def _open(real: Path) -> str:
        try:
            handle = os.open(real, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return _code(error)
        os.close(handle)
        return "ok"


def group_name(gid: int) -> str:
    """Name of a group, or an empty string when it has none here."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return ""


def run_command(argv: list[str], seconds: float, keep: int = _LIMIT) -> dict[str, Any] | None:
    """Run a command with a time limit.

    Args:
        argv: the command and its arguments.
        seconds: how long it may take.
        keep: most characters of output to keep.

    Returns:
        Its exit code and texts, `{"error": ...}` when it could not be run to its end, or None when it is not installed.
    """
    program = shutil.which(argv[0]) or next(
        (p for p in (f"/usr/sbin/{argv[0]}", f"/opt/rocm/bin/{argv[0]}") if Path(p).exists()), None
    )
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *argv[1:]], capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": "timeout", "seconds": seconds}
    except OSError as error:
        return {"error": _code(error)}
    return {
        "rc": done.returncode,
        "out": done.stdout.decode("utf-8", "replace")[-keep:]
        if argv[0] == "dmesg"
        else done.stdout.decode("utf-8", "replace")[:keep],
        "err": done.stderr.decode("utf-8", "replace")[:2000],
    }


def free_space(path: Path) -> dict[str, Any]:
    """Free and total GiB, and whether one may write, at the nearest existing folder of a path."""
    here = path
    while not here.exists() and here != here.parent:
        here = here.parent
    try:
        facts = os.statvfs(here)
    except OSError as error:
        return {"path": str(path), "error": _code(error)}
    size = facts.f_frsize
    return {
        "path": str(path),
        "free_gib": round(facts.f_bavail * size / 2**30, 1),
        "total_gib": round(facts.f_blocks * size / 2**30, 1),
        "writable": os.access(here, os.W_OK),
    }
