"""`surefoot setup advice`: what a tutorial's lines are worth on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from surefoot.doctor.fixes import standard_values
from surefoot.doctor.texts import sentence
from surefoot.errors import UserError
from surefoot.machine.facts import Machine
from surefoot.machine.table import load_table
from surefoot.setup import advice_pip, advice_rules, advice_system
from surefoot.setup.advice_rules import OUTDATED, RIGHT, UNKNOWN, WRONG, Context, Ruling, jobs_here, load_words
from surefoot.setup.tutorial import Piece, read_tutorial

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "surefoot.advice/1"
#: Training options as Python's keyword arguments.
_ARGUMENT = re.compile(r"\b(optim|bf16|fp16|fp32|torch_dtype|dtype)\s*=\s*[\"']?([\w.]+)")
_COMMAND_RULES = (
    advice_system.tool,
    advice_system.groups,
    advice_system.driver,
    advice_system.container,
    advice_rules.options,
    advice_pip.install,
    advice_pip.environment,
    advice_pip.source_build,
    advice_pip.check,
)


@dataclass(frozen=True)
class Verdict:
    """What one command, setting or option of a tutorial is worth here.

    Attributes:
        line: number of the text's line, from 1; a line with several things has several verdicts.
        text: the thing itself.
        verdict: right, outdated, wrong or unknown.
        rule: which rule says so; empty for a thing that no rule knows.
        why: the reason, for this machine.
        instead: what to do, a line each; those that start with `#` are for the reader.
    """

    line: int
    text: str
    verdict: str
    rule: str
    why: str
    instead: tuple[str, ...]


def judge(text: str, m: Machine, language: str = "en") -> list[Verdict]:
    """Judge a tutorial's lines for one machine.

    Args:
        text: the tutorial: Markdown, a script, a terminal session, YAML, or a mixture.
        m: the machine.
        language: `en` or `zh`.

    Returns:
        Verdicts in the text's order. Prose, comments and output get none; a command that no rule knows is `unknown`.

    Raises:
        UserError: nobody could look whether the machine has a GPU, so that nothing can be said for it.
    """
    if not (m.pci_looked or m.has_amd or m.has_nvidia):
        raise UserError(
            "the PCI bus of this machine could not be looked at: whether it has a GPU is not known",
            hint="capture the machine that is meant: surefoot doctor --capture FILE, then --snapshot FILE",
            key="--snapshot",
        )
    pieces = read_tutorial(text)
    c = advice_rules.context_of(m, pieces)
    values = _values(c)
    found: list[Verdict] = []
    for piece in pieces:
        rulings = {ruling.key: ruling for ruling in _rulings_on(piece, c)}
        found += [_verdict(piece, ruling, values, language) for ruling in rulings.values()]
        if not rulings:
            found.append(Verdict(piece.line, piece.text, UNKNOWN, "", "", ()))
    return found


def _rulings_on(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Ask every rule about one piece."""
    if piece.kind == "setting":
        yield from advice_rules.setting(piece, c)
    elif piece.kind == "yaml":
        yield from advice_rules.option(piece.words[0], piece.words[1], c)
    elif piece.kind == "python":
        yield from advice_pip.check(piece, c)
        for name, value in _ARGUMENT.findall(piece.text):
            yield from advice_rules.option(name, value, c)
    else:
        for ask in _COMMAND_RULES:
            yield from ask(piece, c)
        yield from _cmake(piece, c)


def _cmake(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge lists of targets in CMake's `-DNAME=value`."""
    for word in piece.words[1:]:
        name, equals, value = word.removeprefix("-D").partition("=")
        if word.startswith("-D") and equals and name in advice_rules.ARCH_LISTS and c.amd:
            yield from advice_rules.arch_list(c, name, value)


def _values(c: Context) -> dict[str, str]:
    """Words for the placeholders that any text may use."""
    values = standard_values(c.m)
    ck, triton = (load_table().addons[f"flash_attn_{kind}"]["gfx"] for kind in ("ck", "triton"))
    targets = c.m.compute_targets
    pip = f"{values['pip']} install --no-build-isolation ."
    jobs = jobs_here(c.m, gib_per_job=load_table().addons["flash_attn_ck"]["gib_per_job"])[0]
    if all(t in ck for t in targets):
        command = f"GPU_ARCHS='{';'.join(targets)}' MAX_JOBS={jobs} {pip}   # in a recursive clone || "
        command += f"GPU_ARCHS='{';'.join(targets)}' MAX_JOBS={jobs} {pip}   # 在递归克隆中"
    elif all(t in triton for t in targets):
        command = f"FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE {pip}   # also when it runs || "
        command += f"FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE {pip}   # 运行时也要设置"
    else:
        command = "# flash_attn: sdpa in the YAML || YAML 中 flash_attn: sdpa"
    return values | {
        "mine": ", ".join(targets),
        "flash_command": command,
        "cpu_index": load_table().indexes["pytorch-cpu"],
    }


def _verdict(piece: Piece, ruling: Ruling, values: dict[str, str], language: str) -> Verdict:
    words, known = load_words()[ruling.key], values | dict(ruling.values)
    instead = tuple(sentence(line, known, language) for line in words.get("instead", ()))
    return Verdict(piece.line, piece.text, ruling.verdict, ruling.key, sentence(words["why"], known, language), instead)


def to_json(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Write the stable JSON document of `surefoot setup advice --json`."""
    return {"schema": SCHEMA, "verdicts": [asdict(v) for v in verdicts]}


_WORDS = {
    "en": {
        RIGHT: "right", OUTDATED: "outdated", WRONG: "wrong", UNKNOWN: "unknown", "line": "line {}",
        "not known": "Not judged, since no rule knows them:", "none": "No command was found in this text.",
    },
    "zh": {
        RIGHT: "正确", OUTDATED: "过时", WRONG: "错误", UNKNOWN: "未知", "line": "第 {} 行",
        "not known": "没有规则认识下列内容，未作判断：", "none": "该文本中没有找到命令。",
    },
}  # fmt: skip


def render(verdicts: list[Verdict], console: Console, language: str = "en") -> None:
    """Print verdicts for people: each with its reason and what to do instead; what no rule knows at the end.

    Args:
        verdicts: of `judge`.
        console: where to print.
        language: `en` or `zh`.
    """
    words = _WORDS[language]
    colours = {RIGHT: "green", OUTDATED: "yellow", WRONG: "red", UNKNOWN: "cyan"}
    if not verdicts:
        console.print(words["none"])
    for v in verdicts:
        if not v.rule:
            continue
        console.print(f"[bold {colours[v.verdict]}]{words[v.verdict]:8}[/]  {words['line'].format(v.line)}  ", end="")
        console.print(v.text.splitlines()[0], style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(f"    {v.why}", markup=False, highlight=False, soft_wrap=True)
        for line in v.instead:
            style = "" if line.startswith("#") else "green"
            console.print(f"    {line.removeprefix('# ')}", style=style, markup=False, highlight=False, soft_wrap=True)
    left = [v for v in verdicts if not v.rule]
    if left:
        console.print(words["not known"])
        for v in left:
            console.print(f"    {v.line}: {v.text.splitlines()[0]}", markup=False, highlight=False, soft_wrap=True)
