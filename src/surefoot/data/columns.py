"""Do the rows have the columns that will be read? Asked before any work is done on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surefoot.data.catalog import Columns, DatasetEntry, Formatting, Tags
from surefoot.data.converters import required_columns
from surefoot.data.sources import RowSource
from surefoot.errors import UserError

_OPENAI_TAGS = Tags(
    role_tag="role", content_tag="content", user_tag="user", assistant_tag="assistant", observation_tag="tool"
)


def guess_formatting(entry: DatasetEntry, source: RowSource) -> DatasetEntry:
    """Read the shape of a file that no catalogue describes from its first row.

    Args:
        entry: the dataset, named by its path.
        source: its rows.

    Returns:
        The entry with formatting, columns and tags: a list in `messages` or `conversations` is a conversation, with
        OpenAI's names of the speakers where its turns have a `role`; anything else is alpaca.
    """
    row = next(iter(source.rows()), None)
    if not isinstance(row, dict):
        return entry
    for column in ("messages", "conversations"):
        turns = row.get(column)
        if isinstance(turns, (list, tuple)):
            by_role = any(isinstance(turn, dict) and "role" in turn for turn in turns)
            formatting: Formatting = "openai" if by_role else "sharegpt"
            columns = Columns(messages=column, **{name: name for name in ("system", "tools") if name in row})
            tags = _OPENAI_TAGS if by_role else Tags()
            return replace(entry, formatting=formatting, columns=columns, tags=tags)
    columns = Columns(**{name: name for name in ("system", "history", "tools") if name in row})
    return replace(entry, columns=columns)


def check_columns(entry: DatasetEntry, source: RowSource, stage: str) -> None:
    """Make sure that some row has each column that is needed. Mostly the first row has them all.

    Args:
        entry: the dataset.
        source: its rows.
        stage: `sft` or `pt`.

    Raises:
        UserError: there are no rows, or no row has a column; names the columns that there are.
    """
    missing = required_columns(entry, stage)
    seen: dict[str, None] = {}
    first: Any = None
    count = 0
    for row in source.rows():
        first = row if count == 0 else first
        count += 1
        if isinstance(row, dict):
            seen.update(dict.fromkeys(str(name) for name in row))
        missing = [group for group in missing if not any(name in seen for name in group)]
        if not missing:
            return
    if not count:
        raise UserError(
            f"dataset '{entry.name}' has no rows ({entry.place})", hint="name a file with rows in it", key="dataset"
        )
    if not seen:
        raise UserError(
            f"dataset '{entry.name}': no row is an object with named columns; the first one is {str(first)[:60]!r}",
            hint='every row must look like {"instruction": "...", "output": "..."}',
            key="dataset",
        )
    wanted = ", ".join(" or ".join(f"'{name}'" for name in group) for group in missing)
    listed = list(seen)
    columns = ", ".join(listed[:12]) + (", ..." if len(listed) > 12 else "")
    raise UserError(
        f"dataset '{entry.name}': no row has the column {wanted}; the columns are: {columns}",
        hint=_column_hint(entry, seen),
        key="dataset",
    )


def _column_hint(entry: DatasetEntry, seen: dict[str, None]) -> str:
    if entry.formatting == "alpaca" and ("messages" in seen or "conversations" in seen):
        shape = "openai" if "messages" in seen else "sharegpt"
        return f'these look like conversations: set "formatting": "{shape}" in the entry of dataset_info.json'
    role = "messages" if entry.formatting != "alpaca" else "prompt"
    return f'say which column is which in dataset_info.json, for instance "columns": {{"{role}": "{next(iter(seen))}"}}'
