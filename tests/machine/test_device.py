"""A GPU is never passed over in silence."""

from __future__ import annotations

import pytest
import torch

from surefoot.errors import UserError
from surefoot.machine.device import cards_in_sight, choose_device


@pytest.fixture(autouse=True)
def blind(monkeypatch):
    """A torch that can use no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def plant(root, vendor, kind, address="0000:c1:00.0"):
    """A card in the kernel's table of PCI devices."""
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "class").write_text(kind + "\n")
    return root


@pytest.mark.parametrize(
    ("vendor", "kind", "name"),
    [
        ("0x1002", "0x030000", "AMD"),
        ("0x1002", "0x038000", "AMD"),
        ("0x1002", "0x120000", "AMD"),
        ("0x10de", "0x030200", "NVIDIA"),
    ],
)
def test_a_card_that_torch_cannot_use_is_not_replaced_by_the_cpu(tmp_path, vendor, kind, name):
    root = plant(tmp_path, vendor, kind)
    assert cards_in_sight(root) == [f"{name} card at 0000:c1:00.0"]
    with pytest.raises(UserError, match=f"{name} card at 0000:c1:00.0") as caught:
        choose_device("auto", root)
    (problem,) = caught.value.problems
    assert problem.key == "device" and "surefoot doctor" in problem.hint and "device: cpu" in problem.hint
    assert choose_device("cpu", root).device == "cpu"


@pytest.mark.parametrize(("node", "name"), [("dev/kfd", "AMD"), ("dev/nvidia0", "NVIDIA")])
def test_a_device_node_alone_counts_as_a_card(tmp_path, node, name):
    """In a container the PCI table may be hidden."""
    (tmp_path / "dev").mkdir()
    (tmp_path / node).touch()
    with pytest.raises(UserError, match=f"{name} card"):
        choose_device("auto", tmp_path)


@pytest.mark.parametrize(("vendor", "kind"), [("0x8086", "0x030000"), ("0x1002", "0x060000"), ("0x10de", "0x040300")])
def test_what_is_no_amd_or_nvidia_card_is_no_card(tmp_path, vendor, kind):
    choice = choose_device("auto", plant(tmp_path, vendor, kind))
    assert choice.device == "cpu" and "No AMD or NVIDIA card is in sight" in choice.message


def test_a_gpu_that_is_asked_for_by_name_must_be_there(tmp_path):
    with pytest.raises(UserError, match="no card"):
        choose_device("cuda", tmp_path)


def test_a_usable_gpu_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    assert choose_device("auto", tmp_path).device == "cuda:0"
    assert choose_device("cuda:1", tmp_path).device == "cuda:1"
    with pytest.raises(UserError, match="torch sees 2"):
        choose_device("cuda:2", tmp_path)
