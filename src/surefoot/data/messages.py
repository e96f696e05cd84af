"""What a row is once its source format is forgotten, and what it becomes once it is token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Role = Literal["user", "assistant", "observation", "function"]

IGNORE_INDEX = -100
"""The label of a token that is not trained; torch's cross-entropy ignores it by default."""


class RowProblem(ValueError):  # noqa: N818 - of the data, not of the program: such rows are counted, and the run goes on
    """A row cannot be used."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """Say why.

        Args:
            reason: a short text, the same for all rows with this problem: rows are counted by it.
            detail: what is wrong in this row.
        """
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: who speaks; `function` is an assistant turn that calls tools, `observation` is the tools' answer.
        content: the turn's text; for `function` a JSON object or list with `name` and `arguments`.
    """

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a dataset, the same for every source format.

    Attributes:
        row_id: "dataset_name:17", the row's position in its source.
        prompt: an odd number of turns that ends with user or observation (pt: one user turn with the whole text).
        response: the turn to learn: 1 for sft; 0 for pt and predict without a reference.
        system: the system prompt, "" when absent.
        tools: a JSON list of tool descriptions, "" when absent.
    """

    row_id: str
    prompt: tuple[Message, ...]
    response: tuple[Message, ...]
    system: str = ""
    tools: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One training item: one row, or several packed rows.

    Attributes:
        row_ids: the rows in it, one per segment.
        input_ids: int32 [tokens].
        labels: int32 [tokens]; `labels[i]` is the id AT position i (the loss shifts), -100 = not trained.
        segments: the rows' lengths in tokens; their sum is `tokens`. Position ids restart at each.
        joined: True when attention may cross from a segment into the ones before it (`packing_mode: joined`).
    """

    row_ids: tuple[str, ...]
    input_ids: np.ndarray
    labels: np.ndarray
    segments: tuple[int, ...]
    joined: bool = False
