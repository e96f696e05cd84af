"""Names of GPU targets: KFD's number, the compiler's name, families, generic targets and the override's rule."""

from __future__ import annotations

import re

_GFX = re.compile(r"gfx(\d{1,2})(\d)([0-9a-f])$")
_DECIMAL_STEPS = {f"gfx90{step}": f"gfx90{step:x}" for step in (10, 12)}
_OVERRIDE = re.compile(r"(\d+)\.(\d+)\.(\d+)$")


def decode_target(number: int) -> str:
    """Turn KFD's `gfx_target_version` into the compiler's name.

    Args:
        number: major*10000 + minor*100 + step, all decimal; 0 is a CPU node.

    Returns:
        `gfx` + major + minor + step, the step as one hex digit (90010 gives gfx90a); empty if it fits no name.
    """
    major, minor, step = number // 10000, number // 100 % 100, number % 100
    if not (0 < major < 64 and minor < 10 and step < 16):
        return ""
    return f"gfx{major}{minor}{step:x}"


def encode_target(gfx: str) -> int:
    """Turn a compiler's name into KFD's number: gfx90a gives 90010; 0 if it is no such name."""
    found = _GFX.match(base_name(gfx))
    if not found:
        return 0
    major, minor, step = int(found.group(1)), int(found.group(2), 16), int(found.group(3), 16)
    return major * 10000 + minor * 100 + step


def base_name(text: str) -> str:
    """Strip target features and old spellings: `gfx942:sramecc+` gives gfx942, rocm-smi's `gfx9010` gives gfx90a."""
    name = text.strip().lower().partition(":")[0]
    name = name.rpartition("--")[2] if "--" in name else name
    # Old rocm-smi and amd-smi printed the step in decimal. Only gfx9 has such steps, so gfx1010 stays itself.
    return _DECIMAL_STEPS.get(name, name)


def is_gfx(text: str) -> bool:
    """Tell whether a text is the name of one exact target."""
    return bool(_GFX.match(base_name(text)))


def is_rdna2(gfx: str) -> bool:
    """Tell whether a target is RDNA2 (gfx103x)."""
    return gfx.startswith("gfx103")


def parse_override(value: str) -> str:
    """Read HSA_OVERRIDE_GFX_VERSION as the ROCm runtime does.

    Args:
        value: the variable's text.

    Returns:
        The target it pretends, or an empty string if the runtime calls the text invalid: it wants exactly three decimal
        numbers, major at most 63, minor and step at most 255, and nothing behind them.
    """
    found = _OVERRIDE.match(value) if len(value) < 32 else None
    if not found:
        return ""
    major, minor, step = (int(part) for part in found.groups())
    if major > 63 or minor > 255 or step > 255:
        return ""
    return f"gfx{major}{minor}{step:x}"


def split_targets(value: str) -> list[str]:
    """Split a list of targets at any of the separators in use (`;`, `,`, space) into their bare names."""
    return [base_name(part) for part in re.split(r"[;,\s]+", value.strip()) if part]
