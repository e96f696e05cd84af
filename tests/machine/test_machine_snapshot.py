from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.errors import UserError
from surefoot.machine.hardware import dkms_rows, rocminfo_gpus
from surefoot.machine.snapshot import Snapshot, load_snapshot


def test_three_kinds_of_evidence():
    see = Snapshot(
        {"files": {"/a/there": "x", "/a/gone": None, "/a/closed": {"error": "EACCES"}}, "dirs": {"/b": ["one"]}}
    )
    assert see.present("/a/there") and not see.absent("/a/there")
    assert see.absent("/a/gone") and not see.present("/a/gone")
    assert not see.present("/a/closed") and not see.absent("/a/closed") and see.error("/a/closed") == "EACCES"
    assert not see.present("/never") and not see.absent("/never")
    assert see.absent("/b/two") and see.present("/b/one")


def test_a_missing_folder_hides_what_was_below_it():
    see = Snapshot({"files": {"/sys/module/amdgpu": None, "/sys/module/amdgpu/version": "6.16"}})
    assert see.absent("/sys/module/amdgpu/version") and see.text("/sys/module/amdgpu/version") == ""
    assert list(see.glob("/sys/module/amdgpu/*")) == []


def test_both_spellings_of_the_topology():
    see = Snapshot({"files": {"/sys/class/kfd/kfd/topology/nodes/1/gpu_id": "7"}})
    assert see.text("/sys/devices/virtual/kfd/kfd/topology/nodes/1/gpu_id") == "7"


def test_key_value_files_may_be_mappings():
    assert Snapshot({"files": {"/p": {"simd_count": 4}}}).text("/p") == "simd_count 4"


def test_order_of_keys_does_not_matter():
    pairs = [("/z", "1"), ("/a", "2"), ("/m/x", "3")]
    one, two = Snapshot({"files": dict(pairs)}), Snapshot({"files": dict(reversed(pairs))})
    assert list(one.glob("/*")) == list(two.glob("/*"))
    assert one.listing("/m") == two.listing("/m")


_noise = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(
    st.dictionaries(st.sampled_from(["files", "dirs", "links", "nodes", "env", "commands", "python", "dmesg"]), _noise)
)
def test_reader_takes_any_shape(raw):
    see = Snapshot(raw)
    (
        see.text("/x"),
        see.node("/dev/kfd"),
        see.command("rocminfo"),
        see.env("HOME"),
        see.journal("dmesg"),
        see.listing("/"),
    )
    list(see.glob("/*"))


def test_files_that_are_no_snapshot(tmp_path):
    for text in ("{", "[]", '{"schema": "other/1"}', "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")):
        path = tmp_path / "x.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError):
            load_snapshot(path)
    with pytest.raises(UserError):
        load_snapshot(tmp_path / "missing.json")
    path.write_text(json.dumps({"schema": "surefoot.snapshot/1"}), encoding="utf-8")
    assert load_snapshot(path).raw["schema"] == "surefoot.snapshot/1"


def test_rocminfo_counts_agents_once():
    text = (
        "  Name:                    AMD EPYC\n  Device Type:             CPU\n"
        "  Name:                    gfx942\n  Marketing Name:          AMD Instinct MI300X\n  Device "
        "Type:             GPU\n"
        "      Name:                    amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-\n"
        "      Name:                    amdgcn-amd-amdhsa--gfx9-4-generic\n"
    )
    assert rocminfo_gpus(text) == ("gfx942",)


def test_both_spellings_of_dkms():
    new = "amdgpu/6.16.13-2278356.24.04, 6.14.0-37-generic, x86_64: installed (Original modules exist)"
    old = "amdgpu, 3.9-19, 5.4.0-54-generic, x86_64: installed"
    assert dkms_rows(new) == (("6.16.13-2278356.24.04", "6.14.0-37-generic", "installed (Original modules exist)"),)
    assert dkms_rows(old) == (("3.9-19", "5.4.0-54-generic", "installed"),)
    assert dkms_rows("amdgpu/6.16.13: added") == (("6.16.13", "", "added"),)
    assert dkms_rows("nvidia/580, 6.1, x86_64: installed") == ()
