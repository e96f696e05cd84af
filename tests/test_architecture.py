"""The house rules that a machine can check: who imports whom, what starts light, what is never written."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "surefoot"
OURS = [*SOURCE.rglob("*.py")]
CODE = [
    *OURS,
    *(p for name in ("tests", "examples", "benchmarks") for p in (ROOT / name).rglob("*.py")),
    ROOT / "go.py",
]

# What each room may import besides itself; surefoot.errors and surefoot.files are free to all.
ROOMS = ["config", "machine", "data", "model", "train", "run", "use"]
ALLOWED: dict[str, set[str]] = {room: set(ROOMS[:place]) for place, room in enumerate(ROOMS)}
ALLOWED["guard"] = {*ALLOWED["train"]}
ALLOWED["doctor"] = {"config", "machine"}
ALLOWED["setup"] = {"config", "machine", "doctor"}
for later in ("train", "run", "use"):
    ALLOWED[later] |= {"guard"}
ALLOWED["bench"] = {*ALLOWED["use"]}
ALLOWED["cli"] = {*ALLOWED}
FREE = {"errors", "files"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def surefoot_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first-level name of everything of surefoot's own that a file imports, inside functions too."""
    package = path.relative_to(SOURCE.parent).with_suffix("").parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            targets = [f"{module}.{alias.name}" for alias in node.names] if module == "surefoot" else [module]
        else:
            continue
        for target in targets:
            if target.startswith("surefoot."):
                yield node.lineno, target.split(".")[1]


def forbidden_imports(path: Path) -> list[str]:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    room = parts[0] if len(parts) > 1 else ""
    allowed = {room, *FREE, *ALLOWED[room], "__version__"} if room else {*FREE, "__version__"}
    if parts == ("__main__",):
        allowed = {"cli"}  # `python -m surefoot`
    return [f"{path.name}:{line} imports {other}" for line, other in surefoot_imports(path) if other not in allowed]


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_rooms_import_only_from_rooms_to_their_left(path: Path) -> None:
    parts = path.relative_to(SOURCE).parts
    assert len(parts) == 1 or parts[0] in ALLOWED, f"the room {parts[0]} has no place in the import order yet"
    assert forbidden_imports(path) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("config/x.py", "from surefoot.train import loop"),
        ("data/x.py", "def f():\n    from surefoot import model"),
        ("use/x.py", "import surefoot.cli.main"),
        ("guard/x.py", "from ..run import folder"),
        ("files.py", "from surefoot.config import load_config"),
    ],
)
def test_the_import_check_sees_what_it_must(place: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "tree", lambda path: ast.parse(line))
    assert len(forbidden_imports(SOURCE / place)) == 1


HEAVY = ("torch", "transformers", "datasets", "peft", "accelerate", "matplotlib", "pyarrow", "pandas")


@pytest.mark.parametrize("module", ["cli.main", "config", "machine", "data", "model", "train", "run", "use", "bench"])
def test_importing_a_room_is_light(module: str) -> None:
    if module == "cli.main" and not (SOURCE / "cli" / "main.py").exists():
        pytest.fail("src/surefoot/cli/main.py is missing")
    code = f"import sys, surefoot.{module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip() == "[]"


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Every call in a file, with what is called as written."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def keyword(call: ast.Call, name: str) -> object:
    found = [k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)]
    return found[0] if found else None


def forbidden(path: Path) -> list[str]:
    """What is never written in this project: code from text or pickles, blind catches, trust by default."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{node.lineno}: a bare except")
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if {"pickle", "dill", "cloudpickle"} & {module.split(".")[0] for module in modules}:
                found.append(f"{node.lineno}: pickle")
    for call, called in calls(path):
        if called in ("eval", "exec"):
            found.append(f"{call.lineno}: {called}")
        if called == "torch.load" and keyword(call, "weights_only") is not True:
            found.append(f"{call.lineno}: torch.load without weights_only=True")
        if keyword(call, "trust_remote_code") is True:
            found.append(f"{call.lineno}: trust_remote_code=True")
        if called.startswith(("subprocess.", "os.system")) and (
            keyword(call, "shell") is True or called == "os.system"
        ):
            found.append(f"{call.lineno}: a shell command")
    return found


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_nothing_forbidden_is_written(path: Path) -> None:
    assert forbidden(path) == []


@pytest.mark.parametrize(
    "line",
    [
        "try: pass\nexcept: pass", "eval('1')", "import pickle", "from pickle import loads", "torch.load('x')",
        "torch.load('x', weights_only=False)", "f(trust_remote_code=True)", "subprocess.run('ls', shell=True)",
    ],
)  # fmt: skip
def test_the_forbidden_check_sees_what_it_must(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "tree", lambda path: ast.parse(line))
    assert len(forbidden(ROOT / "x.py")) == 1


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_files_and_functions_stay_readable(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450, "split it: one subject a file"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (node.end_lineno or 0) - inside[0].lineno + 1 if inside else 0
            assert lines <= 60, f"{node.name} (line {node.lineno}) has {lines} lines: it should fit a screen"


def tracked_text() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    kept = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".txt", ".cfg", ""}
    return [ROOT / name for name in listed.stdout.splitlines() if Path(name).suffix in kept and (ROOT / name).is_file()]


# Written in pieces, so that this file does not find itself. `trainer` is the user of the machines in tests.
PARTS = (
    "/" + "root/",
    "/" + "work/",
    "/home/" + r"(?!trainer)\w+/",
    *(f"{name}[.]org" for name in ("py" + "pi", "npm" + "js")),
)
PLACES = re.compile("|".join((*PARTS, "pythonhosted" + "[.]org")))


def test_no_machine_paths_and_no_registry_hosts() -> None:
    found = []
    for path in tracked_text():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if PLACES.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()[:80]}")
    assert found == []


def headings(path: Path) -> list[int]:
    """The levels of a page's headings: what it includes counts, code blocks do not."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'^--8<-- "(.+)"$', lambda m: (ROOT / m[1]).read_text(encoding="utf-8"), text, flags=re.MULTILINE)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [len(marks) for marks in re.findall(r"^(#+) ", text, flags=re.MULTILINE)]


def test_every_page_is_there_in_english_and_chinese_with_the_same_outline() -> None:
    english = [page for page in (ROOT / "docs").rglob("*.md") if not page.name.endswith(".zh.md")]
    chinese = set((ROOT / "docs").rglob("*.zh.md"))
    assert {page.with_suffix(".zh.md") for page in english} == chinese
    assert english, "docs/ has no pages"
    for page in [*english, ROOT / "README.md"]:
        other = page.with_suffix(".zh.md")
        assert other.exists() and headings(page) == headings(other), f"{page.name} and {other.name} differ in outline"
