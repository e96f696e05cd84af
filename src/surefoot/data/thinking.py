"""Thoughts of reasoning models: find them, take them out, write an empty one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.data.messages import Message


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """How a template marks a thought inside an assistant turn.

    Attributes:
        opening: text before the thought.
        closing: text after the thought.
        empty: what is written when there is no thought; "" means opening + closing.
    """

    opening: str = "<think>\n"
    closing: str = "\n</think>\n\n"
    empty: str = ""

    @property
    def empty_thought(self) -> str:
        """The text that stands for "no thought"."""
        return self.empty or self.opening + self.closing

    def find(self, content: str) -> str:
        """The first thought in a turn with its marks, or ""."""
        found = re.search(re.escape(self.opening) + ".*?" + re.escape(self.closing), content, re.DOTALL)
        return found.group(0) if found else ""

    def strip(self, content: str) -> str:
        """A turn without its thoughts."""
        if self.opening in content:
            content = re.sub(re.escape(self.opening) + ".*?" + re.escape(self.closing), "", content, flags=re.DOTALL)
        return content.lstrip("\n")

    def is_in(self, content: str) -> bool:
        """Whether a turn holds an opening or a closing mark, blank space around the marks aside."""
        return self.opening.strip() in content or self.closing.strip() in content

    def strip_turns(self, messages: Sequence[Message], indices: Sequence[int]) -> list[Message]:
        """The conversation, with the thoughts taken out of the turns at `indices`."""
        stripped = list(messages)
        for i in indices:
            stripped[i] = replace(messages[i], content=self.strip(messages[i].content))
        return stripped
