"""The sentences with which each model family is told of its tools.

Facts of the models, fixed to the letter: {tools}, {names} and {date} are filled in, all other braces are literal.
"""

from __future__ import annotations


def fill(wording: str, **values: str) -> str:
    """Put values into a wording.

    Args:
        wording: one of this module's constants.
        **values: what to put for `{tools}`, `{names}` and `{date}`.

    Returns:
        The text; braces in the values and elsewhere stay as they are.
    """
    head, *rest = wording.split("{")
    for part in rest:
        name, closed, tail = part.partition("}")
        head += values[name] + tail if closed and name in values else "{" + part
    return head


DEFAULT = """\
You have access to the following tools:
{tools}Use the following format if using a tool:
```
Action: tool name (one of [{names}])
Action Input: the input to the tool, in a JSON format representing the kwargs \
(e.g. ```{"input": "hello world", "num_beams": 5}```)
```
"""

GLM4 = """\
你是一个名为 ChatGLM 的人工智能助手。你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，\
你的任务是针对用户的问题和要求提供适当的答复和支持。

# 可用工具{tools}"""

GLM4_AFTER_EACH = "在调用上述函数时，请使用 Json 格式表示调用的参数。"

_SIGNATURES = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{tools}
</tools>

"""

GLM4_MOE = f"""

{_SIGNATURES}\
For each function call, output the function name and arguments within the following XML format:
<tool_call>{{function-name}}
<arg_key>{{arg-key-1}}</arg_key>
<arg_value>{{arg-value-1}}</arg_value>
<arg_key>{{arg-key-2}}</arg_key>
<arg_value>{{arg-value-2}}</arg_value>
...
</tool_call>
"""

_QWEN_CALLS = """\
For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

QWEN = f"\n\n{_SIGNATURES}{_QWEN_CALLS}"

LING = f"{_SIGNATURES}{_QWEN_CALLS}\ndetailed thinking off"

QWEN3_5 = """

# Tools

You have access to the following functions:

<tools>{tools}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""

LLAMA3 = """\
Cutting Knowledge Date: December 2023
Today Date: {date}

You have access to the following functions. To call a function, please respond with JSON for a function call. \
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. \
Do not use variables.

{tools}"""

MINIMAX1 = """\
You are provided with these tools:
<tools>
{tools}</tools>

If you need to call tools, please respond with <tool_calls></tool_calls> XML tags, and provide tool-name and \
json-object of arguments, following the format below:
<tool_calls>
{"name": <tool-name-1>, "arguments": <args-json-object-1>}
...
</tool_calls>"""

MINIMAX2 = """

# Tools

You may call one or more tools to assist with the user query.
Here are the tools available in JSONSchema format:

<tools>
{tools}</tools>

When making tool calls, use XML format to invoke tools and pass parameters:

<minimax:tool_call>
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
<parameter name="param-key-2">param-value-2</parameter>
...
</invoke>
</minimax:tool_call>"""

SEED_OSS = """\
system
You are Doubao, a helpful AI assistant. You may call one or more functions to assist with the user query.\
Tool List:
You are authorized to use the following tools (described in JSON Schema format). Before performing \
any task, you must decide how to call them based on the descriptions and parameters of these tools.{tools}
工具调用请遵循如下格式:
<seed:tool_call>
<function=example_function_name>
<parameter=example_parameter_1>value_1</parameter>
<parameter=example_parameter_2>This is the value for the second parameter
that can span
multiple lines</parameter>
</function>
</seed:tool_call>
"""

LFM2 = "List of tools: <|tool_list_start|>{tools}<|tool_list_end|>"
