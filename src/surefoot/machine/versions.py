"""Version numbers as AMD, PyTorch and kernels write them, and their order."""

from __future__ import annotations

import re

Version = tuple[int, ...]

_NUMBERS = re.compile(r"(\d+(?:\.\d+)*)")


def parse_version(text: object) -> Version:
    """Read the leading dotted number of a version.

    Args:
        text: for example `7.2.4-93`, `10.1.0`, `6.14.0-37-generic` or `v2.13.0+rocm7.2`; anything else is tolerated.

    Returns:
        Its numbers, compared number by number so that 10.0 > 7.14 > 7.9 > 7.2.4; empty when there is none.
    """
    if not isinstance(text, str):
        return ()
    found = _NUMBERS.match(text.strip().lstrip("vV"))
    return tuple(int(part[:9]) for part in found.group(1).split(".")) if found else ()


def short(version: Version, parts: int = 2) -> str:
    """Write the first numbers of a version: (7, 14, 0) gives `7.14`."""
    return ".".join(str(number) for number in version[:parts])


def same_line(left: Version, right: Version) -> bool:
    """Tell whether two versions agree in major and minor number; unknown versions agree with nothing."""
    return len(left) >= 2 and len(right) >= 2 and left[:2] == right[:2]


def local_tag(version: str) -> str:
    """Take the local part of a Python version: `2.13.0+rocm7.2` gives `rocm7.2`, none gives an empty string."""
    return version.partition("+")[2]


def rocm_of_tag(tag: str) -> Version:
    """Read the ROCm version from a local tag such as `rocm7.14`, `rocm10.0.0` or `rocm6.3.4.git7cecbf6d`."""
    found = re.match(r"rocm(?:sdk)?(\d+(?:\.\d+)*)", tag)
    return parse_version(found.group(1)) if found else ()


def soname_major(name: str) -> int | None:
    """Read the major number of a library's soname: `libamdhip64.so.7.2.1` gives 7, a bare `.so` gives None."""
    found = re.search(r"\.so\.(\d{1,6})", name)
    return int(found.group(1)) if found else None
