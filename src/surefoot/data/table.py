"""The training items that the loop reads: a table in any order, over arrays that stay on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from surefoot.data.messages import Sample
from surefoot.data.store import TokenStore


class TokenTable:
    """Items of one or several stores, in an order of their own.

    Args:
        stores: where the items are, laid end to end.
        order: positions among them, int64 [items]; an item may come twice. None = all of them as they are.
    """

    def __init__(self, stores: Sequence[TokenStore], order: np.ndarray | None = None) -> None:
        self.stores = list(stores)
        sizes = [len(store) for store in self.stores]
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])
        self.order = np.arange(self._starts[-1]) if order is None else order
        all_lengths = np.concatenate([store.lengths for store in self.stores] or [np.empty(0, dtype=np.int64)])
        self.lengths: np.ndarray = all_lengths[self.order]
        """Tokens of each item, int64 [items]."""
        self.max_token_id = max((int(store.meta["max_token_id"]) for store in self.stores), default=-1)
        """The largest token id in the stores; -1 when they are empty."""
        digest = hashlib.blake2b(digest_size=16)
        for store in self.stores:
            digest.update(str(store.meta["fingerprint"]).encode())
        digest.update(np.ascontiguousarray(self.order, dtype="<i8").tobytes())
        self.fingerprint: str = digest.hexdigest()
        """Changes with any token, label, row id or the order of the items."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, item: int) -> Sample:
        """Read one item; negative positions count from the end."""
        place = int(self.order[item])
        store = int(np.searchsorted(self._starts, place, side="right")) - 1
        return self.stores[store].sample(place - int(self._starts[store]))

    def __iter__(self) -> Iterator[Sample]:
        for item in range(len(self)):
            yield self[item]

    def select(self, items: np.ndarray) -> TokenTable:
        """Choose items by position.

        Args:
            items: positions in this table, int64 [items].

        Returns:
            A table over the same stores.
        """
        return TokenTable(self.stores, self.order[items])

    @property
    def names(self) -> list[str]:
        """The datasets that the rows come from."""
        return list(dict.fromkeys(name for store in self.stores for name in store.meta["names"]))
