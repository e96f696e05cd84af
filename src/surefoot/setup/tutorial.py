"""A tutorial's text, read into the single commands, settings, YAML and Python lines that it tells one to type."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

_HTML = re.compile(r"<(?:pre|code)\b")
_BLOCK_TAG = re.compile(r"</?(?:pre|p|li|ol|ul|div|br|h\d)\b[^>]*>")
_TAG = re.compile(r"</?(?:code|span|b|i|em|strong|a)\b[^>]*>")
_FENCE = re.compile(r"\s*(```+|~~~+)\s*\{?\.?([\w+-]*)")
_PROMPT = re.compile(r"(?:\([\w. -]+\)\s*)*(?:\[?[\w.-]+@[\w.-]+[^$#%>]*)?(?:[$%❯➜]|(?<=[\w/~\])])#)\s+")
_PYTHON_PROMPT = re.compile(r"(?:>>>|\.\.\.)\s?|In \[\d+\]:\s*")
_BULLET = re.compile(r"\s*(?:[-*+•]|\d+[.)])\s+")
_SETTING = re.compile(r"[A-Za-z_]\w*\+?=")
_YAML = re.compile(r"\s*-?\s*[\"']?([A-Za-z_][\w.-]*)[\"']?\s*:(?:\s+(.*))?$")
_SPANS = re.compile(r"`([^`\n]+)`")
_TOOLS = ("rocm-smi", "amd-smi", "rocminfo", "nvidia-smi")
_WRAPPERS = ("time", "nohup", "env", "command", "exec", "RUN", "watch", "stdbuf", "then", "do", "else", "if")
_SUBSTITUTION = re.compile(r"\$\([^()\n]*\)")
_SEPARATORS = re.compile(r"[;&|]+")
_PROSE_WORDS = re.compile(r"\b(?:the|is|are|you|your|we|this|that|should|will|can|must|which|of|does|please)\b", re.I)
_CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]")
_SHELLS = (
    "",
    "bash",
    "sh",
    "shell",
    "zsh",
    "console",
    "shell-session",
    "terminal",
    "text",
    "txt",
    "dockerfile",
    "docker",
)

#: First words by which a line outside of a code block is known to be a command.
COMMANDS = (
    "pip", "pip3", "uv", "conda", "mamba", "python", "python3", "apt", "apt-get", "dnf", "yum", "zypper",
    "pacman", "git", "export", "usermod", "adduser", "gpasswd", "newgrp", "chmod", "rocm-smi", "amd-smi",
    "nvidia-smi", "rocminfo", "rocm-sdk", "docker", "podman", "amdgpu-install", "modprobe", "dkms", "echo",
    "cmake", "make", "source", "sudo", "llamafactory-cli", "deepspeed", "accelerate", "torchrun", "surefoot",
    "hipconfig", "hipcc", "cd", "RUN", "ENV", "watch",
)  # fmt: skip
#: YAML keys that may stand alone in prose.
_KEYS = ("optim", "fp32", "fp16", "bf16", "pure_bf16", "compute_dtype", "dtype", "torch_dtype", "precision")


@dataclass(frozen=True)
class Piece:
    """One thing that a line tells one to do.

    Attributes:
        line: number of the text's line, from 1.
        text: the piece as written, without prompt and wrapper.
        kind: command, setting (of an environment variable), yaml or python.
        words: a command's words, or (name, value) of a setting or a YAML key.
        env: variables that are set for this command alone.
        sudo: whether it runs as root.
    """

    line: int
    text: str
    kind: str
    words: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    sudo: bool = False


def read_tutorial(text: str) -> tuple[Piece, ...]:
    """Read a tutorial, a shell script, a terminal session or a mixture of them.

    Args:
        text: Markdown, plain text or a script; prompts, code fences, bullets, comments and line continuations may be
            there or not. Of HTML the tags are left out, and lines are counted as a page shows them.

    Returns:
        Its pieces. Inside a code block every line counts; outside only what looks like a command, or, in a text without
        any code block and prompt, everything that does not look like prose.
    """
    if _HTML.search(text):
        text = html.unescape(_TAG.sub("", _BLOCK_TAG.sub("\n", text)))
    pieces: list[Piece] = []
    blocks = list(_blocks(text))
    bare = not any(fenced for fenced, _, _ in blocks) and not _PROMPT.search(text)
    for fenced, language, lines in blocks:
        joined = list(_joined(lines))
        session = any(_prompted(line) for _, line in joined)
        rooted = session or not any(_command_like(line.strip()) for _, line in joined)
        for number, line in joined:
            if line.strip():
                pieces += _line(number, line, fenced, language, session, rooted, bare)
    return tuple(pieces)


def _blocks(text: str) -> Iterator[tuple[bool, str, list[tuple[int, str]]]]:
    """Cut a text at its code fences: (whether fenced, the fence's language, numbered lines)."""
    fence, language = "", ""
    lines: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _FENCE.match(line)
        if mark and (not fence or line.strip().startswith(fence)):
            yield bool(fence), language, lines
            fence, language, lines = ("", "", []) if fence else (mark.group(1), mark.group(2).lower(), [])
            continue
        lines.append((number, line))
    yield bool(fence), language, lines


def _joined(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join continued lines: those that end in a backslash, open quotes of a command, and here-documents."""
    place = 0
    while place < len(lines):
        number, line = lines[place]
        place += 1
        while line.rstrip().endswith("\\") and place < len(lines):
            line = line.rstrip()[:-1].rstrip() + " " + re.sub(r"^\s*(?:>\s+)?", "", lines[place][1])
            place += 1
        here = re.search(r"<<-?\s*['\"]?(\w+)['\"]?", line)
        if here:
            inside = []
            while place < len(lines) and lines[place][1].strip() != here.group(1):
                inside.append(lines[place][1])
                place += 1
            place += 1
            yield number, "\n".join([line, *inside])
            continue
        if _open_quote(line):
            ahead = place
            whole = line
            while ahead < len(lines) and ahead < place + 20 and _open_quote(whole):
                whole += "\n" + lines[ahead][1]
                ahead += 1
            if not _open_quote(whole):
                line, place = whole, ahead
        yield number, line


def _open_quote(line: str) -> bool:
    if not _command_like(_PROMPT.sub("", line.strip(), count=1)):
        return False
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def _prompted(line: str) -> bool:
    return bool(_PROMPT.match(line.strip()) or _PYTHON_PROMPT.match(line.strip()))


def _line(
    number: int, line: str, fenced: bool, language: str, session: bool, rooted: bool, bare: bool
) -> Iterator[Piece]:
    """Read one joined line into pieces; none when it is prose, a comment or output."""
    text = line.strip()
    if mark := _PYTHON_PROMPT.match(text):
        yield Piece(number, text[mark.end() :], "python")
        return
    if mark := _PROMPT.match(text):
        yield from _commands(number, text[mark.end() :])
        return
    if text.startswith("#"):
        inside = text.lstrip("# ")
        if rooted and text.startswith("# ") and _command_like(inside) and not _is_prose(inside):
            yield from _commands(number, inside)
        return
    if session and language not in ("python", "yaml", "yml"):
        return  # what a terminal session printed
    if fenced and language in ("python", "py", "python3"):
        yield Piece(number, text, "python")
    elif fenced and language in ("yaml", "yml", "json"):
        yield from _yaml(number, text.rstrip(","))
    elif fenced:
        if language in _SHELLS:
            yield from _yaml(number, text, known=True) or _commands(number, text)
    else:
        yield from _outside(number, text, bare)


def _outside(number: int, text: str, bare: bool) -> Iterator[Piece]:
    """Read a line outside of code blocks."""
    spans = [span.strip() for span in _SPANS.findall(text)]
    if spans:
        for span in spans:
            if found := _yaml(number, span, known=True):
                yield from found
            elif span in _TOOLS or (_command_like(span) and " " in span):
                yield from _commands(number, span)
        return
    if found := _yaml(number, text, known=True):
        yield from found
        return
    inside = _BULLET.sub("", text, count=1)
    if _command_like(inside):
        if not _is_prose(inside):
            yield from _commands(number, inside)
    elif bare and not _is_prose(text) and not _BULLET.match(text):
        yield from _commands(number, text)


def _command_like(text: str) -> bool:
    if _SETTING.match(text):
        return True
    first = text.lstrip("!%").partition(" ")[0]
    return first in COMMANDS or bool(re.fullmatch(r"(?:[\w.~/$-]*/)?(?:bin/)?(?:pip|python)[\d.]*", first))


def _is_prose(text: str) -> bool:
    """Tell prose from a command: sentences have function words, an end, capitals or CJK outside of quotes."""
    plain = re.sub(r"'[^']*'|\"[^\"]*\"|\s#.*$", "", text)
    if _CJK.search(plain) or re.search(r"[\w)][:!?]$|\w{2,}\.$", plain):
        return True
    options = re.search(r"\s--?\w", plain)
    return not options and bool(_PROSE_WORDS.search(plain) or re.match(r"[A-Z][a-z]*,? [a-z]", plain))


def _yaml(number: int, text: str, known: bool = False) -> list[Piece]:
    """Read a YAML line, or with `known` only a key that is one of those that people name in prose."""
    found = _YAML.match(text)
    if not found or (known and found.group(1) not in _KEYS):
        return []
    value = re.sub(r"\s+#.*$", "", found.group(2) or "").strip().strip("\"'")
    return [Piece(number, text, "yaml", (found.group(1), value))]


def _commands(number: int, text: str) -> Iterator[Piece]:
    """Cut a shell line at `&&`, `;` and `|` into commands and settings."""
    head, _, rest = text.partition("\n")
    source = head if rest and "<<" in head else text
    inner = _SUBSTITUTION.findall(source)  # `$(a | b)` is one word, whatever is in it
    source = _SUBSTITUTION.sub(lambda _: "\0", source.lstrip("!%"))
    try:
        lexer = shlex.shlex(source, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words = list(lexer)
    except ValueError:  # an open quote: the words as they stand
        words = source.split()
    back = iter(inner)
    words = [re.sub("\0", lambda _: next(back, ""), word) for word in words]
    current: list[str] = []
    for word in [*words, ";"]:
        if not _SEPARATORS.fullmatch(word):
            current.append(word)
            continue
        if current:
            yield from _simple(number, current, rest)
        current = []


def _simple(number: int, words: list[str], document: str) -> Iterator[Piece]:
    """Read one simple command: wrappers and variables in front, then a setting or the command itself."""
    env: dict[str, str] = {}
    sudo = False
    left = list(words)
    while left:
        if left[0] == "sudo" or left[0] in _WRAPPERS:
            sudo = sudo or left[0] == "sudo"
            left.pop(0)
            while left and left[0].startswith("-"):
                left = left[2:] if left[0] in ("-u", "-n", "--user", "--interval") else left[1:]
        elif _SETTING.match(left[0]):
            name, _, value = left.pop(0).partition("=")
            env[name.rstrip("+")] = value
        else:
            break
    if not left:
        yield from (_setting(number, name, value) for name, value in env.items())
    elif left[0] in ("export", "ENV", "setenv") and len(left) > 1:
        yield from _exports(number, left[1:])
    elif left[0] == "echo" and (inside := re.search(r"\b([A-Z][A-Z0-9_]+=.*)", left[1] if len(left) > 1 else "")):
        yield from _exports(number, [inside.group(1)])
    elif document and re.match(r"python[\d.]*$", left[0]):
        yield Piece(number, document, "python")
    else:
        yield Piece(number, " ".join(map(_quoted, left)), "command", tuple(left), env, sudo)
        yield from (_setting(number, name, value) for name, value in env.items())
        if left[0] in ("docker", "podman"):
            given = [value for flag, value in pairwise(left) if flag in ("-e", "--env")]
            yield from _exports(number, given)


def _quoted(word: str) -> str:
    """Quote a word where reading it back would need it; `$NAME` stays as people write it."""
    return shlex.quote(word) if not word or re.search(r"[\s;&|<>()'\"\\#*]", word) else word


def _exports(number: int, words: list[str]) -> Iterator[Piece]:
    if len(words) == 2 and "=" not in words[0]:  # `ENV NAME value`, `setenv NAME value`
        words = ["=".join(words)]
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            yield _setting(number, name, value.strip("\"'"))


def _setting(number: int, name: str, value: str) -> Piece:
    return Piece(number, f"{name}={value}", "setting", (name, value))
