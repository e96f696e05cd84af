"""A row of a source format becomes an `Example`, or is dropped for a reason that has a name.

Deviations from LLaMA-Factory, on purpose: a row whose last answer is empty is dropped (there, the model learns to
answer nothing); tool answers after the last turn make a row broken (there, they vanish); `formatting: openai` leaves
the system prompt as it is (there, "detailed thinking off" is added); a column that a row lacks counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from surefoot.data.catalog import DatasetEntry, Tags
from surefoot.data.messages import Example, Message, Role, RowProblem

NO_ANSWER = "no answer"
NULL_CONTENT = "null content"
BROKEN_TURNS = "broken turns"
UNKNOWN_ROLE = "unknown role"
EMPTY_CONVERSATION = "empty conversation"
WRONG_TYPE = "wrong type"
EMPTY_TEXT = "no text"
NOT_TEXT = "images, sound or video"

Convert = Callable[[Any, str], Example]

_ASKING: tuple[Role, ...] = ("user", "observation")
_BETWEEN_TOOL_ANSWERS = "\n</tool_response>\n<tool_response>\n"  # what LLaMA-Factory's templates expect inside one turn


def make_converter(entry: DatasetEntry, stage: str) -> Convert:
    """Choose how a dataset's rows are read.

    Args:
        entry: the dataset.
        stage: `sft`, or `pt` for plain text.

    Returns:
        A function of a row and its id; it raises RowProblem for a row that cannot be used.
    """
    if stage == "pt":
        return lambda row, row_id: _plain_text(row, row_id, entry)
    convert = {"alpaca": _alpaca, "sharegpt": _sharegpt, "openai": _openai}[entry.formatting]
    return lambda row, row_id: convert(row, row_id, entry)


def required_columns(entry: DatasetEntry, stage: str) -> list[tuple[str, ...]]:
    """List the columns that some row of the dataset must have.

    Args:
        entry: the dataset.
        stage: `sft` or `pt`.

    Returns:
        Groups of column names; of each group one must be there. Columns that the catalogue spells out stand alone.
    """
    columns = entry.columns
    written = {getattr(columns, name) for name in entry.written_columns}
    needed: list[tuple[str, ...]] = [(name,) for name in sorted(written)]
    if entry.formatting != "alpaca":
        needed.append(_present(columns.messages))
    elif stage == "pt":
        needed.append(_present(columns.prompt, columns.query, _text_column(entry)))
    else:
        needed += [_present(columns.prompt, columns.query), _present(columns.response)]
    return [group for group in dict.fromkeys(needed) if group]


def _present(*names: str | None) -> tuple[str, ...]:
    return tuple(name for name in names if name)


def _text_column(entry: DatasetEntry) -> str | None:
    """Plain text is usually in `text`; that name is tried where the catalogue names no prompt column."""
    return None if "prompt" in entry.written_columns else "text"


def _plain_text(row: Any, row_id: str, entry: DatasetEntry) -> Example:
    if entry.formatting == "alpaca":
        row = _object(row)
        parts = [row.get(name) for name in _present(entry.columns.prompt, entry.columns.query)]
        text_column = _text_column(entry)
        if not any(parts) and text_column in row:
            parts = [row[text_column]]
        if parts and all(part is None for part in parts):
            raise RowProblem(NULL_CONTENT)
        text = "\n".join(_text(part) for part in parts if part)
    else:
        _, turns = _conversation(_object(row), entry)
        text = turns[0].content
    if not text.strip():
        raise RowProblem(EMPTY_TEXT)
    return Example(row_id, (Message("user", text),), ())


def _alpaca(row: Any, row_id: str, entry: DatasetEntry) -> Example:
    row, columns = _object(row), entry.columns
    prompt: list[Message] = []
    if columns.history and row.get(columns.history):
        prompt += _history(row[columns.history])
    asked = [row.get(name) for name in _present(columns.prompt, columns.query)]
    if asked and all(part is None for part in asked):
        raise RowProblem(NULL_CONTENT)
    prompt.append(Message("user", "\n".join(_text(part) for part in asked if part)))
    _refuse_media(row, entry)
    if not columns.response or columns.response not in row:
        raise RowProblem(NO_ANSWER)
    answer = Message("assistant", _text(row[columns.response]))
    return _finish(row, row_id, entry, "", [*prompt, answer])


def _history(pairs: Any) -> Iterable[Message]:
    if not isinstance(pairs, (list, tuple)):
        raise RowProblem(WRONG_TYPE)
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowProblem(BROKEN_TURNS)
        yield Message("user", _text(pair[0]))
        yield Message("assistant", _text(pair[1]))


def _sharegpt(row: Any, row_id: str, entry: DatasetEntry) -> Example:
    row = _object(row)
    system, turns = _conversation(row, entry)
    return _finish(row, row_id, entry, system, turns)


def _openai(row: Any, row_id: str, entry: DatasetEntry) -> Example:
    row = _object(row)
    system, turns = _conversation(row, entry, read_turn=_openai_turn)
    merged: list[Message] = []
    for turn in turns:
        if turn.role == "observation" and merged and merged[-1].role == "observation":
            merged[-1] = Message("observation", merged[-1].content + _BETWEEN_TOOL_ANSWERS + turn.content)
        else:
            merged.append(turn)
    return _finish(row, row_id, entry, system, merged)


def _conversation(
    row: dict[str, Any], entry: DatasetEntry, read_turn: Callable[[dict[str, Any], Role, Tags], Message] | None = None
) -> tuple[str, list[Message]]:
    """Read the system prompt that a conversation may begin with, and its turns."""
    turns = row.get(entry.columns.messages or "")
    if turns is None or (isinstance(turns, (list, tuple)) and not turns):
        raise RowProblem(EMPTY_CONVERSATION)
    if not isinstance(turns, (list, tuple)) or not all(isinstance(turn, dict) for turn in turns):
        raise RowProblem(WRONG_TYPE)
    tags = entry.tags
    roles = _roles(tags)
    system = ""
    if tags.system_tag and turns[0].get(tags.role_tag) == tags.system_tag:
        system, turns = _text(turns[0].get(tags.content_tag)), turns[1:]
    if not turns:
        raise RowProblem(EMPTY_CONVERSATION)
    messages = []
    for turn in turns:
        speaker = turn.get(tags.role_tag)
        if not isinstance(speaker, str) or speaker not in roles:
            # A system turn in a later place is a known role out of its place.
            raise RowProblem(BROKEN_TURNS if speaker and speaker == tags.system_tag else UNKNOWN_ROLE)
        role = roles[speaker]
        messages.append(read_turn(turn, role, tags) if read_turn else Message(role, _text(turn.get(tags.content_tag))))
    return system, messages


def _roles(tags: Tags) -> dict[str, Role]:
    named: tuple[tuple[str | None, Role], ...] = (
        (tags.function_tag, "function"),
        (tags.observation_tag, "observation"),
        (tags.assistant_tag, "assistant"),
        (tags.user_tag, "user"),
    )
    return {tag: role for tag, role in named if tag}


def _openai_turn(turn: dict[str, Any], role: Role, tags: Tags) -> Message:
    calls = turn.get("tool_calls")
    if role in ("assistant", "function") and calls:
        if not isinstance(calls, (list, tuple)):
            raise RowProblem(WRONG_TYPE)
        functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
        if not all(isinstance(function, dict) for function in functions):
            raise RowProblem(WRONG_TYPE)
        return Message("function", json.dumps(functions, ensure_ascii=False))
    content = turn.get(tags.content_tag)
    if isinstance(content, (list, tuple)):
        content = _join_parts(content)
    return Message(role, _text(content))


def _join_parts(parts: Iterable[Any]) -> str:
    """OpenAI's content in parts; only text parts can be trained."""
    texts = []
    for part in parts:
        if not isinstance(part, dict) or "type" not in part:
            raise RowProblem(WRONG_TYPE)
        if part["type"] != "text":
            raise RowProblem(NOT_TEXT)
        texts.append(_text(part.get("text")))
    return "".join(texts)


