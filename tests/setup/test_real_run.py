"""The first steps of the real CPU plan, run by the real bash and pip: killed, broken on purpose, and without an index.

The whole plan, torch and the smoke step included, is run by `benchmarks/setup_real_run.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import setup_real_run as real

from surefoot.machine.capture import capture
from surefoot.setup.plan import Plan, Wish
from surefoot.setup.planner import make_plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(capture(), Wish(gpu="cpu", env="venv", surefoot=str(real.ROOT)))


def test_killed_in_each_step_and_resumed(tmp_path, plan):
    words = real.killed(tmp_path, real.before(plan, "torch"))
    assert "the last constraints" in words


def test_a_planted_failing_step(tmp_path, plan):
    assert "resumed to the end" in real.failing(tmp_path, plan)


def test_an_index_where_nobody_listens(tmp_path, plan):
    assert "Connection refused" in real.index(tmp_path, plan)
