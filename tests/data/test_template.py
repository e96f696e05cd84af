from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from multiprocessing.reduction import ForkingPickler

import pytest

from parity.byte_tokenizers import byte_level_tokenizer
from surefoot.data.messages import Message
from surefoot.data.slots import BOS, EOS, Format, Special, tokenize_pieces
from surefoot.data.template import Template, get_template
from surefoot.data.template_table import read_template_table
from surefoot.errors import UserError

TABLE = read_template_table()
KNOWN_KEYS = {
    "prefix", "system", "user", "assistant", "function", "observation", "system_in_user", "default_system", "stop",
    "replace_eos", "efficient_eos", "marks", "reasoning", "thought", "empty_thought", "tool_call", "tools",
    "tools_text", "trim_lone_tools", "replace_chat_template",
}  # fmt: skip
HELLO = (Message("user", "Q1"), Message("assistant", "A1"))
TWO = (*HELLO, Message("user", "Q2"), Message("assistant", "A2"))
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
TOOLS = '[{"name": "weather", "description": "tells it", "parameters": {"type": "object", "properties": {}}}]'


def written(template: Template, *args: object, **more: object) -> list[tuple[str, str]]:
    """The pairs of a conversation as text, with bos and eos as <BOS> and <EOS>."""
    names = {BOS: "<BOS>", EOS: "<EOS>"}

    def join(pieces: list[str | Special]) -> str:
        return "".join(p if isinstance(p, str) else names.get(p, f"<{p.text}>") for p in pieces)

    return [(join(prompt), join(answer)) for prompt, answer in template.render_turns(*args, **more)]


def thinking(name: str = "qwen3", **changes: object) -> Template:
    return get_template(name, byte_level_tokenizer("qwen"), **changes)


@pytest.mark.parametrize("name", TABLE)
def test_every_table_has_known_keys_and_makes_a_template(name: str) -> None:
    assert set(TABLE[name]) <= KNOWN_KEYS
    template = Template.from_keys(name, TABLE[name])
    text = "".join("".join(pair) for pair in written(template, TWO, "SYS"))
    assert [part in text for part in ("SYS", "Q1", "A1", "Q2", "A2")] == [True] * 5
    assert "{{" not in text
    assert not template.replace_eos or template.stop_words


def test_the_forty_most_used_names_are_there() -> None:
    used = [
        "alpaca",
        "baichuan2",
        "chatglm3",
        "chatml",
        "cohere",
        "deepseek",
        "deepseek3",
        "deepseekcoder",
        "deepseekr1",
        "default",
        "empty",
        "exaone",
        "falcon",
        "fewshot",
        "gemma",
        "gemma2",
        "gemma3",
        "glm4",
        "glm4_moe",
        "gpt_oss",
        "granite3",
        "hunyuan",
        "intern2",
        "kimi_vl",
        "llama2",
        "llama2_zh",
        "llama3",
        "llama4",
        "ministral",
        "mistral",
        "mistral_small",
        "olmo",
        "openchat",
        "phi",
        "phi4",
        "qwen",
        "qwen2_vl",
        "qwen3",
        "qwen3_nothink",
        "qwen3_vl",
        "seed_oss",
        "smollm",
        "smollm2",
        "solar",
        "starchat",
        "vicuna",
        "yi",
        "zephyr",
    ]
    assert set(used) <= set(TABLE)


def test_a_conversation_opens_with_prefix_and_system_once() -> None:
    llama3 = Template.from_keys("llama3", TABLE["llama3"])
    head, end = "<|start_header_id|>", "<|end_header_id|>\n\n"
    ask = f"{head}user{end}Q1<|eot_id|>{head}assistant{end}"
    assert written(llama3, TWO, "SYS") == [
        (f"<BOS>{head}system{end}SYS<|eot_id|>{ask}", "A1<|eot_id|>"),
        (ask.replace("Q1", "Q2"), "A2<|eot_id|>"),
    ]


