"""Templates: from a conversation to the pieces and token ids that a model family expects."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from surefoot.data.messages import Message, RowProblem
from surefoot.data.slots import Format, Piece, Special, tokenize_pieces
from surefoot.data.special_tokens import MissingMarks, fix_tokenizer
from surefoot.data.template_table import Keys, read_template_table
from surefoot.data.thinking import ThoughtMarks
from surefoot.data.tools import ToolFormat, describe_tools, get_tool_format, write_calls
from surefoot.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TurnPair = tuple[list[Piece], list[Piece]]
"""A prompt (user or observation turn, with all that comes before it) and the answer to it."""


@dataclass(frozen=True)
class Template:
    """How one model family writes a conversation. Never changed: `dataclasses.replace` makes another.

    Attributes:
        name: as in the YAML's `template`; "" for one that was read from a tokenizer.
        user: a user turn, up to and including the header of the answer.
        assistant: the answer to it.
        system: the system turn.
        function: an answer that calls tools.
        observation: a turn with the tools' results, up to and including the header of the answer.
        tool_format: how tools and calls are written.
        prefix: what stands before everything.
        tools_text: the slot into which the tools go as they are, for families that take plain JSON.
        default_system: the system text of rows that have none.
        system_in_user: the system text is part of the first user turn.
        takes_system: False when there is no place for a system text at all.
        always_system: the system turn is written even when there is no text for it.
        stop_words: words that end an answer.
        marks: other strings that must be single tokens.
        replace_eos: the first stop word becomes the eos token.
        efficient_eos: eos is not written after each answer but learned there, and written once at the end.
        replace_chat_template: the saved tokenizer gets this format as its chat template even if it has another.
        reasoning: answers begin with a thought.
        thought: the marks of a thought.
        tool_call: marks of a call inside a longer function turn.
        trim_lone_tools: no line breaks before the tools when there is no system text.
        trim_content: blank space around each turn's text is dropped.
        enable_thinking: for reasoning templates, the YAML's key. True: an answer without a thought gets an empty one,
            which is trained; None: it gets one that is not trained; False: that, and existing thoughts are taken out.
        preserve_thinking: keep the thoughts of earlier answers where they would be taken out of the history.
    """

    name: str
    user: Format
    assistant: Format
    system: Format
    function: Format
    observation: Format
    tool_format: ToolFormat
    prefix: Format = field(default_factory=lambda: Format(()))
    tools_text: Format | None = None
    default_system: str = ""
    system_in_user: bool = False
    takes_system: bool = True
    always_system: bool = False
    stop_words: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    replace_eos: bool = False
    efficient_eos: bool = False
    replace_chat_template: bool = False
    reasoning: bool = False
    thought: ThoughtMarks = field(default_factory=ThoughtMarks)
    tool_call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    trim_lone_tools: bool = False
    trim_content: bool = False
    enable_thinking: bool | None = True
    preserve_thinking: bool = False

    @classmethod
    def from_keys(cls, name: str, keys: Keys) -> Template:
        """Build a template from its keys.

        Args:
            name: its name.
            keys: as templates.toml explains them.

        Returns:
            The template.
        """
        efficient_eos = keys.get("efficient_eos", False)
        user = keys.get("user", "{{content}}")
        assistant = keys.get("assistant", _bare_answer(efficient_eos))
        opening, closing = keys.get("thought", ("<think>\n", "\n</think>\n\n"))
        return cls(
            name=name,
            user=Format.parse(user),
            assistant=Format.parse(assistant),
            system=Format.parse(keys.get("system", "{{content}}")),
            function=Format.parse(keys.get("function", assistant)),
            observation=Format.parse(keys.get("observation", user)),
            prefix=Format.parse(keys.get("prefix", [])),
            tool_format=get_tool_format(keys.get("tools", "default")),
            tools_text=Format.parse(keys["tools_text"]) if "tools_text" in keys else None,
            stop_words=tuple(keys.get("stop", ())),
            marks=tuple(keys.get("marks", ())),
            efficient_eos=efficient_eos,
            thought=ThoughtMarks(opening, closing, keys.get("empty_thought", "")),
            tool_call=tuple(keys.get("tool_call", ("<tool_call>", "</tool_call>"))),
            **{key: keys[key] for key in _PLAIN_KEYS if key in keys},
        )

    def render(self, messages: Sequence[Message], system: str = "", tools: str = "") -> list[list[Piece]]:
        """Write a conversation, turn by turn; thoughts are left as they are.

        Args:
            messages: prompt turns and answers by turns.
            system: the system text; "" takes the template's default.
            tools: a JSON list of tools, or "".

        Returns:
            The pieces of each turn; prefix and system text are part of the first.

        Raises:
            RowProblem: the row says something that this template cannot write.
        """
        rendered = []
        for i, message in enumerate(messages):
            pieces: list[Piece] = []
            content = message.content.strip() if self.trim_content else message.content
            if i == 0:
                pieces, before = self._opening(system, tools)
                content = before + content
            rendered.append(pieces + self._turn(message.role, content, i // 2))
        return rendered

    def render_turns(
        self, messages: Sequence[Message], system: str = "", tools: str = "", *, drop_history_thoughts: bool = False
    ) -> list[TurnPair]:
        """Write a conversation for training on every answer.

        Args:
            messages: an even number of turns; every second one is an answer.
            system: the system text; "" takes the template's default.
            tools: a JSON list of tools, or "".
            drop_history_thoughts: take the thoughts out of all answers but the last (reasoning templates only).

        Returns:
            One (prompt, answer) pair for each answer.

        Raises:
            RowProblem: the row says something that this template cannot write.
        """
        last = len(messages) - 1
        if self.reasoning and self.enable_thinking is False:
            messages = self.thought.strip_turns(messages, range(1, last + 1, 2))
        if self.reasoning and drop_history_thoughts:
            messages = self.thought.strip_turns(messages, range(1, last - 1, 2))
        rendered = self.render(messages, system, tools)
        pairs = [(rendered[i], rendered[i + 1]) for i in range(0, len(rendered), 2)]
        if self.reasoning:
            for i in [last] if drop_history_thoughts else range(1, last + 1, 2):
                pairs[i // 2] = self._with_thought(*pairs[i // 2], messages[i].content)
        return pairs

    def render_oneturn(self, messages: Sequence[Message], system: str = "", tools: str = "") -> TurnPair:
        """Write a conversation as one prompt and its answer; earlier answers lose their thoughts.

        Args:
            messages: an even number of turns; the last is the answer, "" where there is none yet.
            system: the system text; "" takes the template's default.
            tools: a JSON list of tools, or "".

        Returns:
            The prompt, which is all but the last turn, and the answer.

        Raises:
            RowProblem: the row says something that this template cannot write.
        """
        last = len(messages) - 1
        if self.reasoning and not self.preserve_thinking:
            messages = self.thought.strip_turns(messages, range(1, last - 1, 2))
        if self.reasoning and self.enable_thinking is False:
            messages = self.thought.strip_turns(messages, [last])
        *history, answer = self.render(messages, system, tools)
        prompt = [piece for turn in history for piece in turn]
        return self._with_thought(prompt, answer, messages[last].content) if self.reasoning else (prompt, answer)

    def encode_turns(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        system: str = "",
        tools: str = "",
        *,
        drop_history_thoughts: bool = False,
    ) -> list[tuple[list[int], list[int]]]:
        """The token ids of `render_turns`: one (prompt, answer) pair for each answer."""
        pairs = self.render_turns(messages, system, tools, drop_history_thoughts=drop_history_thoughts)
        ids = tokenize_pieces(tokenizer, [side for pair in pairs for side in pair])
        return [(ids[i], ids[i + 1]) for i in range(0, len(ids), 2)]

    def encode_oneturn(
        self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], system: str = "", tools: str = ""
    ) -> tuple[list[int], list[int]]:
        """The token ids of `render_oneturn`: the prompt, and the answer to it."""
        prompt, answer = tokenize_pieces(tokenizer, self.render_oneturn(messages, system, tools))
        return prompt, answer

    def _opening(self, system: str, tools: str) -> tuple[list[Piece], str]:
        """What stands before the first turn, and what stands at the beginning of its content."""
        system = system or self.default_system
        pieces = self.prefix.render()
        if not system and not tools and not self.always_system:
            return pieces, ""
        if not self.takes_system:
            raise RowProblem("it has a system prompt or tools, for which the chat template has no place")
        tools_text = self._tools_text(tools) if tools else ""
        if self.trim_lone_tools and not system:
            tools_text = tools_text.lstrip("\n")
        written = self.system.render((system.strip() if self.trim_content else system) + tools_text)
        if self.system_in_user:
            return pieces, "".join(piece for piece in written if isinstance(piece, str))
        return pieces + written, ""

    def _tools_text(self, tools: str) -> str:
        if self.tools_text is not None:
            return "".join(piece for piece in self.tools_text.render(tools) if isinstance(piece, str))
        return describe_tools(self.tool_format, tools)

    def _turn(self, role: str, content: str, turn: int) -> list[Piece]:
        if role == "user":
            return self.user.render(content, turn)
        if role == "assistant":
            return self.assistant.render(content, turn)
        if role == "observation":
            return self.observation.render(content, turn)
        return self.function.render(self._calls(content), turn)

    def _calls(self, content: str) -> str:
        """A function turn's text: what is said around the call stays, the call itself is written in the format."""
        opening, closing = self.tool_call
        marked = re.search(re.escape(opening) + "(.*?)" + re.escape(closing), content, re.DOTALL)
        if marked:
            return content.replace(marked.group(0), "") + write_calls(self.tool_format, marked.group(1))
        thought = self.thought.find(content)
        return thought + write_calls(self.tool_format, content.replace(thought, "") if thought else content)

    def _with_thought(self, prompt: list[Piece], answer: list[Piece], content: str) -> TurnPair:
        """Add an empty thought to an answer that has none: to the answer, which is trained, or to the prompt."""
        if self.thought.is_in(content):
            return prompt, answer
        if self.enable_thinking:
            return prompt, [self.thought.empty_thought, *answer]
        return [*prompt, self.thought.empty_thought], answer

    def single_tokens(self) -> list[str]:
        """Every string that must be one token: stop words, marks, and the tokens that slots name."""
        formats = (self.prefix, self.system, self.user, self.assistant, self.function, self.observation)
        named = [s.text for f in formats for s in f.slots if isinstance(s, Special) and s.kind == "token"]
        return list(dict.fromkeys([*self.stop_words, *self.marks, *named]))

    def fix_tokenizer(self, tokenizer: PreTrainedTokenizerBase, *, missing: MissingMarks = "refuse") -> list[str]:
        """Set eos, pad and stop words of a tokenizer as this template needs them.

        Args:
            tokenizer: changed in place.
            missing: what to do when the tokenizer lacks a stop word or mark. "refuse": an error. "add": add it as a new
                token, for `resize_vocab: true`. "split": add stop words only and let marks fall into pieces, as
                LLaMA-Factory does.

        Returns:
            The tokens that were added to the vocabulary.

        Raises:
            UserError: a stop word or mark is missing, and `missing` is "refuse".
        """
        return fix_tokenizer(self, tokenizer, missing)

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The ids that end an answer: eos and the stop words that the tokenizer has."""
        ids: list[Any] = [tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, self.stop_words)]
        return list(dict.fromkeys(i for i in ids if i is not None and i != tokenizer.unk_token_id))


_PLAIN_KEYS: tuple[str, ...] = (
    "default_system",
    "system_in_user",
    "replace_eos",
    "replace_chat_template",
    "reasoning",
    "trim_lone_tools",
)


def _bare_answer(efficient_eos: bool) -> list[str]:
    return ["{{content}}"] if efficient_eos else ["{{content}}", "{{eos}}"]


def get_template(
    name: str | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    default_system: str | None = None,
    tool_format: str | None = None,
    enable_thinking: bool | None = True,
    preserve_thinking: bool = False,
) -> Template:
    """Find the template that a run uses. The tokenizer is not changed: see `Template.fix_tokenizer`.

    Args:
        name: the YAML's `template`; None reads the format from the tokenizer's own chat template.
        tokenizer: the model's.
        default_system: replaces the template's own; None keeps it.
        tool_format: replaces the template's own; None keeps it.
        enable_thinking: see `Template`.
        preserve_thinking: see `Template`.

    Returns:
        The template.

    Raises:
        UserError: there is no template or tool format of that name, or the tokenizer's chat template cannot be used.
    """
    if name is None:
        from surefoot.data.chat_template import template_from_tokenizer

        template = template_from_tokenizer(tokenizer)
    else:
        table = read_template_table()
        if name not in table:
            raise UserError(f"there is no template {name!r}", hint=_nearest(name, list(table)), key="template")
        template = Template.from_keys(name, table[name])
    template = replace(template, enable_thinking=enable_thinking, preserve_thinking=preserve_thinking)
    if tool_format is not None:
        # A format of the person's choice has no marks of the template around its calls: as LLaMA-Factory does it.
        bare = Format.parse(_bare_answer(template.efficient_eos))
        template = replace(template, tool_format=get_tool_format(tool_format), tools_text=None, function=bare)
    if default_system is not None:
        template = replace(template, default_system=default_system)
    return template


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{guess}Leave `template` out to use the chat template of the model's own tokenizer"
