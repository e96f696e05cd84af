"""Each automatic workaround: exactly on its machines and YAMLs, and on no other base machine."""

from __future__ import annotations

import pytest

from surefoot.machine.case import base_names, base_snapshot, build_case
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot
from surefoot.machine.workarounds import apply_environment, plan_workarounds, recorded_environment

BASES = [n for n in base_names() if not n.startswith("_")]
YAMLS = [
    {"finetuning_type": "lora", "bf16": True},
    {"finetuning_type": "lora", "fp16": True},
    {"finetuning_type": "full", "bf16": True},
    {"finetuning_type": "full", "compute_dtype": "float32"},
    {},
]
#: (id, the machine, YAMLs that get it)
WANTED = [
    (
        "F47",
        {"base": "r9700-pip", "patch": {"python.torch.version": "2.13.0+rocm7.2"}},
        lambda c: c.get("finetuning_type", "lora") == "lora",
    ),
    (
        "F47",
        {"base": "r9700-pip", "patch": {"python.torch.version": "2.13.0+rocm10.0.0"}},
        lambda c: c.get("finetuning_type", "lora") == "lora",
    ),
    ("F85", {"base": "mi350x-rhel", "patch": {"python.torch.version": "2.14.0+rocm10.1.0"}}, lambda c: True),
    ("F132", {"base": "mi210-docker"}, lambda c: c.get("fp16") is True),
    ("F62", {"base": "rx6800"}, lambda c: c.get("bf16") is True),
    (
        "F88",
        {"base": "rx7900xtx-ubuntu", "patch": {"env.PYTORCH_ALLOC_CONF": "expandable_segments:True"}},
        lambda c: True,
    ),
]


def machine(spec):
    return Machine(build_case(spec, "x").snapshot)


@pytest.mark.parametrize(("which", "spec", "wants"), WANTED)
@pytest.mark.parametrize("config", YAMLS)
def test_applied_exactly_where_it_belongs(which, spec, wants, config):
    assert (which in [w.id for w in plan_workarounds(machine(spec), config)]) == wants(config)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("config", YAMLS)
def test_on_no_other_base_machine(base, config):
    expected = set()
    if base in ("mi210-docker", "mi250x-slurm") and config.get("fp16"):
        expected = {"F132"}
    if base == "rx6800" and config.get("bf16"):
        expected = {"F62"}
    assert {w.id for w in plan_workarounds(Machine(Snapshot(base_snapshot(base))), config)} == expected


def test_turned_off_and_already_done():
    fault = {"base": "r9700-pip", "patch": {"python.torch.version": "2.13.0+rocm7.2"}}
    assert plan_workarounds(machine(fault), {"workarounds": False}) == []
    fault["patch"]["env.TORCH_BLAS_PREFER_HIPBLASLT"] = "0"
    assert plan_workarounds(machine(fault), {}) == []
    sums = {"base": "mi350x-rhel", "patch": {"python.torch.version": "2.14.0+rocm10.1.0", "env.NCCL_PROTO": "^LL"}}
    assert plan_workarounds(machine(sums), {}) == []
    mended = {"base": "r9700-pip", "patch": {"python.torch.version": "2.14.0+rocm10.1.0"}}
    assert plan_workarounds(machine(mended), {}) == []


def test_the_environment_changes_and_the_record_tells():
    environ = {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True", "HOME": "/home/x"}
    spec = {
        "base": "r9700-pip",
        "patch": {
            "python.torch.version": "2.12.0+rocm7.14",
            "env.PYTORCH_HIP_ALLOC_CONF": environ["PYTORCH_HIP_ALLOC_CONF"],
        },
    }
    plan = plan_workarounds(machine(spec), {"bf16": True})
    changed = apply_environment(plan, environ)
    assert environ["PYTORCH_HIP_ALLOC_CONF"] == "max_split_size_mb:128"
    assert environ["TORCH_BLAS_PREFER_HIPBLASLT"] == "0"
    assert changed["TORCH_BLAS_PREFER_HIPBLASLT"] == {"before": None, "after": "0"}
    assert changed["PYTORCH_HIP_ALLOC_CONF"]["before"].endswith("expandable_segments:True")
    assert set(recorded_environment(environ)) == {
        "PYTORCH_HIP_ALLOC_CONF",
        "TORCH_BLAS_PREFER_HIPBLASLT",
        "ROCBLAS_USE_HIPBLASLT",
    }
    only = {"base": "rx7900xtx-ubuntu", "patch": {"env.PYTORCH_ALLOC_CONF": "expandable_segments:True"}}
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    apply_environment(plan_workarounds(machine(only), {}), environ)
    assert environ == {}


def test_a_child_process_really_gets_it():
    import json
    import os
    import subprocess
    import sys

    environ = dict(os.environ)
    plan = plan_workarounds(
        machine({"base": "mi350x-rhel", "patch": {"python.torch.version": "2.14.0+rocm10.1.0"}}), {}
    )
    apply_environment(plan, environ)
    code = (
        "import json, os; from surefoot.machine.workarounds import recorded_environment as r; "
        "print(json.dumps(r(os.environ)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["NCCL_PROTO"] == "LL128,Simple"


def test_bf16_becomes_fp16_in_the_yaml():
    plan = plan_workarounds(machine({"base": "rx6800"}), {"bf16": True, "compute_dtype": "bf16"})
    assert plan[0].set_config == {"bf16": False, "fp16": True, "compute_dtype": "float16"}
    assert plan[0].line.startswith("workaround F62: bf16: false, fp16: true")