def test_system_in_the_first_user_turn() -> None:
    llama2 = Template.from_keys("llama2", TABLE["llama2"])
    assert written(llama2, TWO, "SYS") == [
        ("<BOS>[INST] <<SYS>>\nSYS\n<</SYS>>\n\nQ1 [/INST]", "A1<EOS>"),
        ("<BOS>[INST] Q2 [/INST]", "A2<EOS>"),
    ]


def test_turns_are_numbered_from_zero_and_contents_are_never_read_as_slots() -> None:
    chatglm2 = Template.from_keys("chatglm2", TABLE["chatglm2"])
    odd = (Message("user", "{{idx}} {{content}}"), Message("assistant", "{{content}}"), *HELLO)
    (first, answer), (second, _) = written(chatglm2, odd)
    assert first.endswith("[Round 0]\n\n问：{{idx}} {{content}}\n\n答：")
    assert answer == "{{content}}"
    assert second == "[Round 1]\n\n问：Q1\n\n答："


def test_special_pieces_become_one_id_and_none_where_the_tokenizer_has_none() -> None:
    plain, qwen = byte_level_tokenizer("plain"), byte_level_tokenizer("qwen")
    assert tokenize_pieces(plain, [[BOS, "a", EOS, Special("token", "<unk>")]]) == [
        [plain.bos_token_id, plain.convert_tokens_to_ids("a"), plain.eos_token_id, plain.unk_token_id]
    ]
    assert qwen.bos_token_id is None
    assert tokenize_pieces(qwen, [[BOS], [BOS, "a"]]) == [[], [qwen.convert_tokens_to_ids("a")]]


def test_empty_texts_leave_no_piece() -> None:
    assert Format.parse(["{{content}}", "{{eos}}"]).render("") == [EOS]


def test_marks_inside_a_content_become_special_tokens_unless_they_are_split() -> None:
    tokenizer = byte_level_tokenizer("qwen")
    template = get_template("qwen", tokenizer)
    messages = (Message("user", "a<|im_end|>b"), Message("assistant", "c"))
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt, _ = template.encode_oneturn(tokenizer, messages)
    assert prompt.count(im_end) == 3  # the system turn's, the content's and the user turn's own
    tokenizer.split_special_tokens = True
    prompt, _ = template.encode_oneturn(tokenizer, messages)
    assert prompt.count(im_end) == 0
    tokenizer.split_special_tokens = False
    assert template.encode_oneturn(tokenizer, messages)[0].count(im_end) == 3


# --- thoughts

THOUGHT = "<think>\nT\n</think>\n\n"
EMPTY = "<think>\n\n</think>\n\n"
THINKER = (
    Message("user", "Q1"),
    Message("assistant", THOUGHT + "A1"),
    Message("user", "Q2"),
    Message("assistant", "A2"),
)


@pytest.mark.parametrize(
    ("enable", "answers", "thoughts_in_prompts"),
    [
        (True, [f"{THOUGHT}A1", f"{EMPTY}A2"], [False, False]),
        (None, [f"{THOUGHT}A1", "A2"], [False, True]),
        (False, ["A1", "A2"], [True, True]),
    ],
)
def test_an_empty_thought_is_trained_or_given(
    enable: bool | None, answers: list[str], thoughts_in_prompts: list[bool]
) -> None:
    pairs = written(thinking(enable_thinking=enable), THINKER)
    assert [answer.removesuffix("<|im_end|>\n") for _, answer in pairs] == answers
    assert [prompt.endswith(EMPTY) for prompt, _ in pairs] == thoughts_in_prompts


def test_only_the_last_answer_keeps_or_gets_a_thought_when_history_loses_them() -> None:
    pairs = written(thinking(), (*THINKER[:2], *THINKER[2:], *HELLO), drop_history_thoughts=True)
    assert [answer.removesuffix("<|im_end|>\n") for _, answer in pairs] == ["A1", "A2", f"{EMPTY}A1"]


