"""A card that is not here: found by name in the table, with its memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from surefoot.errors import UserError
from surefoot.machine.table import load_table

CONTEXT_GIB = 1.0  # of a card's memory that driver and libraries keep
_MAKER = re.compile(r"instinct|radeon|amd|rx|pro|ai|[\s_-]+")


@dataclass(frozen=True)
class Card:
    """A card of the table.

    Attributes:
        name: as sold.
        gfx: the compiler's name.
        memory_gib: built in.
    """

    name: str
    gfx: str
    memory_gib: int

    def bus_gbs(self, cards: int) -> float | None:
        """Bus bandwidth of collectives among cards of one machine, GB/s; None where the table has none."""
        link = load_table().link_of(self.name)
        return link.bus_gbs(cards) if link else None

    @property
    def free_bytes(self) -> float:
        """Memory that a run alone on it may use."""
        return (self.memory_gib - CONTEXT_GIB) * 2**30


def find_card(name: str) -> Card:
    """Find a card by the name it is sold under, or by its target.

    Args:
        name: as "mi300x", "RX 7900 XTX" or "gfx942"; a target means its product with the least memory.

    Returns:
        The card.

    Raises:
        UserError: there is no such card in the table, or it shares the system's memory.
    """
    cards: dict[str, Card] = {}
    shared: set[str] = set()
    for row in load_table().gpus.values():
        found = [Card(*of) for of in zip(row.products, [row.gfx] * len(row.products), row.product_gib, strict=False)]
        cards |= {_plain(card.name): card for card in found}
        if found:
            cards[row.gfx] = min(found, key=lambda card: card.memory_gib)
        else:
            shared |= {row.gfx, *map(_plain, row.products)}
    wanted = name.strip().lower() if name.strip().lower() in cards else _plain(name)
    if wanted in cards:
        return cards[wanted]
    if wanted in shared:
        raise UserError(f"how much memory {name} has is not known", hint="run `surefoot check` on that machine")
    near = get_close_matches(wanted, [*cards], n=4, cutoff=0.5) or [key for key in cards if key.startswith("mi")]
    names = ", ".join(key if key.startswith("gfx") else cards[key].name for key in near)
    raise UserError(f"there is no card {name} in the table", hint=f"did you mean {names}?", key="--gpu")


def _plain(name: str) -> str:
    return _MAKER.sub("", name.lower())
