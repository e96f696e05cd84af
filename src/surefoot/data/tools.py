"""How each model family writes down the tools that it may call, and its calls.

The wordings are the models' own: a tuned model calls tools only in the words that it was taught.
`describe` writes the tools into the system prompt, `call` writes an assistant turn that calls some of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefoot.data import tool_wordings as wordings
from surefoot.data.messages import RowProblem
from surefoot.errors import UserError

Json = dict[str, Any]

LLAMA3_DATE = "26 Jul 2024"
"""The date in the llama3 tool prompt. LLaMA-Factory writes the day of the run, so that the same data give other tokens
tomorrow; this is the day that the model's own chat template falls back to, and it never moves."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool.

    Attributes:
        name: the tool.
        arguments: its arguments, as parsed from JSON.
    """

    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way to write tools.

    Attributes:
        name: as in the YAML's `tool_format`.
        describe: the tools, as the system prompt lists them.
        call: an assistant turn that makes these calls.
    """

    name: str
    describe: Callable[[list[Json]], str]
    call: Callable[[list[Call]], str]

    def __reduce__(self) -> tuple[Callable[[str], ToolFormat], tuple[str]]:
        """Travel to another process by name: functions made by functions cannot be pickled."""
        return get_tool_format, (self.name,)


def get_tool_format(name: str) -> ToolFormat:
    """Look a tool format up by its name.

    Args:
        name: as in the YAML's `tool_format`.

    Returns:
        The format.

    Raises:
        UserError: there is none of that name.
    """
    if name not in TOOL_FORMATS:
        raise UserError(
            f"there is no tool format {name!r}", hint=f"one of: {', '.join(sorted(TOOL_FORMATS))}", key="tool_format"
        )
    return TOOL_FORMATS[name]


def describe_tools(tool_format: ToolFormat, tools: str) -> str:
    """Write a row's tools the way a model family does.

    Args:
        tool_format: the family's.
        tools: the row's tools, a JSON list (a list inside `{"type": "function", "function": …}` wrappers is fine too).

    Returns:
        Text for the system prompt; "" for an empty list.

    Raises:
        RowProblem: the text is not a JSON list of tools with what this format needs.
    """
    parsed = _parse_json(tools, "its tools are not valid JSON")
    if not parsed:
        return ""
    try:
        return tool_format.describe(parsed)
    except (KeyError, AttributeError, TypeError) as error:
        raise RowProblem(
            "its tools are not a list of tool descriptions", f"the {tool_format.name} format misses {error}"
        ) from error


def write_calls(tool_format: ToolFormat, content: str) -> str:
    """Write the calls of a function turn the way a model family does.

    Args:
        tool_format: the family's.
        content: a JSON object, or a list of them, with `name` and `arguments`.

    Returns:
        Text for the assistant turn.

    Raises:
        RowProblem: the text is not JSON of that shape.
    """
    parsed = _parse_json(content, "a function turn is not valid JSON")
    try:
        calls = [Call(c["name"], c["arguments"]) for c in (parsed if isinstance(parsed, list) else [parsed])]
        return tool_format.call(calls)
    except (KeyError, AttributeError, TypeError, IndexError) as error:
        raise RowProblem("a function turn has no name or arguments", f"{error!r} in {content[:200]!r}") from error


