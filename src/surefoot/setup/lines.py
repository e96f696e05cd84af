"""Bash lines that run without a person: no questions, fresh lists, the running kernel, sudo only where it is needed."""

from __future__ import annotations

from shlex import quote

from surefoot.machine.facts import Machine

_QUIET = (
    ("apt install ", "apt-get install -y "),
    ("apt remove ", "apt-get remove -y "),
    ("dnf install ", "dnf install -y "),
    ("dnf remove ", "dnf remove -y "),
    ("zypper install ", "zypper --non-interactive install "),
    ("zypper remove ", "zypper --non-interactive remove "),
    ("pacman -S ", "pacman -S --needed --noconfirm "),
)


def ready(m: Machine, lines: list[str]) -> tuple[str, ...]:
    """Make the doctor's commands fit for a script: no questions, the running kernel, no sudo where one is root.

    Args:
        m: the machine.
        lines: command lines, which may have two languages' words behind a `#`.

    Returns:
        The lines.
    """
    done = []
    install = next((place for place, line in enumerate(lines) if "apt install " in line), None)
    if install is not None and not any("apt-get update" in line for line in lines):
        lines = [*lines[:install], "sudo apt-get update", *lines[install:]]  # on old lists apt asks for what is gone
    for line in lines:
        for asking, quiet in _QUIET:
            line = line.replace(asking, quiet)
        line = line.replace(m.kernel, '"$(uname -r)"') if m.kernel else line.replace("$(uname -r)", '"$(uname -r)"')
        done.append(line.partition(" || ")[0].replace("sudo ", "") if m.root else line.partition(" || ")[0])
    return tuple(done)


def or_by_hand(line: str) -> list[str]:
    """Let a line that is only for the reader stop the run with its words, since nothing was done."""
    words = line.partition(" || ")[0]
    return [f"echo {quote(words.lstrip('# '))} >&2", "exit 1"] if words.startswith("#") else [words]
