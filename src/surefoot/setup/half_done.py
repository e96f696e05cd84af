"""What a killed pip leaves in an environment: packages that it would take for installed, but that are not whole."""

from __future__ import annotations

import shutil
from pathlib import Path


def clear(environment: Path) -> list[str]:
    """Remove the marks of packages that were being installed when pip was killed, so that they are installed again.

    pip writes a package's METADATA with its files and RECORD last, after minutes of byte-compiling for the largest.
    Killed in between, it takes the package for installed, and can never uninstall it.

    Args:
        environment: the folder of a virtual environment; one that is not there has nothing to clear.

    Returns:
        A sentence on each package.
    """
    told = []
    for site in environment.glob("lib/python3*/site-packages"):
        for info in sorted(site.glob("*.dist-info")):
            if not (info / "RECORD").is_file():
                shutil.rmtree(info)
                told.append(f"{info.name.removesuffix('.dist-info')} was half installed; it will be installed again")
        for left in site.glob("~*"):  # pip renames what it is about to remove
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    return told
