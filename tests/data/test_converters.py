"""Rows of the three formats: what they become, and under which name the unusable ones are dropped."""

from __future__ import annotations

import json

import pytest

from surefoot.data.catalog import Columns, DatasetEntry, Tags
from surefoot.data.converters import make_converter, required_columns
from surefoot.data.messages import Message, RowProblem

OPENAI = {
    "columns": Columns(messages="messages", tools="tools"),
    "tags": Tags(
        role_tag="role", content_tag="content", user_tag="user", assistant_tag="assistant", observation_tag="tool"
    ),
}


def entry(formatting="alpaca", **fields):
    return DatasetEntry(name="d", kind="file", place="x", formatting=formatting, **fields)


def convert(row, formatting="alpaca", stage="sft", **fields):
    return make_converter(entry(formatting, **fields), stage)(row, "d:7")


def shape(example):
    """[system, (role, content)...] in order, the answer last."""
    return [example.system, *((m.role, m.content) for m in (*example.prompt, *example.response))]


def said(*contents):
    return {"conversations": [{"from": who, "value": text} for who, text in contents]}


@pytest.mark.parametrize(
    ("instruction", "query", "user"),
    [("I", "X", "I\nX"), ("I", "", "I"), ("", "X", "X"), ("", "", ""), ("I", None, "I"), (None, "X", "X")],
)
def test_alpaca_joins_instruction_and_input_by_one_line_break(instruction, query, user):
    example = convert({"instruction": instruction, "input": query, "output": "O"})
    assert shape(example) == ["", ("user", user), ("assistant", "O")]
    assert example.row_id == "d:7" and len(example.response) == 1


def test_alpaca_without_an_input_column_in_the_row():
    assert shape(convert({"instruction": "I", "output": "O"}))[1] == ("user", "I")


def test_alpaca_history_system_and_tools():
    columns = Columns(history="h", system="s", tools="t")
    row = {"instruction": "Q3", "output": "A3", "h": [["Q1", "A1"], ("Q2", "A2")], "s": "S", "t": [{"name": "f"}]}
    example = convert(row, columns=columns)
    assert shape(example) == [
        "S",
        ("user", "Q1"),
        ("assistant", "A1"),
        ("user", "Q2"),
        ("assistant", "A2"),
        ("user", "Q3"),
        ("assistant", "A3"),
    ]
    assert json.loads(example.tools) == [{"name": "f"}]
    assert convert({**row, "s": None, "t": None, "h": None}, columns=columns).system == ""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "I"}, "no answer"),
        ({"instruction": "I", "output": ""}, "no answer"),
        ({"instruction": "I", "output": " \n"}, "no answer"),
        ({"instruction": "I", "output": None}, "null content"),
        ({"instruction": None, "output": "O"}, "null content"),
        ({"output": "O"}, "null content"),
        ({"instruction": "I", "output": ["O"]}, "wrong type"),
        ({"instruction": 5, "output": "O"}, "wrong type"),
        ({"instruction": "I", "output": "O", "h": "text"}, "wrong type"),
        ({"instruction": "I", "output": "O", "h": [["Q1"]]}, "broken turns"),
        ({"instruction": "I", "output": "O", "h": [["Q1", None]]}, "null content"),
        ({"instruction": "I", "output": "O", "pic": ["a.png"]}, "images, sound or video"),
        ("text", "wrong type"),
        (None, "null content"),
    ],
)
def test_unusable_alpaca_rows_have_a_named_reason(row, reason):
    with pytest.raises(RowProblem) as problem:
        convert(row, columns=Columns(history="h", images="pic"))
    assert problem.value.reason == reason


def test_sharegpt_system_turn_wins_over_the_column():
    row = {**said(("system", "turn"), ("human", "Q"), ("gpt", "A")), "sys": "column"}
    assert shape(convert(row, "sharegpt", columns=Columns(system="sys"))) == ["turn", ("user", "Q"), ("assistant", "A")]
    row = {**said(("human", "Q"), ("gpt", "A")), "sys": "column"}
    assert shape(convert(row, "sharegpt", columns=Columns(system="sys")))[0] == "column"


