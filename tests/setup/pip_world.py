"""Small wheels, an index of them on disk, and venvs whose pip hears nothing of this machine's own configuration."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

#: An address where nothing answers: whatever asks it fails.
BROKEN = "http://127.0.0.1:9/simple"


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = (), tag: str = "py3-none-any") -> Path:
    """Make a wheel that pip installs like any other, with a whole RECORD."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {r}\n" for r in requires)
    files = {
        f"{module}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{inside},{_digest(text)},{len(text.encode())}\n" for inside, text in files.items())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(zipfile.ZipInfo(inside, (2026, 1, 1, 0, 0, 0)), text)
    return path


def _digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def index(folder: Path, wheels: list[Path]) -> str:
    """Make a package index of wheels on the disk; returns its address."""
    pages: dict[str, list[str]] = {}
    for path in wheels:
        name = path.name.partition("-")[0].replace("_", "-")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        pages.setdefault(name, []).append(f'<a href="{path.as_uri()}#sha256={digest}">{path.name}</a>')
    for name, links in pages.items():
        page = folder / name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>", encoding="utf-8")
    return folder.as_uri()


def bare_environment(**more: str) -> dict[str, str]:
    """This process's variables without any that configure pip."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"} | more


class World:
    """A fresh venv, and this process's pip working on it (making one with its own pip takes seconds)."""

    def __init__(self, folder: Path, own_pip: bool = False) -> None:
        venv.create(folder, with_pip=own_pip)
        self.python = folder / "bin" / "python"

    def pip(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run its pip."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env or bare_environment(), check=False)

    def versions(self) -> dict[str, str]:
        """What is installed."""
        return {row["name"]: row["version"] for row in json.loads(self.pip("list", "--format=json").stdout)}
