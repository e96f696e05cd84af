from __future__ import annotations

import re
from pathlib import Path

import pytest

import surefoot
from surefoot.machine.table import Gpu, load_table


def test_every_row_says_where_it_comes_from():
    table = load_table()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", table.date)
    for row in (
        *table.gpus.values(),
        *table.rocm,
        *table.drivers,
        *table.torch,
        *table.placeholders,
        *table.dkms_breaks,
        *table.channels.values(),
        *table.repos,
        *table.links,
    ):
        assert row.source, row


def test_truth_about_number_formats():
    gpus = load_table().gpus
    assert {g for g, row in gpus.items() if row.bf16 == "no"} == {
        g for g in gpus if g.startswith("gfx10") or g in ("gfx900", "gfx906")
    }
    assert gpus["gfx942"].fp8 == "fnuz"
    assert {gpus[g].fp8 for g in ("gfx950", "gfx1200", "gfx1201")} == {"ocp"}
    assert gpus["gfx950"].lds_kib == 160


def test_pci_ids_name_one_target_each():
    table = load_table()
    for row in table.gpus.values():
        for entry in row.pci:
            for device in entry.split("-"):
                assert table.gpu_of_pci(device) is row
    assert table.gpu_of_pci("0xzz") is None
    assert table.gpu_of_pci("") is None


def test_overrides_stay_in_the_family():
    gpus = load_table().gpus
    for row in gpus.values():
        if row.override:
            major, minor, step = row.override.split(".")
            base = gpus[f"gfx{major}{minor}{step}"]
            assert base.generic == row.generic


def test_windows_and_lists():
    table = load_table()
    assert table.driver_of((6, 16, 13)).stream == "30.20"
    assert table.driver_of((7, 1, 3)).stream == "31.50"
    assert "gfx1151" not in table.wheel_targets((7, 0)) and "gfx1151" in table.wheel_targets((7, 1))
    assert "gfx1100" not in table.hipblaslt_targets((6, 2)) and "gfx1100" in table.hipblaslt_targets((6, 3))


def test_no_target_list_is_repeated_in_code():
    """A list of three or more targets in code would be a second table."""
    root = Path(surefoot.__file__).parent
    for room in ("machine", "doctor"):
        for file in (root / room).rglob("*.py"):
            for line in file.read_text(encoding="utf-8").splitlines():
                assert len(re.findall(r"\"gfx\d[0-9a-f]{2,3}\"", line)) < 3, f"{file.name}: {line.strip()}"


@pytest.mark.parametrize("row", load_table().gpus.values(), ids=lambda row: row.gfx)
def test_a_card_is_found_by_its_name_as_people_write_it(row: Gpu) -> None:
    for product in row.products:
        found = load_table().gpu_of_name(product)
        assert found is not None
        assert product in found.products
        plain = product.removeprefix("Radeon ").removeprefix("Instinct ").lower().replace(" ", "")
        assert load_table().gpu_of_name(f"AMD {plain}") == found


def test_every_index_says_what_it_serves_and_every_repository_whom() -> None:
    table = load_table()
    assert set(table.channels) == set(table.indexes)
    for channel in table.channels.values():
        assert channel.disk_gib >= channel.download_gib > 0
        assert ("{rocm}" in channel.url) <= ("{rocm}" in channel.wheel_tag)
    for repo in table.repos:
        assert "{version}" in repo.url
        assert table.repo(repo.kind, repo.packager, repo.distros[0]) == repo
    assert table.repo("driver", "dnf", "fedora") is None
