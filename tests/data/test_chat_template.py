from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parity.byte_tokenizers import byte_level_tokenizer
from surefoot.data.chat_template import chat_template_jinja, set_chat_template, template_from_tokenizer
from surefoot.data.messages import Message, RowProblem
from surefoot.data.template import Template, get_template
from surefoot.data.template_table import read_template_table
from surefoot.errors import UserError

TABLE = read_template_table()
TURNS = [("user", "Q1 'x' \\n {{ y }}"), ("assistant", "A1\n\nB"), ("user", "Q2"), ("assistant", "A2")]

LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = LOOP + PROMPT
WITH_DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
ALWAYS_SYSTEM = (
    "{% set ns = namespace(system='', rest=messages) %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content|trim %}"
    "{% set ns.rest = messages[1:] %}{% endif %}"
    "<s><|im_start|>system\nToday: {{ date_string }}\n\n{{ ns.system }}<|im_end|>"
    "{% for m in ns.rest %}<|im_start|>{{ m.role }}\n\n{{ m.content|trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}<s>" + CHATML
IN_USER = (
    "{% set ns = namespace(system='', rest=messages) %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = '<<SYS>>' ~ messages[0].content ~ '<</SYS>>' %}"
    "{% set ns.rest = messages[1:] %}{% endif %}"
    "{% for m in ns.rest %}{% if m.role == 'user' %}"
    "<s>[INST] {{ (ns.system if loop.first else '') ~ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
THINKS_FIRST = LOOP + PROMPT.replace("assistant\n", "assistant\n<think>\n")
EMPTY_THOUGHT_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}" + PROMPT
)
SHOUTS = CHATML.replace("{{ m.content }}", "{{ m.content|upper }}")
GOOD = {
    "chatml": CHATML,
    "default system": WITH_DEFAULT,
    "always a system turn": ALWAYS_SYSTEM,
    "no system": NO_SYSTEM,
    "system in user": IN_USER,
}


def with_chat_template(jinja: str | None, tokenizer: str = "qwen") -> Any:
    loaded = byte_level_tokenizer(tokenizer)
    loaded.chat_template = jinja
    return loaded


def ours(template: Template, turns: list[tuple[str, str]], system: str = "") -> str:
    messages = [Message(role, text) for role, text in turns]  # type: ignore[arg-type]
    return "".join(str(piece) for pieces in template.render(messages, system) for piece in pieces)


def theirs(tokenizer: Any, turns: list[tuple[str, str]], system: str = "", **more: Any) -> str:
    messages = [{"role": role, "content": text} for role, text in [("system", system)] * bool(system) + turns]
    return tokenizer.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024", **more)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("system", ["", "SYS"])
def test_what_is_read_out_of_a_chat_template_writes_the_same(name: str, system: str) -> None:
    tokenizer = with_chat_template(GOOD[name])
    template = template_from_tokenizer(tokenizer)
    if name == "no system" and system:
        with pytest.raises(RowProblem, match="no place"):
            ours(template, TURNS, system)
        return
    for turns in (TURNS, TURNS[:2], [("user", " Q \n"), ("assistant", " A ")]):
        assert ours(template, turns, system) == theirs(tokenizer, turns, system)
    prompt, _ = template.render_oneturn([Message("user", "Q"), Message("assistant", "")], system)
    assert "".join(map(str, prompt)) == theirs(tokenizer, [("user", "Q")], system, add_generation_prompt=True)


def test_what_is_found() -> None:
    found = {name: template_from_tokenizer(with_chat_template(jinja)) for name, jinja in GOOD.items()}
    assert {name: t.default_system for name, t in found.items() if t.default_system} == {"default system": "Be kind."}
    assert [name for name, t in found.items() if t.always_system] == ["always a system turn"]
    assert [name for name, t in found.items() if t.trim_content] == ["always a system turn"]
    assert [name for name, t in found.items() if t.system_in_user] == ["system in user"]
    assert [name for name, t in found.items() if not t.takes_system] == ["no system"]


def test_no_name_takes_the_tokenizers_own_and_the_keys_of_the_person() -> None:
    template = get_template(None, with_chat_template(WITH_DEFAULT), default_system="Be brief.", tool_format="qwen")
    assert (template.name, template.default_system, template.tool_format.name) == ("", "Be brief.", "qwen")
    assert ours(template, TURNS[:1]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


@pytest.mark.parametrize(
    ("jinja", "why"),
    [
        (None, "has no chat template"),
        (THINKS_FIRST, "does not begin where its prompt ends"),
        (EMPTY_THOUGHT_LAST, "does not begin where its prompt ends|otherwise once another turn follows"),
        (SHOUTS, "does not write each turn's text once"),
        ("{{ raise_exception('never') }}", "refuses a conversation of user"),
        (CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"), "does not write each turn's text once"),
        (CHATML + "{% if messages|length > 3 %}!{% endif %}", "otherwise than the first"),
        (CHATML.replace("{{ m.content }}", "{{ m.content|replace('\\n\\n', '\\n') }}"), "some conversations otherwise"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused_with_a_way_out(jinja: str | None, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        template_from_tokenizer(with_chat_template(jinja))
    problem = caught.value.problems[0]
    assert problem.key == "template"
    assert "set `template`" in problem.hint
    assert jinja is None or "qwen" in problem.hint


ROUND_TRIP = [name for name, keys in TABLE.items() if not keys.get("reasoning") and name != "chatglm2"]


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_the_saved_chat_template_writes_what_was_trained(name: str) -> None:
    tokenizer = with_chat_template(None, "plain")
    template = get_template(name, tokenizer)
    template.fix_tokenizer(tokenizer, missing="split")
    tokenizer.chat_template = chat_template_jinja(template, tokenizer)
    texts = {"bos": tokenizer.bos_token, "eos": tokenizer.eos_token}
    for system in ("", "SYS 'q' \\ {{ z }}"):
        for turns in (TURNS, TURNS[:2]):
            rendered = template.render([Message(role, text) for role, text in turns], system)  # type: ignore[arg-type]
            text = "".join(p if isinstance(p, str) else texts.get(p.kind, p.text) for t in rendered for p in t)
            assert theirs(tokenizer, turns, system) == text


def test_turns_are_numbered_in_the_saved_chat_template() -> None:
    tokenizer = with_chat_template(None, "plain")
    tokenizer.chat_template = chat_template_jinja(get_template("chatglm2", tokenizer), tokenizer)
    assert "[Round 0]\n\n问：Q1" in theirs(tokenizer, TURNS)
    assert "[Round 1]\n\n问：Q2" in theirs(tokenizer, TURNS)


def test_a_chat_template_that_is_there_stays_unless_the_template_is_a_general_one() -> None:
    tokenizer = with_chat_template(CHATML)
    set_chat_template(get_template("qwen", tokenizer), tokenizer)
    assert tokenizer.chat_template == CHATML
    set_chat_template(get_template("alpaca", tokenizer), tokenizer)
    assert "### Instruction:" in tokenizer.chat_template
    tokenizer.chat_template = None
    set_chat_template(replace(get_template("qwen", tokenizer), default_system="D"), tokenizer)
    assert theirs(tokenizer, [("user", "Q")]).startswith("<|im_start|>system\nD<|im_end|>\n<|im_start|>user\nQ")
