"""Fixtures of all rooms. Tests run on one thread each, without a network and without a person's own cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keep token caches of tests out of the person's own, but share the demo model's conversion."""
    if "SUREFOOT_CACHE" not in os.environ:
        monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
