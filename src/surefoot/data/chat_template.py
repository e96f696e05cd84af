"""A template from the tokenizer's own jinja chat template, checked, and the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from surefoot.data.messages import Message, RowProblem
from surefoot.data.slots import TURN_NUMBER, Format, Hole, Special
from surefoot.data.special_tokens import fitting_templates
from surefoot.data.template import Template
from surefoot.data.tools import LLAMA3_DATE, get_tool_format
from surefoot.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = tuple[str, str]  # (role, content), as jinja templates see it

# Contents that no template writes on its own. The digit keeps them apart; letters survive any trimming.
SYSTEM, USER, ANSWER, USER_2, ANSWER_2 = ("SurefootProbe" + letter + "0" for letter in "SUAVB")

PROBES: tuple[tuple[Turn, ...], ...] = (
    (("user", "one"), ("assistant", "two")),
    (("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")),
    (("system", "be brief"), ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")),
    (
        ("user", "{{ braces }} and 'quotes' <b>"),
        ("assistant", "line\n\nline é 日本"),
        ("user", "x"),
        ("assistant", "y"),
    ),
)
"""Conversations on which a derived template must write what the chat template writes."""

BLANKS: tuple[Turn, ...] = (("user", "  one\n"), ("assistant", "\n two  "), ("user", "three "), ("assistant", " four"))
"""As PROBES, but some chat templates drop the blank space around a turn's text."""


class _NoTemplateError(Exception):
    """The chat template cannot be taken apart; the text says why."""


def template_from_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Template:
    """Read the format of a conversation out of the tokenizer's chat template.

    The chat template is rendered on probe conversations. What is written for the beginning of a conversation must be
    the beginning of what is written for the whole, and the parts found must write other conversations as it does.
    Tools are written in the default tool format, since a chat template does not say where its own ends.

    Args:
        tokenizer: a transformers tokenizer.

    Returns:
        The template, with the name "".

    Raises:
        UserError: there is no chat template, or it writes earlier turns otherwise once there are later ones.
    """
    if not tokenizer.chat_template:
        raise UserError(
            "`template` is not given, and the model's tokenizer has no chat template of its own",
            hint="set `template` to the name of the model's format; for a base model `default` or `alpaca` will do",
            key="template",
        )
    try:
        parts = _take_apart(tokenizer)
        for trim in (False, True):
            template = _as_template(parts, trim)
            if all(_agree(tokenizer, template, probe) for probe in (*PROBES, BLANKS)):
                return template
        raise _NoTemplateError("it writes some conversations otherwise than the parts that were found in it")
    except _NoTemplateError as problem:
        near = ", ".join(fitting_templates(tokenizer))
        raise UserError(
            f"`template` is not given, and the tokenizer's own chat template cannot be used for training: {problem}",
            hint="set `template` to the name of the model's format"
            + (f"; this tokenizer has the marks of: {near}" if near else ""),
            key="template",
        ) from problem


@dataclass(frozen=True)
class _Parts:
    """The texts between the contents of a conversation."""

    prefix: str
    user: tuple[str, str]  # around the text; the second holds the answer's header
    answer: tuple[str, str]
    system: tuple[str, str] | None  # None = a system text is refused or left out
    system_in_user: bool = False
    always_system: bool = False
    default_system: str = ""


def _render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], prompt: bool = False) -> str:
    import jinja2

    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        # Templates that write today's date take it from `date_string`: the same data must give the same ids tomorrow.
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, date_string=LLAMA3_DATE
            )
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:  # what templates and their helpers raise
        roles = ", ".join(role for role, _ in turns)
        raise _NoTemplateError(f"it refuses a conversation of {roles} ({error})") from error


def _take_apart(tokenizer: PreTrainedTokenizerBase) -> _Parts:
    ask = _render(tokenizer, [("user", USER)], prompt=True)
    one = _render(tokenizer, [("user", USER), ("assistant", ANSWER)])
    two = _render(tokenizer, [("user", USER), ("assistant", ANSWER), ("user", USER_2), ("assistant", ANSWER_2)])
    if not one.startswith(ask):
        raise _NoTemplateError("an answer does not begin where its prompt ends, as with models that must think first")
    if not two.startswith(one):
        raise _NoTemplateError(
            "it writes an answer otherwise once another turn follows, as models do that drop thoughts"
        )
    opening, header = _cut(ask, USER)
    answer = _cut(one[len(ask) :], ANSWER)
    before_user, rest = _cut(two[len(one) :], USER_2)
    if rest != header + answer[0] + ANSWER_2 + answer[1]:
        raise _NoTemplateError("it writes the second turn otherwise than the first")
    if not opening.endswith(before_user):
        raise _NoTemplateError("it opens the first user turn otherwise than later ones")
    parts = _Parts(opening.removesuffix(before_user), (before_user, header), answer, system=None)
    return _find_system(tokenizer, parts)


