"""Fill the pages on setup with what `surefoot setup` prints today: `PYTHONPATH=src python tests/setup/write_guides.py`.

A page holds pairs of marks; what stands between them is written anew:

    <!-- plan NAME: FIRST..LAST -->     a part of the plan NAME of RUNS: step ids, `head` for its first lines, `end`
    <!-- file NAME -->                  the first lines, to the first empty one, of the file that NAME of RUNS writes
    <!-- answer NAME -->                all that NAME of RUNS prints
    <!-- cards -->                      which torch each card of CARDS gets
    <!-- / -->                          the end of each
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bare_machines import bare
from typer.testing import CliRunner

from surefoot import __version__
from surefoot.cli.main import app
from surefoot.machine.snapshot import Snapshot
from surefoot.setup.plan import Wish
from surefoot.setup.planner import make_plan

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
PAGES = [
    DOCS / f"{name}{suffix}"
    for name in ("setup", "guide-instinct", "guide-radeon", "guide-container", "guide-slurm")
    for suffix in (".md", ".zh.md")
]
#: The plan that a page shows from its first line to its last.
WHOLE = {
    "guide-instinct": "new-mi300x",
    "guide-radeon": "rx7900xtx",
    "guide-container": "mi210-inside",
    "guide-slurm": "mi250x-job",
}
_WHEEL = f"./surefoot-{__version__}-py3-none-any.whl"
#: Name -> machine (a file here, or a base made bare), and what is typed; `node.json` is that machine's snapshot.
RUNS: dict[str, tuple[str, str]] = {
    "new-mi300x": ("new_mi300x.yaml", "--surefoot ."),
    "mi300x-driver": ("mi300x-8", "--surefoot ."),
    "mi300x-image": ("mi300x-8", f"--env docker --surefoot {_WHEEL}"),
    "mi300x-dockerfile": ("mi300x-8", f"--dockerfile Dockerfile --surefoot {_WHEEL}"),
    "mi300x-script": ("mi300x-8", "--script setup.sh --surefoot ."),
    "mi300x-more": ("mi300x-8", "--for train+deepspeed+flash-attn --surefoot ."),
    "mi210-inside": ("mi210-docker", "--surefoot ."),
    "mi210-refused": ("refused_container.yaml", "--surefoot ."),
    "rx7900xtx": ("rx7900xtx-ubuntu", "--surefoot ."),
    "strix-halo": ("strix-halo", "--surefoot ."),
    "rx6800": ("rx6800", "--surefoot ."),
    "w7900-igpu": ("w7900_beside_graphics.yaml", "--surefoot ."),
    "mi250x-job": ("mi250x-slurm", "--snapshot node.json --surefoot ."),
    "advice": ("rx7900xtx-ubuntu", "advice tutorial.txt"),
    "advice-zh": ("rx7900xtx-ubuntu", "advice tutorial.txt --lang zh"),
    "explain": ("rx7900xtx-ubuntu", "explain F35"),
    "explain-zh": ("rx7900xtx-ubuntu", "explain F35 --lang zh"),
}
FILES = {"mi300x-script": "setup.sh", "mi300x-dockerfile": "Dockerfile"}
TUTORIAL = """\
export PYTORCH_ROCM_ARCH="gfx90a;gfx942"
pip install torch --index-url https://download.pytorch.org/whl/rocm5.6
pip install -e ".[deepspeed]"
sudo usermod -aG video $USER
rocm-smi
"""
CARDS = (
    "RX 6800", "RX 6700 XT", "RX 7600", "RX 7800 XT", "RX 7900 XTX", "PRO W7900", "RX 9060 XT", "RX 9070 XT",
    "AI PRO R9700", "gfx1151",
)  # fmt: skip
_HEADS = {
    "en": "| Card | Target | torch | From |",
    "zh": "| 显卡 | 目标 | torch | 来源 |",
}
_BLOCK = re.compile(
    r"^(<!-- (plan|file|answer|cards)(?: ([\w-]+))?(?:: ([\w-]+)\.\.([\w-]+))? -->\n).*?^(<!-- / -->)$", re.M | re.S
)
_STEP = re.compile(r"^ {0,2}\d+  (?:done  )?([\w-]+): ", re.M)


class Block(NamedTuple):
    """What a pair of marks asks for.

    Attributes:
        kind: plan, file, answer or cards.
        name: one of RUNS; empty for cards.
        first: of a plan, its first part.
        last: of a plan, its last part.
    """

    kind: str
    name: str
    first: str
    last: str


def blocks(page: str) -> list[Block]:
    """List what the marks of a page ask for."""
    return [_asked(found) for found in _BLOCK.finditer(page)]


def _asked(found: re.Match[str]) -> Block:
    return Block(*(found[group] or "" for group in (2, 3, 4, 5)))


@cache
def ran(name: str) -> tuple[str, str]:
    """Run one of RUNS.

    Args:
        name: which.

    Returns:
        What it prints, and the file that it writes; empty for none.
    """
    machine, typed = RUNS[name]
    with tempfile.TemporaryDirectory() as scratch:
        node = HERE / machine if machine.endswith(".yaml") else Path(scratch) / "node.json"
        if node.suffix == ".json":
            node.write_text(json.dumps(bare(machine).raw), encoding="utf-8")
        (Path(scratch) / "tutorial.txt").write_text(TUTORIAL, encoding="utf-8")
        places = {word: str(Path(scratch) / word) for word in ("setup.sh", "Dockerfile", "tutorial.txt")}
        places["node.json"] = str(node)
        words = [places.get(word, word) for word in shlex.split(typed)]
        given = [] if "--snapshot" in words else ["--snapshot", str(node)]
        done = CliRunner().invoke(app, ["setup", *words, *given])
        assert done.exit_code == 0, (name, done.output)
        written = Path(places[FILES[name]]).read_text(encoding="utf-8") if name in FILES else ""
    return done.stdout, written


@cache
def parts(name: str) -> dict[str, str]:
    """Cut what a run prints into its steps, in order, with `head` before and `end` behind them."""
    text = ran(name)[0]
    starts = list(_STEP.finditer(text))
    ends = [*(match.start() for match in starts[1:]), _end(text, starts[-1].end())]
    found = {"head": text[: starts[0].start()]}
    found |= {match[1]: text[match.start() : end] for match, end in zip(starts, ends, strict=True)}
    return found | {"end": text[ends[-1] :]}


def _end(text: str, last: int) -> int:
    """Where the notes begin, or the sum."""
    found = re.compile(r"^(?:note: |\d+ of \d+ steps to do)", re.M).search(text, last)
    assert found
    return found.start()


def write_block(block: Block, language: str) -> str:
    """Write what stands between two marks.

    Args:
        block: what they ask for.
        language: en or zh.

    Returns:
        Markdown.
    """
    if block.kind == "cards":
        return _cards(language)
    text, written = ran(block.name)
    prompt = f"$ surefoot setup {RUNS[block.name][1]}\n"
    if block.kind == "file":
        return _fence(written.split("\n\n")[0], "bash" if FILES[block.name].endswith(".sh") else "dockerfile")
    if block.kind == "answer":
        return _fence(prompt + text, "console")
    steps = parts(block.name)
    ids = list(steps)
    shown = "".join(steps[part] for part in ids[ids.index(block.first) : ids.index(block.last) + 1]).strip("\n")
    return _fence(prompt + shown, "console") if block.first == "head" else _fence(shown, "text")


def _fence(text: str, language: str) -> str:
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    return "\n".join([f"```{language}", *lines, "```", ""])


def _cards(language: str) -> str:
    machine: Snapshot = bare("cpu-only")
    lines = [_HEADS[language], "| --- | --- | --- | --- |"]
    for card in CARDS:
        plan = make_plan(machine, Wish(gpu=card))
        lines.append(f"| {card} | {', '.join(plan.targets)} | {plan.torch or 'nightly'} | `{plan.index}` |")
    return "\n" + "\n".join(lines) + "\n\n"


def fill(text: str, language: str) -> str:
    """Write every block of a page anew.

    Args:
        text: the page.
        language: en or zh.

    Returns:
        The page as it must be.
    """

    def write(found: re.Match[str]) -> str:
        return found[1] + write_block(_asked(found), language) + found[6]

    return _BLOCK.sub(write, text)


def language_of(page: Path) -> str:
    """The language of a page, by its name."""
    return "zh" if page.name.endswith(".zh.md") else "en"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), language_of(page)), encoding="utf-8")
