"""Cards that are not here, by name."""

from __future__ import annotations

import pytest

from surefoot.errors import UserError
from surefoot.machine.cards import find_card
from surefoot.machine.table import load_table


@pytest.mark.parametrize(
    ("name", "gfx", "memory"),
    [("mi300x", "gfx942", 192), ("Instinct MI325X", "gfx942", 256), ("gfx942", "gfx942", 128), ("GFX90A", "gfx90a", 64),
     ("7900 XTX", "gfx1100", 24), ("rx7900gre", "gfx1100", 16), ("Radeon Pro W7900", "gfx1100", 48)],
)  # fmt: skip
def test_a_card_is_found_by_its_name_or_target(name, gfx, memory):
    card = find_card(name)
    assert (card.gfx, card.memory_gib) == (gfx, memory) and card.free_bytes < memory * 2**30


def test_near_names_are_listed():
    with pytest.raises(UserError, match="MI300X") as found:
        find_card("mi300")
    assert found.value.exit_code == 2
    with pytest.raises(UserError, match="is not known"):
        find_card("gfx1151")


def test_every_product_with_memory_of_its_own_has_it_in_the_table():
    for row in load_table().gpus.values():
        if row.memory_gib:
            assert len(row.product_gib) == len(row.products), row.gfx
