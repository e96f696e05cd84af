from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from tiny_llama import tiny_adapter, tiny_llama  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Encoded rows of tests do not belong into the person's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUREFOOT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
