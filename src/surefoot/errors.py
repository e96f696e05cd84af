"""The two ways in which a command can fail, and how each names what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a request.

    Attributes:
        message: what is wrong, naming the key, row, file or module.
        hint: what to do about it; empty when the message says it already.
        key: the YAML key at fault, or None when no single key is.
    """

    message: str
    hint: str = ""
    key: str | None = None

    def __str__(self) -> str:
        place = f"{self.key}: " if self.key else ""
        return f"{place}{self.message}" + (f"\n  -> {self.hint}" if self.hint else "")


class UserError(ValueError):
    """The request was wrong: YAML, data or arguments. The command line exits with 2."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "", key: str | None = None) -> None:
        self.problems: list[Problem] = [Problem(message, hint, key)]
        super().__init__(str(self.problems[0]))

    @classmethod
    def from_problems(cls, problems: Iterable[Problem]) -> UserError:
        """Join several problems found together, so that a person mends them in one go.

        Args:
            problems: at least one problem.

        Returns:
            One error whose text lists them all.
        """
        found = list(problems)
        error = cls(found[0].message, hint=found[0].hint, key=found[0].key)
        error.problems = found
        error.args = ("\n".join(str(p) for p in found),)
        return error


class WorkError(RuntimeError):
    """The request was right, but the work failed. The command line exits with 1."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.problems: list[Problem] = [Problem(message, hint)]
        super().__init__(str(self.problems[0]))