def _parse_json(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowProblem(reason, f"{error} in {text[:200]!r}") from error


def _dump(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _dump(value)


def _bare(tool: Json) -> Json:
    """A tool out of its `{"type": "function"}` wrapper."""
    return tool["function"] if tool.get("type") == "function" else tool


def _wrapped(tool: Json) -> Json:
    """A tool inside the wrapper that OpenAI's API uses."""
    return tool if tool.get("type") == "function" else {"type": "function", "function": tool}


def _named_arguments(calls: list[Call], key: str = "arguments") -> list[Json]:
    return [{"name": call.name, key: call.arguments} for call in calls]


# --- default: ReAct-like, for models without a format of their own


def _describe_default(tools: list[Json]) -> str:
    bare = [_bare(tool) for tool in tools]
    listing = "".join(
        f"> Tool Name: {tool['name']}\nTool Description: {tool.get('description', '')}\nTool Args:\n"
        + "".join(_default_argument(tool["parameters"], name) for name in tool["parameters"]["properties"])
        + "\n"
        for tool in bare
    )
    return wordings.fill(wordings.DEFAULT, tools=listing, names=", ".join(tool["name"] for tool in bare))


def _default_argument(parameters: Json, name: str) -> str:
    schema = parameters["properties"][name]
    required = ", required" if name in parameters.get("required", []) else ""
    choices = f", should be one of [{', '.join(schema['enum'])}]" if schema.get("enum") else ""
    items = f", where each item should be {schema['items'].get('type', '')}" if schema.get("items") else ""
    return f"  - {name} ({schema.get('type', '')}{required}): {schema.get('description', '')}{choices}{items}\n"


def _call_default(calls: list[Call]) -> str:
    return "\n".join(f"Action: {call.name}\nAction Input: {_dump(call.arguments)}" for call in calls)


# --- glm4 and glm4_moe


def _describe_glm4(tools: list[Json]) -> str:
    listing = "".join(
        f"\n\n## {tool['name']}\n\n{_dump(tool, indent=4)}\n{wordings.GLM4_AFTER_EACH}" for tool in map(_bare, tools)
    )
    return wordings.fill(wordings.GLM4, tools=listing)


def _call_glm4(calls: list[Call]) -> str:
    if len(calls) > 1:
        raise RowProblem(
            "a function turn makes several calls, which glm4 cannot write", ", ".join(c.name for c in calls)
        )
    return f"{calls[0].name}\n{_dump(calls[0].arguments)}"


def _call_glm4_moe(calls: list[Call]) -> str:
    return "\n".join(
        f"\n<tool_call>{call.name}"
        + "".join(f"\n<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>" for k, v in call.arguments.items())
        for call in calls
    )


# --- llama3, mistral


def _describe_llama3(tools: list[Json]) -> str:
    listing = "".join(_dump(_wrapped(tool), indent=4) + "\n\n" for tool in tools)
    return wordings.fill(wordings.LLAMA3, date=LLAMA3_DATE, tools=listing)


def _call_llama3(calls: list[Call]) -> str:
    written = _named_arguments(calls, "parameters")
    return _dump(written[0] if len(written) == 1 else written)


def _describe_mistral(tools: list[Json]) -> str:
    return f"[AVAILABLE_TOOLS] {_dump([_wrapped(tool) for tool in tools])}[/AVAILABLE_TOOLS]"


# --- qwen, qwen3_5, ling


def _listed(wording: str, unwrap: bool = False) -> Callable[[list[Json]], str]:
    """Tools as JSON, one a line, inside a wording."""

    def describe(tools: list[Json]) -> str:
        shape = _bare if unwrap else _wrapped
        return wordings.fill(wording, tools="".join("\n" + _dump(shape(tool)) for tool in tools))

    return describe


def _call_qwen(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_dump(written)}\n</tool_call>" for written in _named_arguments(calls))


def _call_qwen3_5(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call.name}>"
        + "".join(f"\n<parameter={k}>\n{_text(v)}\n</parameter>" for k, v in call.arguments.items())
        + "\n</function>\n</tool_call>"
        for call in calls
    )


# --- minimax1, minimax2, seed_oss, lfm2


def _describe_minimax1(tools: list[Json]) -> str:
    return wordings.fill(wordings.MINIMAX1, tools="".join(_dump(_bare(tool)) + "\n" for tool in tools))


def _call_minimax1(calls: list[Call]) -> str:
    return "<tool_calls>\n" + "\n".join(map(_dump, _named_arguments(calls))) + "\n</tool_calls>"


def _describe_minimax2(tools: list[Json]) -> str:
    return wordings.fill(wordings.MINIMAX2, tools="".join(f"<tool>{_dump(_bare(tool))}</tool>\n" for tool in tools))


def _call_minimax2(calls: list[Call]) -> str:
    return "\n".join(
        f'<invoke name="{call.name}">'
        + "".join(f'\n<parameter name="{k}">{_text(v)}</parameter>' for k, v in call.arguments.items())
        + "\n</invoke>"
        for call in calls
    )


def _describe_seed_oss(tools: list[Json]) -> str:
    return wordings.fill(wordings.SEED_OSS, tools="\n" + _dump(tools))


def _call_seed_oss(calls: list[Call]) -> str:
    return "\n".join(
        f"\n<seed:tool_call>\n<function={call.name}"
        + "".join(f"\n<parameter={k}>{_text(v)}</parameter>" for k, v in call.arguments.items())
        + "\n</function>\n</seed:tool_call>"
        for call in calls
    )


def _describe_lfm2(tools: list[Json]) -> str:
    return wordings.fill(wordings.LFM2, tools=_dump([_bare(tool) for tool in tools]))


def _call_lfm2(calls: list[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        return f'{key}="{value}"' if isinstance(value, str) else f"{key}={_dump(value)}"

    written = [f"{c.name}({', '.join(argument(k, v) for k, v in c.arguments.items())})" for c in calls]
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


# --- gemma4


def _quoted(text: Any) -> str:
    return f'<|"|>{text}<|"|>'


def _describe_gemma4(tools: list[Json]) -> str:
    return "\n".join(_gemma4_declaration(_bare(tool)) for tool in tools)


def _gemma4_declaration(tool: Json) -> str:
    parts = [f"description:{_quoted(tool.get('description', ''))}"]
    if parameters := tool.get("parameters"):
        inner = []
        if parameters.get("properties"):
            inner.append(f"properties:{{{','.join(map(_gemma4_property, parameters['properties'].items()))}}}")
        if parameters.get("required"):
            inner.append(f"required:[{','.join(map(_quoted, parameters['required']))}]")
        if parameters.get("type"):
            inner.append(f"type:{_quoted(str(parameters['type']).upper())}")
        parts.append(f"parameters:{{{','.join(inner)}}}")
    if response := tool.get("response"):
        inner = [f"description:{_quoted(response['description'])}"] if response.get("description") else []
        if str(response.get("type", "")).upper() == "OBJECT":
            inner.append(f"type:{_quoted('OBJECT')}")
        parts.append(f"response:{{{','.join(inner)}}}")
    return f"declaration:{tool['name']}{{{','.join(parts)}}}"


def _gemma4_property(item: tuple[str, Json]) -> str:
    name, schema = item
    inner = [f"description:{_quoted(schema['description'])}"] if schema.get("description") else []
    if schema.get("type"):
        inner.append(f"type:{_quoted(str(schema['type']).upper())}")
    return f"{name}:{{{','.join(inner)}}}"


def _gemma4_value(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma4_value(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma4_value, value)) + "]"
    return json.dumps(value)


def _call_gemma4(calls: list[Call]) -> str:
    def inside(arguments: Any) -> str:
        if isinstance(arguments, dict):
            return _gemma4_value(arguments)[1:-1]
        return arguments if isinstance(arguments, str) else _gemma4_value(arguments)

    return "".join(f"<|tool_call>call:{call.name}{{{inside(call.arguments)}}}<tool_call|>" for call in calls)


TOOL_FORMATS: dict[str, ToolFormat] = {
    name: ToolFormat(name, describe, call)
    for name, describe, call in (
        ("default", _describe_default, _call_default),
        ("gemma4", _describe_gemma4, _call_gemma4),
        ("glm4", _describe_glm4, _call_glm4),
        ("glm4_moe", _listed(wordings.GLM4_MOE), _call_glm4_moe),
        ("lfm2", _describe_lfm2, _call_lfm2),
        ("ling", _listed(wordings.LING), _call_qwen),
        ("llama3", _describe_llama3, _call_llama3),
        ("minimax1", _describe_minimax1, _call_minimax1),
        ("minimax2", _describe_minimax2, _call_minimax2),
        ("mistral", _describe_mistral, lambda calls: _dump(_named_arguments(calls))),
        ("qwen", _listed(wordings.QWEN), _call_qwen),
        ("qwen3_5", _listed(wordings.QWEN3_5, unwrap=True), _call_qwen3_5),
        ("seed_oss", _describe_seed_oss, _call_seed_oss),
    )
}