def _finish(row: dict[str, Any], row_id: str, entry: DatasetEntry, system: str, turns: list[Message]) -> Example:
    """Check that the turns alternate and end with an answer; add the system prompt and the tools."""
    _refuse_media(row, entry)
    if len(turns) % 2 or any((turn.role in _ASKING) != (place % 2 == 0) for place, turn in enumerate(turns)):
        raise RowProblem(BROKEN_TURNS)
    if not turns[-1].content.strip():
        raise RowProblem(NO_ANSWER)
    columns = entry.columns
    if not system and columns.system and row.get(columns.system):
        system = _text(row[columns.system])
    tools = row.get(columns.tools) if columns.tools else ""
    if isinstance(tools, (dict, list)):
        tools = json.dumps(tools, ensure_ascii=False) if tools else ""
    return Example(row_id, tuple(turns[:-1]), (turns[-1],), system, _text(tools or ""))


def _refuse_media(row: dict[str, Any], entry: DatasetEntry) -> None:
    columns = entry.columns
    if any(row.get(name) for name in _present(columns.images, columns.videos, columns.audios)):
        raise RowProblem(NOT_TEXT)


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RowProblem(NULL_CONTENT if row is None else WRONG_TYPE)
    return row


def _text(value: Any) -> str:
    if value is None:
        raise RowProblem(NULL_CONTENT)
    if not isinstance(value, str):
        raise RowProblem(WRONG_TYPE)
    return value
