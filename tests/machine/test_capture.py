"""Capture from a made-up tree and from this machine; nothing secret may come along."""

from __future__ import annotations

import json
import os
import platform
import sys

import pytest

from surefoot.doctor.diagnose import diagnose
from surefoot.doctor.support import environment_text, write_bundle
from surefoot.machine.capture import capture
from surefoot.machine.elf import read_library
from surefoot.machine.facts import Machine
from surefoot.machine.mask import Masker

NODE = "sys/devices/virtual/kfd/kfd/topology/nodes"


@pytest.fixture
def tree(tmp_path):
    """A made-up root with one RX 7900 XTX."""

    def put(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    put("proc/sys/kernel/osrelease", "6.17.0-14-generic\n")
    put("etc/os-release", 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n')
    put(f"{NODE}/0/properties", "cpu_cores_count 32\nsimd_count 0\ngfx_target_version 0\n")
    put(
        f"{NODE}/1/properties",
        (
            "simd_count 192\nsimd_per_cu 2\ngfx_target_version 110000\nvendor_id 4098\nlocation_id "
            "768\ndomain 0\ndrm_render_minor 128\n"
        ),
    )
    put(f"{NODE}/1/mem_banks/0/properties", "heap_type 1\nsize_in_bytes 25753026560\n")
    put("sys/module/amdgpu/initstate", "live\n")
    put("sys/bus/pci/devices/0000:03:00.0/class", "0x030000\n")
    put("sys/bus/pci/devices/0000:03:00.0/vendor", "0x1002\n")
    put("sys/bus/pci/devices/0000:03:00.0/device", "0x744c\n")
    put("sys/bus/pci/devices/0000:00:1f.0/class", "0x060100\n")
    put("opt/rocm-7.2.4/.info/version", "7.2.4-93\n")
    put("etc/modprobe.d/amd.conf", "blacklist amdgpu\n")
    return tmp_path


def test_a_made_up_tree_is_read_as_a_machine(tree):
    m = Machine(capture(root=tree))
    assert [(g.gfx, g.compute_units, g.bdf, g.render_minor) for g in m.kfd] == [("gfx1100", 96, "0000:03:00.0", 128)]
    assert m.kfd[0].vram == 25753026560
    assert [g.bdf for g in m.amd_pci] == ["0000:03:00.0"]
    assert m.module_loaded is True and m.inbox
    assert m.rocm_system == (7, 2, 4)
    assert m.distro == "ubuntu" and m.packager == "apt"
    assert m.snapshot.text("/etc/modprobe.d/amd.conf") == "blacklist amdgpu"
    assert m.snapshot.absent("/dev/kfd")


def test_unreadable_is_not_missing(tree):
    if os.getuid() == 0:
        pytest.skip("root reads everything")
    (tree / "etc/os-release").chmod(0)
    m = Machine(capture(root=tree))
    assert m.snapshot.error("/etc/os-release") == "EACCES" and not m.snapshot.absent("/etc/os-release")


def test_this_machine_live():
    """Small, without torch in this process, and without a false AMD finding where no AMD GPU is."""
    code = """
import json, sys
from surefoot.doctor.diagnose import diagnose
from surefoot.machine.capture import capture
s = capture()
found = [f.id for f in diagnose(s).findings]
print(json.dumps([len(json.dumps(s.raw)), "torch" in sys.modules, found, bool(s.listing("/dev/dri"))]))
"""
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size, torch_imported, found, has_card = json.loads(done.stdout)
    assert size < 1_000_000
    assert not torch_imported
    if not has_card:
        amd = {f"F{n:02d}" for n in range(1, 35)} | {"F35", "F36", "F100", "F117"}
        assert not amd & set(found)


def test_tools_that_hang_are_given_up(tmp_path, monkeypatch):
    for name in ("amd-smi", "rocminfo", "rocm-smi", "nvidia-smi"):
        (tmp_path / name).write_text("#!/bin/sh\nsleep 60\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    snapshot = capture(time_limit=0.5)
    assert snapshot.raw["commands"]["rocminfo"] == {"error": "timeout", "seconds": 0.5}
    assert snapshot.command("rocminfo").error == "timeout"
    assert not snapshot.missing_command("rocminfo")


def test_the_tools_outputs_without_a_gpu_are_handled():
    """Exit 1 with colours from rocminfo, exit 0 with empty stdout from rocm-smi: neither is a GPU nor a finding."""
    answers = {
        "rocminfo": {
            "rc": 1,
            "out": "\x1b[31mROCk module is NOT loaded, possibly no GPU devices\x1b[0m\n",
            "err": "libkmod: ERROR could not open /proc/modules",
        },
        "rocm-smi": {
            "rc": 0,
            "out": "",
            "err": (
                "cat: /sys/module/amdgpu/initstate: No such file or directory\nERROR:root:Driver not "
                "initialized (amdgpu not found in modules)"
            ),
        },
    }
    snapshot = capture()
    snapshot.raw["commands"].update(answers)
    report = diagnose(snapshot)
    assert Machine(snapshot).targets == () or Machine(snapshot).kfd
    assert not [f for f in report.findings if f.id in ("F03", "F13", "F87")] or Machine(snapshot).has_amd


def test_nothing_secret_leaves(tmp_path, monkeypatch):
    home = tmp_path / "home" / "margarethe"
    (home / ".config/pip").mkdir(parents=True)
    (home / ".config/pip/pip.conf").write_text(
        "[global]\nextra-index-url = https://margarethe:pa55w0rd-x@mirror.example/simple\n", encoding="utf-8"
    )
    planted = {
        "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx",
        "PIP_INDEX_URL": "https://svc:t0psecret@pypi.example/simple",
        "PYTORCH_NOTE": "password=hunter2hunter2",
        "HIP_PATH": str(home / "rocm"),
        "AWS_SECRET_ACCESS_KEY": "AKIAABCDEFGHIJKLMNOP",
        "USER": "margarethe",
        "LOGNAME": "margarethe",
        "HOME": str(home),
        "HOSTNAME": "gpu-box-seventeen",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "node", lambda: "gpu-box-seventeen.lab")
    snapshot = capture()
    report = diagnose(snapshot)
    write_bundle(
        tmp_path / "b.zip",
        snapshot,
        report,
        {"run.log": f"saving to {home}/out on gpu-box-seventeen with hf_abcdefghijklmnopqrstuvwx"},
    )
    import zipfile

    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        everything = (
            "".join(archive.read(n).decode() for n in archive.namelist())
            + json.dumps(snapshot.raw)
            + environment_text(snapshot)
        )
    for secret in (
        "hf_abcdef",
        "pa55w0rd",
        "t0psecret",
        "hunter2",
        "AKIAABC",
        "margarethe",
        str(home),
        "gpu-box-seventeen",
    ):
        assert secret not in everything, secret
    assert "extra-index-url" in everything  # masked, not dropped


def test_masker_keeps_what_rules_need():
    hide = Masker({"trainer"}, {"box"}, {"/home/trainer"})
    assert hide.text("/home/trainer/venv and trainer@box") == "/home/<user>/venv and <user>@<host>"
    assert hide.text("render:x:993:trainer") == "render:x:993:<user>"
    assert hide.text("mailbox toolbox trainercat") == "mailbox toolbox trainercat"
    assert hide.tree({"HF_TOKEN": "short", "python": {"dists": {"authlib": {"version": "1.0"}}}}) == {
        "HF_TOKEN": "***",
        "python": {"dists": {"authlib": {"version": "1.0"}}},
    }


def test_elf_reader_agrees_with_this_pythons_own_libraries():
    import _ctypes
    from pathlib import Path

    library = read_library(Path(_ctypes.__file__))
    if sys.platform != "linux":
        pytest.skip("ELF")
    assert library is not None and any(n.startswith("libc.so") for n in library.needed)
    assert read_library(Path(__file__)) is None
    assert read_library(Path("/nonexistent")) is None