def _find_system(tokenizer: PreTrainedTokenizerBase, parts: _Parts) -> _Parts:
    """Add what stands around a system text, and what is written when there is none."""
    before_user, header = parts.user
    try:
        text = _render(tokenizer, [("system", SYSTEM), ("user", USER)], prompt=True)
    except _NoTemplateError:
        return parts
    if SYSTEM not in text:
        return parts
    before, rest = _cut(text, SYSTEM)
    between, after = _cut(rest, USER)
    if after != header:
        raise _NoTemplateError("it writes a user turn otherwise once there is a system prompt")
    if before.startswith(parts.prefix + before_user):
        inside = before.removeprefix(parts.prefix + before_user), between
        return replace(parts, system=inside, system_in_user=True)
    if not between.endswith(before_user):
        raise _NoTemplateError("it opens the first user turn otherwise once there is a system prompt")
    closing = between.removesuffix(before_user)
    without = parts.prefix  # what stands there without a system prompt
    if without.startswith(before) and without[len(before) :].endswith(closing) and before:
        # A system turn is written in any case, with a default text or with none.
        default = without[len(before) :].removesuffix(closing)
        return replace(parts, prefix="", system=(before, closing), always_system=not default, default_system=default)
    if before.startswith(without):
        return replace(parts, system=(before.removeprefix(without), closing))
    raise _NoTemplateError("it writes a conversation without a system prompt in another way altogether")


def _cut(text: str, probe: str) -> tuple[str, str]:
    if text.count(probe) != 1:
        raise _NoTemplateError("it does not write each turn's text once, as it is")
    before, _, after = text.partition(probe)
    return before, after


def _as_template(parts: _Parts, trim: bool) -> Template:
    def form(around: tuple[str, str]) -> Format:
        return Format((Hole(*around, numbered=False),))

    return Template(
        name="",
        prefix=Format((parts.prefix,)),
        user=form(parts.user),
        assistant=form(parts.answer),
        system=form(parts.system or ("", "")),
        function=form(parts.answer),
        observation=form(parts.user),
        tool_format=get_tool_format("default"),
        default_system=parts.default_system,
        always_system=parts.always_system,
        system_in_user=parts.system_in_user,
        takes_system=parts.system is not None,
        trim_content=trim,
    )


def _agree(tokenizer: PreTrainedTokenizerBase, template: Template, turns: Sequence[Turn]) -> bool:
    """Whether a derived template writes a conversation as the chat template does."""
    system = turns[0][1] if turns[0][0] == "system" else ""
    if system and not template.takes_system:
        return True
    spoken = [Message("user" if role == "user" else "assistant", text) for role, text in turns if role != "system"]
    try:
        rendered = template.render(spoken, system)
    except RowProblem as problem:
        raise _NoTemplateError(str(problem)) from problem
    return "".join(str(piece) for pieces in rendered for piece in pieces) == _render(tokenizer, turns)


def set_chat_template(template: Template, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer a chat template in the format of the training, so that other programs chat in it.

    A tokenizer keeps the one it has, unless the template is a general one that replaces it (as in LLaMA-Factory).

    Args:
        template: the run's.
        tokenizer: changed in place.
    """
    if not tokenizer.chat_template or template.replace_chat_template:
        tokenizer.chat_template = chat_template_jinja(template, tokenizer)


def chat_template_jinja(template: Template, tokenizer: PreTrainedTokenizerBase) -> str:
    """Write a template as a jinja chat template.

    System, user and assistant turns, without tools and without the empty thoughts of reasoning templates. A user turn
    brings the header of the answer along, whether or not a generation prompt is asked for.

    Args:
        template: the template.
        tokenizer: for the texts of bos and eos.

    Returns:
        The jinja text.
    """

    def write(form: Format, content: str) -> str:
        return " ~ ".join(_jinja_slot(slot, tokenizer, content) for slot in form.slots) or "''"

    system = write(template.system, "system")
    in_user = f"({system} if loop.first and system else '') ~ " if template.system_in_user else ""
    user = write(template.user, f"{in_user}message['content']")
    answer = write(template.assistant, "message['content']")
    lines = [
        f"{{%- set system = {_quote(template.default_system)} -%}}",
        "{%- set turns = messages -%}",
        "{%- if messages and messages[0]['role'] == 'system' -%}",
        "{%- set system = messages[0]['content'] or system -%}{%- set turns = messages[1:] -%}",
        "{%- endif -%}",
        f"{{{{- {write(template.prefix, '')} -}}}}",
        "" if template.system_in_user else f"{{%- if system -%}}{{{{- {system} -}}}}{{%- endif -%}}",
        "{%- for message in turns -%}",
        f"{{%- if message['role'] == 'user' -%}}{{{{- {user} -}}}}",
        f"{{%- elif message['role'] == 'assistant' -%}}{{{{- {answer} -}}}}",
        "{%- endif -%}",
        "{%- endfor -%}",
    ]
    return "\n".join(line for line in lines if line)


def _jinja_slot(slot: str | Special | Hole, tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    if isinstance(slot, Hole):
        before, after = (
            " ~ (loop.index0 // 2) ~ ".join(map(_quote, text.split(TURN_NUMBER))) for text in (slot.before, slot.after)
        )
        return f"{before} ~ {content} ~ {after}"
    if isinstance(slot, Special):
        return _quote({"bos": tokenizer.bos_token, "eos": tokenizer.eos_token, "token": slot.text}[slot.kind] or "")
    return _quote(slot)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
