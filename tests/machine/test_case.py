"""The format of hand-written machines."""

from __future__ import annotations

import pytest

from surefoot.errors import UserError
from surefoot.machine.case import base_snapshot, build_case, load_cases, spread
from surefoot.machine.facts import Machine


def machine(**spec):
    return Machine(build_case(spec, "x").snapshot)


def test_dotted_keys():
    assert spread({"env.HSA_XNACK": "1"}) == {"env": {"HSA_XNACK": "1"}}
    assert spread({"files./proc/sys/kernel/osrelease": "6.1"}) == {"files": {"/proc/sys/kernel/osrelease": "6.1"}}
    assert spread({"files./p#key": 1}) == {"files": {"/p": {"key": 1}}}
    assert spread({"python.dists.ruamel.yaml.version": "1"}) == {"python": {"dists": {"ruamel.yaml": {"version": "1"}}}}
    assert spread({"nodes./dev/kfd.open": "EPERM"}) == {"nodes": {"/dev/kfd": {"open": "EPERM"}}}
    assert spread({"commands.dkms.out": "x"}) == {"commands": {"dkms": {"out": "x"}}}
    assert spread({"disk.tmp.free_gib": 1}) == {"disk": {"tmp": {"free_gib": 1}}}
    assert spread({"process.limits.nofile": 5}) == {"process": {"limits": {"nofile": 5}}}


def test_bases_are_fresh_copies():
    one = base_snapshot("mi300x-8")
    one["files"].clear()
    assert base_snapshot("mi300x-8")["files"]


def test_gpus_become_kernel_files():
    m = machine(base="rx7900xtx-ubuntu", gpus=[{"gfx": "gfx1036"}, {"gfx": "gfx942", "count": 2, "vram_gib": 192}])
    assert [g.gfx for g in m.kfd] == ["gfx1036", "gfx942", "gfx942"]
    assert [g.render_minor for g in m.kfd] == [128, 129, 130]
    assert len({g.bdf for g in m.kfd}) == 3 and {g.bdf for g in m.kfd} == {g.bdf for g in m.amd_pci}
    assert m.kfd[1].compute_units == 304 and m.kfd[1].vram == 192 << 30
    assert machine(base="rx7900xtx-ubuntu", gpus=[]).kfd == ()


def test_torch_alone_brings_its_companions():
    m = machine(base="rx7900xtx-ubuntu", patch={"python.torch.version": "2.9.1+rocm6.4"})
    assert m.torch.hip.startswith("6.4") and m.torch.rocm == (6, 4)
    assert m.dists["torchvision"].version == "0.24.0+rocm6.4" and "pytorch-triton-rocm" in m.dists
    kept = machine(
        base="rx7900xtx-ubuntu",
        patch={"python.torch.version": "2.13.0", "python.dists.torch": {"version": "2.13.0", "modified": 1764999999}},
    )
    assert kept.torch.flavour == "cuda" and kept.dists["torchvision"].version == "0.28.0+rocm7.2"


def test_opening_follows_groups_and_modes():
    assert machine(base="rx7900xtx-ubuntu", patch={"process.groups": [1000]}).snapshot.node("/dev/kfd").open == "EACCES"
    told = {"process.groups": [1000], "nodes./dev/kfd": {"open": "ok"}}
    assert machine(base="rx7900xtx-ubuntu", patch=told).snapshot.node("/dev/kfd").open == "ok"
    assert machine(base="mi210-docker", patch={"process.groups": [0]}).snapshot.node("/dev/kfd").open == "ok"


def test_an_unloaded_module_takes_its_nodes_along():
    m = machine(base="mi300x-8", patch={"files./sys/module/amdgpu": None})
    assert m.module_loaded is False and m.kfd == () and m.snapshot.absent("/dev/kfd") and m.amd_pci


def test_forget_is_not_missing():
    m = machine(base="rx7900xtx-ubuntu", forget=["dmesg", "files:/sys/module/amdgpu", "dirs:/sys/module"])
    assert m.dmesg == "" and m.module_loaded is None


def test_masks_count_in_what_the_first_left():
    def left(**env):
        return [g.node for g in machine(base="mi300x-8", patch={"env": env}).visible]

    assert left(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="1") == [4]
    assert left(HIP_VISIBLE_DEVICES="0,-1,2") == [1]
    assert left(HIP_VISIBLE_DEVICES="") == []
    assert left(CUDA_VISIBLE_DEVICES="5", HIP_VISIBLE_DEVICES="6") == [7]
    uuid = machine(base="mi300x-8").kfd[3].uuid
    assert left(ROCR_VISIBLE_DEVICES=uuid) == [4]


def test_files_with_faults(tmp_path):
    path = tmp_path / "c.yaml"
    for text in ("- 1", "base: [", "base: nowhere", "base: mi300x-8\nexpct: {}"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError):
            load_cases(path)
    with pytest.raises(UserError):
        load_cases(tmp_path / "missing.yaml")