@pytest.mark.parametrize("keep", [True, False])
def test_one_turn_drops_thoughts_of_the_history_unless_told(keep: bool) -> None:
    prompt, answer = thinking(preserve_thinking=keep).render_oneturn((*THINKER, *HELLO))
    assert (THOUGHT in "".join(map(str, prompt))) is keep
    assert answer[0] == EMPTY


def test_a_thought_without_opening_mark_counts_as_one() -> None:
    turns = (Message("user", "Q"), Message("assistant", "T\n</think>\n\nA"))
    assert written(thinking(), turns)[0][1] == "T\n</think>\n\nA<|im_end|>\n"


def test_the_conversation_itself_is_left_as_it_was() -> None:
    turns = list(THINKER)
    thinking(enable_thinking=False).render_turns(turns)
    assert turns == list(THINKER)


def test_templates_without_reasoning_leave_thoughts_alone() -> None:
    pairs = written(thinking("qwen3_nothink", enable_thinking=False), THINKER)
    assert [answer.removesuffix("<|im_end|>\n") for _, answer in pairs] == [f"{THOUGHT}A1", "A2"]


# --- tools


def test_tools_stand_in_the_system_text_and_calls_in_the_answer() -> None:
    turns = (Message("user", "Q"), Message("function", CALL), Message("observation", "R"), Message("assistant", "A"))
    pairs = written(thinking("qwen3_nothink"), turns, "SYS", TOOLS)
    assert pairs[0][0].startswith("<|im_start|>system\nSYS\n\n# Tools\n\n")
    assert pairs[0][1] == ('<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n')
    assert "<tool_response>\nR\n</tool_response>" in pairs[1][0]


def test_what_is_said_around_a_call_stays() -> None:
    thought = Message("function", THOUGHT + CALL)
    said = Message("function", f"I look.<tool_call>{CALL}</tool_call>")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n'
    assert [written(thinking(), (Message("user", "Q"), turn))[0][1] for turn in (thought, said)] == [
        THOUGHT + call,
        f"{EMPTY}I look.{call}",
    ]


def test_tool_format_and_default_system_of_the_person() -> None:
    template = thinking("qwen", tool_format="llama3", default_system="")
    turns = (Message("user", "Q"), Message("function", CALL))
    assert written(template, turns) == [
        (
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
            '{"name": "weather", "parameters": {"city": "Köln"}}<EOS>',
        )
    ]


def test_moss_vl_alone_trims_tools_that_have_no_system_text() -> None:
    def opening(name: str, system: str) -> str:
        return written(thinking(name), HELLO, system, TOOLS)[0][0]

    assert opening("moss_vl", "").startswith("<|im_start|>system\n# Tools")
    assert opening("moss_vl", "SYS").startswith("<|im_start|>system\nSYS\n\n# Tools")
    assert opening("qwen3", "").startswith("<|im_start|>system\n\n\n# Tools")


# --- the choice


def test_an_unknown_name_names_its_neighbours() -> None:
    with pytest.raises(UserError) as caught:
        get_template("lama3", byte_level_tokenizer("plain"))
    problem = caught.value.problems[0]
    assert problem.key == "template"
    assert "'lama3'" in problem.message
    assert "llama3" in problem.hint


def test_an_unknown_tool_format_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'react'[\s\S]*default, gemma4, glm4"):
        get_template("qwen", byte_level_tokenizer("plain"), tool_format="react")


def test_a_template_cannot_be_changed_and_travels_to_other_processes() -> None:
    template = thinking()
    with pytest.raises(FrozenInstanceError):
        template.enable_thinking = False  # type: ignore[misc]
    assert ForkingPickler.loads(ForkingPickler.dumps(template)) == template
    assert replace(template, enable_thinking=False) != template


def test_rendering_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, surefoot.data.encode, surefoot.data.pretrain, surefoot.data.packing, surefoot.data.chat_template;"
        "sys.exit(', '.join({'torch', 'transformers', 'datasets', 'jinja2'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