def test_sharegpt_tool_turns():
    row = said(("human", "Q"), ("function_call", "{}"), ("observation", "42"), ("gpt", "A"))
    example = convert(row, "sharegpt")
    assert [m.role for m in example.prompt] == ["user", "function", "observation"]
    assert example.response == (Message("assistant", "A"),)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (said(("gpt", "A"), ("human", "Q")), "broken turns"),
        (said(("human", "Q"), ("gpt", "A"), ("human", "Q")), "broken turns"),
        (said(("human", "Q"), ("human", "Q")), "broken turns"),
        (said(("human", "Q"), ("system", "S")), "broken turns"),
        (said(("human", "Q"), ("bing", "A")), "unknown role"),
        (said(("human", "Q"), (None, "A")), "unknown role"),
        (said(("human", "Q"), ("gpt", None)), "null content"),
        (said(("human", "Q"), ("gpt", "")), "no answer"),
        (said(("human", 5), ("gpt", "A")), "wrong type"),
        (said(("system", "S")), "empty conversation"),
        (said(), "empty conversation"),
        ({}, "empty conversation"),
        ({"conversations": None}, "empty conversation"),
        ({"conversations": "text"}, "wrong type"),
        ({"conversations": ["text", "text"]}, "wrong type"),
        ({"conversations": [{}, {}]}, "unknown role"),
        ({"conversations": [{"from": "human"}, {"from": "gpt", "value": "A"}]}, "null content"),
        ({"conversations": [{"from": ["human"], "value": "Q"}]}, "unknown role"),
    ],
)
def test_unusable_sharegpt_rows_have_a_named_reason(row, reason):
    with pytest.raises(RowProblem) as problem:
        convert(row, "sharegpt")
    assert problem.value.reason == reason


def chat(*turns, **more):
    return {"messages": [dict(zip(("role", "content"), turn, strict=True)) for turn in turns], **more}


def test_openai_leaves_the_system_prompt_alone():
    assert shape(convert(chat(("user", "Q"), ("assistant", "A")), "openai", **OPENAI))[0] == ""
    row = chat(("system", "S"), ("user", "Q"), ("assistant", "A"))
    assert shape(convert(row, "openai", **OPENAI))[0] == "S"


def test_openai_tool_calls_and_merged_tool_answers():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    row = chat(("user", "Q"), ("assistant", None), ("tool", "one"), ("tool", "two"), ("assistant", "A"))
    row["messages"][1]["tool_calls"] = [call]
    row["messages"][4]["tool_calls"] = None
    row["tools"] = [{"type": "function"}]
    example = convert(row, "openai", **OPENAI)
    assert shape(example) == [
        "",
        ("user", "Q"),
        ("function", '[{"name": "f", "arguments": "{\\"x\\": \\"é\\"}"}]'),
        ("observation", "one\n</tool_response>\n<tool_response>\ntwo"),
        ("assistant", "A"),
    ]
    assert example.tools == '[{"type": "function"}]'


def test_openai_content_in_text_parts():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert shape(convert(chat(("user", parts), ("assistant", "A")), "openai", **OPENAI))[1] == ("user", "one two")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat(("user", "Q"), ("tool", "42"), ("assistant", "A")), "broken turns"),
        (chat(("user", "Q"), ("assistant", "A"), ("tool", "42")), "broken turns"),
        (chat(("user", [{"type": "image_url"}]), ("assistant", "A")), "images, sound or video"),
        (chat(("user", ["text"]), ("assistant", "A")), "wrong type"),
        (chat(("user", "Q"), ("assistant", None)), "null content"),
        (chat(("developer", "Q"), ("assistant", "A")), "unknown role"),
        ({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "tool_calls": ["f"]}]}, "wrong type"),
        ({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "tool_calls": "f"}]}, "wrong type"),
    ],
)
def test_unusable_openai_rows_have_a_named_reason(row, reason):
    with pytest.raises(RowProblem) as problem:
        convert(row, "openai", **OPENAI)
    assert problem.value.reason == reason


@pytest.mark.parametrize(
    ("row", "formatting", "columns", "text"),
    [
        ({"text": "T"}, "alpaca", Columns(), "T"),
        ({"instruction": "I", "input": "X", "output": "O"}, "alpaca", Columns(), "I\nX"),
        ({"body": "B", "text": "T"}, "alpaca", Columns(prompt="body"), "B"),
        (said(("human", "Q"), ("gpt", "A")), "sharegpt", Columns(), "Q"),
    ],
)
def test_plain_text_is_the_prompt(row, formatting, columns, text):
    example = convert(row, formatting, "pt", columns=columns)
    assert example.prompt == (Message("user", text),) and example.response == ()


@pytest.mark.parametrize(
    ("row", "reason"),
    [({"text": " "}, "no text"), ({"text": None}, "null content"), ({"text": 5}, "wrong type"), ({}, "null content")],
)
def test_unusable_plain_text_has_a_named_reason(row, reason):
    with pytest.raises(RowProblem) as problem:
        convert(row, stage="pt")
    assert problem.value.reason == reason


def test_required_columns():
    assert required_columns(entry(), "sft") == [("instruction", "input"), ("output",)]
    assert required_columns(entry(), "pt") == [("instruction", "input", "text")]
    assert required_columns(entry("sharegpt"), "sft") == [("conversations",)]
    named = entry(columns=Columns(prompt="q", system="s"), written_columns=("prompt", "system"))
    assert required_columns(named, "sft") == [("q",), ("s",), ("q", "input"), ("output",)]
