"""What is told, and what is refused, before several processes start on a captured machine."""

from __future__ import annotations

import pytest

from surefoot.cli import launch
from surefoot.config import make_config
from surefoot.doctor import launch as judging
from surefoot.doctor.launch import judge_launch
from surefoot.errors import UserError
from surefoot.machine.case import build_case

LL = {"python.torch.version": "2.14.0+rocm10.1.0", "files": {"/sys/module/amdgpu/version": "7.1.3"}}


def machine(base: str, **patch):
    spec = {"name": "x", "base": base, "patch": patch, "expect": {"primary": "none"}}
    return build_case(spec, "x").snapshot


@pytest.mark.parametrize("base", ["mi300x-8", "mi350x-rhel"])
def test_a_good_machine_has_nothing_to_tell(base):
    assert judge_launch(machine(base), workarounds=True) == []


@pytest.mark.parametrize(
    ("patch", "expected", "advice"),
    [
        ({"files": {"/proc/cmdline": "ro quiet", "/sys/kernel/iommu_groups/12/type": "DMA-FQ"}}, "F83", "iommu=pt"),
        ({"process.limits.nofile": 1024}, "F94", "ulimit -n"),
        ({"env.NCCL_P2P_DISABLE": "1"}, "F104", "unset NCCL_P2P_DISABLE"),
        ({"env.NCCL_SHM_DISABLE": "1"}, "F104", "unset NCCL_SHM_DISABLE"),
    ],
)
def test_the_worst_comes_first_with_its_advice(patch, expected, advice):
    found = judge_launch(machine("mi300x-8", **patch), workarounds=True)
    assert found[0].message.startswith(f"{expected}: ")
    assert advice in found[0].hint


def test_little_shared_memory_in_a_container_is_told():
    mounts = "shm /dev/shm tmpfs rw,nosuid,nodev,noexec,relatime,size=65536k 0 0"
    found = judge_launch(machine("mi210-docker", **{"files": {"/proc/mounts": mounts}}), workarounds=True)
    assert any(one.message.startswith("F28: ") and "64 MiB" in one.message for one in found)


def test_wrong_sums_are_refused_unless_the_run_works_around_them():
    wrong = machine("mi350x-rhel", **LL)
    assert not [one for one in judge_launch(wrong, workarounds=True) if one.message.startswith("F85")]
    with pytest.raises(UserError, match="F85"):
        judge_launch(wrong, workarounds=False)
    judge_launch(machine("mi350x-rhel", **LL, **{"env.NCCL_PROTO": "LL128,Simple"}), workarounds=False)


def test_only_processes_on_gpus_look_at_the_machine(monkeypatch):
    told: list[str] = []
    settings = {"model_name_or_path": "m", "dataset": "d", "template": "default", "output_dir": "o"}
    monkeypatch.setattr(launch, "cards_in_sight", lambda root: [])
    launch.check_machine(make_config(settings), told.append)
    monkeypatch.setattr(launch, "cards_in_sight", lambda root: ["AMD card at 1"])
    monkeypatch.setattr(
        "surefoot.machine.capture.capture", lambda root: machine("mi300x-8", **{"env.NCCL_P2P_DISABLE": "1"})
    )
    launch.check_machine(make_config(settings | {"device": "cpu"}), told.append)
    assert told == []
    launch.check_machine(make_config(settings), told.append)
    assert len(told) == 1 and told[0].startswith("warning: F104") and judging.WRONG_SUMS not in told[0]
