"""Encoders that fail, in a module that a spawned process imports quickly."""

from __future__ import annotations

import os

from surefoot.data.rows import RowEncoder
from surefoot.errors import UserError


class Dies(RowEncoder):
    def encode(self, numbers, rows):
        if 13 in numbers:
            os._exit(3)
        return super().encode(numbers, rows)


class Refuses(RowEncoder):
    def encode(self, numbers, rows):
        raise UserError("this cannot be", hint="do that", key="dataset")
