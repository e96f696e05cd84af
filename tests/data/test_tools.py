from __future__ import annotations

import json

import pytest

from surefoot.data.messages import RowProblem
from surefoot.data.tool_wordings import fill
from surefoot.data.tools import LLAMA3_DATE, TOOL_FORMATS, Call, describe_tools, get_tool_format, write_calls

WEATHER = {
    "name": "weather",
    "description": "Tells {it}",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city"],
    },
}
CALL = {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}
PLAIN, WRAPPED = json.dumps([WEATHER]), json.dumps([{"type": "function", "function": WEATHER}])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_format_writes_the_tool_and_the_call(name: str) -> None:
    described = describe_tools(get_tool_format(name), PLAIN)
    assert all(part in described for part in ("weather", "Tells {it}", "city", "where"))
    assert "{tools}" not in described
    called = write_calls(get_tool_format(name), json.dumps(CALL, ensure_ascii=False))
    assert all(part in called for part in ("weather", "city", "Köln"))


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"seed_oss"}))  # seed_oss quotes its input as it is
def test_a_wrapper_around_a_tool_changes_nothing(name: str) -> None:
    tool_format = get_tool_format(name)
    assert describe_tools(tool_format, WRAPPED) == describe_tools(tool_format, PLAIN)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", 'Action: weather\nAction Input: {"city": "Köln", "days": [1, 2]}'),
        ("glm4", 'weather\n{"city": "Köln", "days": [1, 2]}'),
        ("llama3", '{"name": "weather", "parameters": {"city": "Köln", "days": [1, 2]}}'),
        ("mistral", '[{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}]'),
        ("lfm2", '<|tool_call_start|>[weather(city="Köln", days=[1, 2])]<|tool_call_end|>'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:[1,2]}<tool_call|>'),
        (
            "qwen3_5",
            "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
            "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_calls(name: str, expected: str) -> None:
    assert write_calls(get_tool_format(name), json.dumps(CALL)) == expected


def test_several_calls() -> None:
    two = json.dumps([CALL, {"name": "z", "arguments": {}}])
    assert write_calls(get_tool_format("qwen"), two).count("<tool_call>") == 2
    assert json.loads(write_calls(get_tool_format("llama3"), two))[1] == {"name": "z", "parameters": {}}
    with pytest.raises(RowProblem, match="several calls"):
        write_calls(get_tool_format("glm4"), two)


def test_the_default_format_tells_what_each_argument_may_be() -> None:
    described = describe_tools(get_tool_format("default"), PLAIN)
    assert (
        "> Tool Name: weather\nTool Description: Tells {it}\nTool Args:\n"
        "  - city (string, required): where\n"
        "  - unit (string): , should be one of [C, F]\n"
        "  - days (array): , where each item should be integer\n" in described
    )


def test_the_date_in_the_llama3_prompt_never_moves() -> None:
    assert f"Today Date: {LLAMA3_DATE}\n" in describe_tools(get_tool_format("llama3"), PLAIN)


def test_no_tools_no_text() -> None:
    assert {describe_tools(form, "[]") for form in TOOL_FORMATS.values()} == {""}


@pytest.mark.parametrize("tools", ["[{", '"text"', "[1]", '[{"description": "no name"}]', '{"name": "not a list"}'])
def test_bad_tools_are_a_problem_of_the_row(tools: str) -> None:
    with pytest.raises(RowProblem, match="its tools are not"):
        describe_tools(get_tool_format("default"), tools)


@pytest.mark.parametrize("content", ["weather(Köln)", "[]", "3", '{"name": "weather"}', '[{"arguments": {}}]'])
@pytest.mark.parametrize("name", ["glm4", "qwen3_5"])
def test_bad_calls_are_a_problem_of_the_row(name: str, content: str) -> None:
    if content == "[]" and name != "glm4":
        assert write_calls(get_tool_format(name), content) == ""
        return
    with pytest.raises(RowProblem, match="a function turn"):
        write_calls(get_tool_format(name), content)


def test_arguments_that_are_no_object_are_a_problem_where_they_must_be_one() -> None:
    with pytest.raises(RowProblem):
        write_calls(get_tool_format("qwen3_5"), '{"name": "f", "arguments": [1]}')
    assert TOOL_FORMATS["gemma4"].call([Call("f", [1, None, True])]) == "<|tool_call>call:f{[1,null,true]}<tool_call|>"


def test_filling_leaves_other_braces_alone() -> None:
    assert fill('{a} {"x": 1} {tools} {', tools="{tools}") == '{a} {"x": 1} {tools} {'
