"""Workarounds reach the process and the run's record, and only where there is an AMD card."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from run_events import facts

from surefoot.config import make_config
from surefoot.machine.case import build_case
from surefoot.machine.facts import Machine
from surefoot.machine.workarounds import plan_workarounds
from surefoot.run import workarounds as module
from surefoot.run.folder import RunFolder
from surefoot.run.record import RunRecord
from surefoot.run.workarounds import apply_plan, environment_record, plan_for

BASE = {"model_name_or_path": "org/base", "dataset": "rows", "template": "chatml"}


def planned(base, **settings):
    cfg = make_config(BASE | settings)
    return cfg, plan_workarounds(Machine(build_case({"base": base}, "x").snapshot), cfg.model_dump())


def test_bf16_becomes_fp16_where_the_card_has_none():
    cfg, plan = planned("rx6800", bf16=True)
    changed, record = apply_plan(plan, cfg, {})
    assert (changed.bf16, changed.fp16, changed.compute_dtype) == (False, True, "float16")
    assert [entry["id"] for entry in record] == ["F62"]
    assert "workarounds: false" in record[0]["line"]


def test_the_record_holds_what_the_process_got(tmp_path):
    cfg, plan = planned("mi210-docker", fp16=True, output_dir=str(tmp_path / "run"))
    environ = {"HIP_VISIBLE_DEVICES": "0", "HOME": "/somewhere", "API_TOKEN": "secret"}
    cfg, applied = apply_plan(plan, cfg, environ)
    assert environ["TORCH_BLAS_PREFER_HIPBLASLT"] == "0"
    record = RunRecord(cfg, RunFolder.of(cfg), {}, environment_record(applied, environ))
    record.started(facts())
    kept = json.loads((tmp_path / "run" / "surefoot" / "machine.json").read_text())
    assert kept["environment"] == {"HIP_VISIBLE_DEVICES": "0", "TORCH_BLAS_PREFER_HIPBLASLT": "0"}
    assert kept["workarounds"][0]["environment"] == {"TORCH_BLAS_PREFER_HIPBLASLT": {"before": None, "after": "0"}}


def amd_root(tmp_path):
    card = tmp_path / "sys/bus/pci/devices/0000:03:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x1002\n")
    (card / "class").write_text("0x030000\n")
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "looked"), [({}, True), ({"workarounds": False}, False), ({"device": "cpu"}, False)]
)
def test_the_machine_is_read_only_when_it_matters(tmp_path, monkeypatch, settings, looked):
    seen = []
    monkeypatch.setattr(module, "plan_workarounds", lambda machine, config: seen.append(machine) or [])
    assert plan_for(make_config(BASE | settings), amd_root(tmp_path)) == []
    assert bool(seen) == looked
    assert plan_for(make_config(BASE), tmp_path / "empty") == []


def test_nothing_has_imported_torch_when_workarounds_are_applied():
    """The command line, the job and the plan: torch reads these variables when it starts."""
    code = (
        "import sys, surefoot.cli.main, surefoot.run.job\n"
        "from surefoot.config import make_config\n"
        "from surefoot.run.workarounds import plan_for\n"
        f"plan_for(make_config({BASE!r}))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
