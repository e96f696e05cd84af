"""What a shared library says about itself: the libraries it needs, where it looks for them, and its GPU targets.

Read straight from the file, since neither readelf nor the library's own loading may be had. Format: System V ABI,
"Object Files" and "Dynamic Linking"; the offload bundle's header is described in LLVM's ClangOffloadBundler page.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_DYNAMIC, _NEEDED, _STRTAB, _RPATH, _RUNPATH = 6, 1, 5, 15, 29
_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


@dataclass(frozen=True)
class Library:
    """A shared library: NEEDED entries, RUNPATH or RPATH folders, and GPU targets of its first offload bundle."""

    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    targets: tuple[str, ...]


def read_library(path: Path) -> Library | None:
    """Read a 64-bit little-endian ELF library.

    Args:
        path: the file.

    Returns:
        What it says, or None when it is no such file or cannot be read.
    """
    try:
        with path.open("rb") as handle:
            return _read(handle)
    except (OSError, struct.error, ValueError, OverflowError):
        return None


def _read(handle: BinaryIO) -> Library | None:
    head = handle.read(64)
    if head[:6] != b"\x7fELF\x02\x01":
        return None
    (offset,) = struct.unpack_from("<Q", head, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", head, 0x3A)
    handle.seek(offset)
    table = handle.read(size * count)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", table, i * size) for i in range(min(count, len(table) // max(size, 1)))
    ]
    if not sections or names_at >= len(sections):
        return None
    names = _at(handle, sections[names_at][4], sections[names_at][5])
    needed: list[str] = []
    folders: list[str] = []
    targets: tuple[str, ...] = ()
    for section in sections:
        name = _text(names, section[0])
        if section[1] == _DYNAMIC and section[6] < len(sections):
            strings = _at(handle, sections[section[6]][4], sections[section[6]][5])
            _dynamic(_at(handle, section[4], section[5]), strings, needed, folders)
        elif name == ".hip_fatbin":
            targets = _bundle_targets(_at(handle, section[4], min(section[5], 65536)))
    return Library(tuple(needed), tuple(folders), targets)


def _at(handle: BinaryIO, offset: int, size: int) -> bytes:
    handle.seek(offset)
    return handle.read(min(size, 4 << 20))


def _text(strings: bytes, offset: int) -> str:
    end = strings.find(b"\0", offset)
    return strings[offset:end].decode("utf-8", "replace") if 0 <= offset <= end else ""


def _dynamic(table: bytes, strings: bytes, needed: list[str], folders: list[str]) -> None:
    for position in range(0, len(table) - 15, 16):
        tag, value = struct.unpack_from("<qQ", table, position)
        if tag == _NEEDED:
            needed.append(_text(strings, value))
        elif tag in (_RPATH, _RUNPATH):
            folders.extend(part for part in _text(strings, value).split(":") if part)


def _bundle_targets(data: bytes) -> tuple[str, ...]:
    """Read the targets of an uncompressed offload bundle; a compressed one (CCOB) does not show them."""
    if not data.startswith(_MAGIC):
        return ()
    (count,) = struct.unpack_from("<Q", data, len(_MAGIC))
    position, found = len(_MAGIC) + 8, []
    for _ in range(min(count, 256)):
        _, _, length = struct.unpack_from("<QQQ", data, position)
        name = data[position + 24 : position + 24 + length].decode("ascii", "replace")
        position += 24 + length
        if "amdgcn" in name:
            found.append(name.rpartition("--")[2])
    return tuple(dict.fromkeys(found))
