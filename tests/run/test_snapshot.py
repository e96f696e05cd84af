from __future__ import annotations

import getpass
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

from surefoot.run import snapshot as module
from surefoot.run.snapshot import snapshot, torch_build


def test_what_is_read_without_torch_is_what_torch_says():
    import torch

    found = snapshot(with_torch=True)
    assert found["torch_build"]["version"] == torch.__version__
    assert found["torch_build"]["cuda"] == torch.version.cuda and found["torch_build"]["hip"] == torch.version.hip
    assert len(found["torch_sees"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert found["packages"]["transformers"] == importlib.metadata.version("transformers")


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from surefoot.run.snapshot import snapshot; snapshot(with_torch=False); "
        "print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_names_of_people_and_machines_stay_out():
    text = json.dumps(snapshot(with_torch=False))
    assert platform.node() not in text or len(platform.node()) < 3
    assert str(Path.home()) not in text
    user = getpass.getuser()
    assert user == "root" or user not in text


def test_a_rocm_build_is_read_from_its_version_file(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libamdhip64.so is missing')\n")
    version = "__version__ = '2.9.0+rocm7.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n"
    (tmp_path / "torch/version.py").write_text(version)
    spec = type("Spec", (), {"origin": str(tmp_path / "torch/__init__.py")})
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: spec)
    assert torch_build() == {"version": "2.9.0+rocm7.0", "cuda": None, "hip": "7.0.51831"}


def test_a_machine_without_torch_is_no_error(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert torch_build() == {"version": None, "cuda": None, "hip": None}
