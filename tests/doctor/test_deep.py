"""Deep probes: right answers on this device, and crashes, hangs and wrong numbers reported as such."""

from __future__ import annotations

import sys
import textwrap

import pytest

from surefoot.doctor.deep import NAMES, run_probes
from surefoot.doctor.diagnose import diagnose
from surefoot.machine.case import base_snapshot
from surefoot.machine.snapshot import Snapshot


def test_names_are_the_probes():
    from surefoot.doctor.probes import PROBES

    assert tuple(PROBES) == NAMES


def fake(tmp_path, body: str) -> list[str]:
    script = tmp_path / "fake.py"
    script.write_text("import json, os, sys, time\n" + textwrap.dedent(body), encoding="utf-8")
    return [sys.executable, str(script)]


def test_a_crash_is_a_finding_and_not_the_end(tmp_path):
    command = fake(
        tmp_path,
        """
        for name in sys.argv[2:]:
            print(json.dumps({"start": name}), flush=True)
            if name == "b":
                os.abort()
            print(json.dumps({"probe": name, "ok": True, "error": 1e-7, "tolerance": 1e-5}), flush=True)
        """,
    )
    results = list(run_probes("cpu", ("a", "b", "c"), 20, command))
    assert [(r.name, r.ok) for r in results] == [("a", True), ("b", False), ("c", True)]
    assert "SIGABRT" in results[1].detail


def test_a_hang_is_ended(tmp_path):
    command = fake(
        tmp_path,
        """
        for name in sys.argv[2:]:
            if name == "b":
                time.sleep(60)
            print(json.dumps({"probe": name, "ok": True, "error": 1e-7, "tolerance": 1e-5}), flush=True)
        """,
    )
    results = list(run_probes("cpu", ("a", "b"), 1.5, command))
    assert [(r.name, r.ok) for r in results] == [("a", True), ("b", False)]
    assert "hangs" in results[1].detail


def test_wrong_numbers_are_caught():
    torch = pytest.importorskip("torch")
    from surefoot.doctor import probes

    right = probes.gemm("cpu", "float32")
    assert right["ok"] and 0 < right["error"] < right["tolerance"]
    original = torch.Tensor.to

    def broken(self, *arguments, **options):
        moved = original(self, *arguments, **options)
        return moved * 1.01 if arguments == ("cpu",) else moved

    torch.Tensor.to = broken
    try:
        wrong = probes.gemm("cpu", "float32")
    finally:
        torch.Tensor.to = original
    assert not wrong["ok"] and wrong["error"] > 1e-3


def test_failed_probes_become_findings_with_their_cause():
    raw = base_snapshot("r9700-pip")
    raw["probes"] = [{"name": "lora gemm bfloat16", "ok": False, "detail": "the process was killed by SIGABRT"}]
    assert diagnose(Snapshot(raw)).primary.id == "F137"
    raw["python"]["torch"] |= {"version": "2.13.0+rocm7.2", "hip": "7.2.1"}
    report = diagnose(Snapshot(raw))
    assert report.primary.id != "F137"
    assert next(f for f in report.findings if f.id == "F137").because_of is not None


def test_trial_loads_say_what_failed(tmp_path, monkeypatch):
    from surefoot.doctor.deep import trial_load

    (tmp_path / "dies.py").write_text("import os; os.abort()\n", encoding="utf-8")
    (tmp_path / "lacks.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert trial_load("json") == "ok"
    assert "SIGABRT" in trial_load("dies")
    assert trial_load("lacks").endswith("libcudart.so.12: cannot open shared object file")


@pytest.mark.slow
def test_every_probe_passes_on_the_cpu():
    results = list(run_probes("cpu"))
    assert [r.name for r in results] == list(NAMES)
    assert all(r.ok for r in results), [r for r in results if not r.ok]
