"""Which torch, for which ROCm, from which index: the one row of the table that serves these GPUs, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from shlex import quote
from typing import Any

from surefoot.doctor.fixes import driver_allows, fits
from surefoot.errors import UserError
from surefoot.machine.facts import Machine
from surefoot.machine.table import TorchRelease, load_table
from surefoot.machine.versions import Version, parse_version, short
from surefoot.setup.plan import Wish
from surefoot.setup.target import Target, target_of

#: What Surefoot itself asks for in its requirements.
OLDEST_TORCH, OLDEST_PYTHON = (2, 6), (3, 10)
#: The Python that is brought where this machine's has no wheels: every row of the table from 2.2 on serves it.
USUAL_PYTHON = (3, 12)


@dataclass(frozen=True)
class Choice:
    """One torch and where it comes from.

    Attributes:
        targets: GPU targets that it serves; empty for NVIDIA and CPU.
        rocm: its ROCm release, as `7.2`; empty for NVIDIA, CPU and a nightly.
        torch: its version with the local tag, as `2.14.0+rocm7.2`; empty for a nightly.
        index: the one index that it comes from; empty for pip's own default. Of `source`, where ROCm's SDK comes from.
        source: pip, amd, nightly or source.
        python: the environment's Python, as `3.12`.
        pip: how pip is called, as `.venv/bin/python -m pip`; ready for a shell.
        interpreter: how the environment's Python is called; ready for a shell.
        kind: rocm, cuda or cpu.
        vision: torchvision's version that goes with it; empty for none.
        audio: torchaudio's; empty for none.
        channel: the index's name in the table; empty for none.
        reason: the facts that led here.
        notes: what the reader should know of this torch.
    """

    targets: tuple[str, ...]
    rocm: str
    torch: str
    index: str
    source: str
    python: str
    pip: str
    interpreter: str
    kind: str = "rocm"
    vision: str = ""
    audio: str = ""
    channel: str = ""
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def pins(self) -> tuple[str, ...]:
        """Lines of a constraints file: torch and its companions, local tags included."""
        named = (("torch", self.torch), ("torchvision", self.vision), ("torchaudio", self.audio))
        return tuple(f"{name}=={version}" for name, version in named if version)

    @property
    def requirements(self) -> tuple[str, ...]:
        """What pip is asked for: the pins, with the device packages' extras where kernels come one target at a time."""
        if self.source not in ("amd", "nightly"):
            return self.pins
        extras = ",".join(f"device-{gfx}" for gfx in self.targets)
        if not self.torch:
            return (f"torch[{extras}]",)
        return (f"torch[{extras}]=={self.torch}", f"torchvision[{extras}]=={self.vision}")


@dataclass(frozen=True)
class _Row:
    """One candidate: a torch release, its ROCm and where both come from."""

    source: str
    channel: str
    rocm: str
    torch: TorchRelease | None


# ---- the rows of the table ----
def _number(text: str, key: str, example: str) -> Version:
    """Read a release number that a person typed."""
    number = parse_version(text)
    if not number or not re.fullmatch(r"v?\d+(\.\d+){0,3}", text.strip()):
        raise UserError(f"cannot be {text!r}", hint=f"a release, as {example}", key=key)
    return number


def _check_wish(wish: Wish) -> None:
    """Refuse releases that no row of the table has."""
    table = load_table()
    if wish.rocm:
        known = list(dict.fromkeys([short(row.version) for row in table.rocm]))
        if short(_number(wish.rocm, "--rocm", known[-1])) not in known:
            raise UserError(f"the table has no ROCm {wish.rocm}", hint=f"would match: {', '.join(known)}", key="--rocm")
    if wish.torch:
        rows = [short(row.version) for row in table.torch]
        number = _number(wish.torch, "--torch", rows[-2])
        if number[:2] < OLDEST_TORCH:
            raise UserError(
                f"torch {wish.torch} is too old: Surefoot needs {short(OLDEST_TORCH)} or newer",
                hint=f"would match: {', '.join(r for r in rows if parse_version(r) >= OLDEST_TORCH)}",
                key="--torch",
            )
        if table.torch_release(number) is None or any(number[2:]):
            raise UserError(
                f"the table has no torch {wish.torch}",
                hint=f"a minor release, its .0 is taken: {', '.join(rows[-8:])}",
                key="--torch",
            )
    if wish.index and not re.match(r"(https?|file)://\S+$", wish.index):
        raise UserError(
            f"cannot be {wish.index!r}",
            hint="the address of a package index, as https://mirror.example/simple",
            key="--index",
        )


def _releases(wish: Wish) -> list[TorchRelease]:
    """Rows of torch that the wish allows, newest first; one that is only inferred counts when it is named."""
    rows = reversed(load_table().torch)
    if wish.torch:
        return [row for row in rows if row.version == parse_version(wish.torch)[:2]]
    return [row for row in rows if "(I)" not in row.source and row.version >= OLDEST_TORCH]


def _rows(target: Target, wish: Wish, *, amd_first: bool) -> Iterator[_Row]:
    """Every row that has kernels for the targets, best first: PyTorch's own wheels, AMD's, AMD's nightlies."""
    table, wanted = load_table(), set(target.gfx)
    rocm = parse_version(wish.rocm)[:2]
    official = [
        _Row("pip", "pytorch", variant, row)
        for row in _releases(wish)
        for variant in reversed(row.rocm)
        if parse_version(variant)[:2] < (7, 14) and wanted <= table.wheel_targets(parse_version(variant))
    ]
    multi_arch = [
        _Row("amd", "amd-10" if release.version >= (10,) else "amd-7.14", short(release.version), row)
        for release in reversed(table.rocm)
        for row in _releases(wish)
        if short(release.version) in row.amd and wanted <= release.gfx
    ]
    for row in [*multi_arch, *official] if amd_first else [*official, *multi_arch]:
        if (not rocm or parse_version(row.rocm)[:2] == rocm) and wish.source in ("", row.source):
            yield row
    supports = {row.support for gfx in wanted if (row := table.gpu(gfx))}
    if not wish.rocm and not wish.torch and wish.source in ("", "amd") and supports <= {"listed", "community"}:
        yield _Row("nightly", "amd-nightly", "", None)


def _blind(m: Machine, target: Target, row: _Row) -> bool:
    """Whether a torch could not reach the GPU: wheels before 7.9 hold a runtime of their own that knows no WSL."""
    return m.wsl and target.here and bool(row.rocm) and parse_version(row.rocm) < (7, 9)


def _sound(row: _Row, gfx: tuple[str, ...]) -> bool:
    """Whether no defect is known of this ROCm on these targets."""
    rocm, targets = parse_version(row.rocm)[:2], set(gfx)
    if rocm >= (10, 1):  # LoRA's narrow products read out of bounds from 7.2 to 10.0
        targets = {t for t in targets if not t.startswith("gfx120")}
    return row.source == "nightly" or fits(targets, rocm)


def _pythons(row: _Row) -> tuple[Version, Version]:
    channel = load_table().channels.get(row.channel)
    own = channel.python if channel else ()
    newest = load_table().torch[-1].python
    low, high = row.torch.python if row.torch else newest
    low = max(low, OLDEST_PYTHON)
    return (max(low, own[0]), min(high, own[1])) if own else (low, high)


def _select(m: Machine, target: Target, wish: Wish) -> tuple[_Row, Version] | None:
    """Find the first row that this Python and this driver serve; then with another Python; then with another driver.

    Rows with a known defect count only where the wish names a part of them, nightlies only where there is no release.
    """
    amd_first = (m.wsl and target.here) or any(gfx.startswith("gfx120") for gfx in target.gfx)
    rows = [row for row in _rows(target, wish, amd_first=amd_first) if not _blind(m, target, row)]
    releases, nightly = [r for r in rows if r.torch], [r for r in rows if not r.torch]
    sound = [row for row in releases if _sound(row, target.gfx)]
    explicit = bool(wish.rocm or wish.torch or wish.source)
    bound = bool(m.driver) and target.here
    for some in (sound, releases if explicit else [], nightly):
        for driver in (True, False) if bound and not m.container else (bound,):
            fitting = [r for r in some if not (driver and r.rocm) or driver_allows(m, parse_version(r.rocm)[:2])]
            if found := _with_python(m, wish, fitting):
                return found
    return None


def _with_python(m: Machine, wish: Wish, rows: list[_Row]) -> tuple[_Row, Version] | None:
    """Find the first row for this machine's Python, else the first one at all with a Python to be brought."""
    own = () if m.python.get("free_threaded") is True else m.python_version[:2]
    for row in rows:
        low, high = _pythons(row)
        if low <= own <= high:
            return row, own
    if not rows or wish.env == "system":
        return None
    low, high = _pythons(rows[0])
    return rows[0], min(high, max(low, USUAL_PYTHON))


# ---- the choice ----
def choose(m: Machine, wish: Wish, target: Target | None = None) -> Choice:
    """Choose the torch of a plan.

    Args:
        m: the machine.
        wish: the wish.
        target: what is planned for; found if not given.

    Returns:
        The choice.

    Raises:
        UserError: no row of the table serves the wish; the message says what would match.
    """
    _check_wish(wish)
    target = target or target_of(m, wish)
    _check_platform(m, target)
    if target.kind != "rocm":
        return _plain_torch(m, wish, target)
    if wish.source == "source":
        return _from_source(m, wish, target)
    found = _select(m, target, wish)
    if found is None:
        raise _no_row(m, wish, target)
    row, python = found
    return _choice(m, wish, target, row, python)


def _check_platform(m: Machine, target: Target) -> None:
    system = m.snapshot.section("system")
    if system.get("os") not in (None, "", "Linux"):
        raise UserError(
            f"setup plans Linux machines, this is {system.get('os')}", hint="on Windows use WSL2", key="--gpu"
        )
    libc = m.python.get("libc")
    words = libc if isinstance(libc, str) else ""
    if words.startswith("musl") or (words.startswith("glibc") and () < parse_version(words[6:]) < (2, 28)):
        raise UserError(
            f"no torch wheel runs on {words}",
            hint="would match: a distribution with glibc 2.28 or newer, or setup inside a container of one",
            key="--env",
        )
    if target.kind == "rocm" and target.here and system.get("machine") not in (None, "", "x86_64", "AMD64"):
        raise UserError(
            f"ROCm wheels exist for x86_64 only, this is {system.get('machine')}",
            hint="would match: an x86_64 machine, or this one's CPU: --gpu cpu",
            key="--gpu",
        )


def _choice(m: Machine, wish: Wish, target: Target, row: _Row, python: Version) -> Choice:
    table = load_table()
    index = table.channels[row.channel]
    tag = index.wheel_tag.replace("{rocm}", row.rocm)
    notes = []
    if row.torch and "(I)" in row.torch.source:
        notes.append(f"the row of torch {short(row.torch.version)} is inferred ({row.torch.source})")
    if not _sound(row, target.gfx):
        notes.append(f"ROCm {row.rocm} has a known defect on {', '.join(target.gfx)}: setup never chooses it by itself")
    if row.source == "nightly":
        notes.append(
            f"only AMD's nightly builds have kernels for {', '.join(target.gfx)}: no release, not supported, and each "
            "is deleted after about four weeks. Keep a copy: surefoot setup bundle"
        )
    where = {"pip": "PyTorch's own wheels", "amd": "AMD's multi-arch wheels", "nightly": "AMD's nightly wheels"}
    release = f" for ROCm {row.rocm}" if row.rocm else ""
    return Choice(
        targets=target.gfx,
        rocm=row.rocm,
        torch=f"{short(row.torch.version)}.0{tag}" if row.torch else "",
        vision=f"{short(row.torch.vision)}.0{tag}" if row.torch else "",
        # AMD's index numbers torchaudio by its own rule, and text needs none.
        audio=f"{short(row.torch.audio)}.0{tag}" if row.torch and row.source == "pip" else "",
        index=wish.index or index.url.replace("{rocm}", row.rocm),
        source=row.source,
        channel=row.channel,
        python=short(python),
        reason=f"{target.fact}; {where[row.source]}{release} have kernels for {', '.join(target.gfx)}",
        notes=tuple(notes),
        **_callers(m, wish),
    )


def _plain_torch(m: Machine, wish: Wish, target: Target) -> Choice:
    """The torch of NVIDIA and CPU machines: PyTorch's CPU index, and for NVIDIA the plain wheel of pip's index."""
    what = "an NVIDIA GPU" if target.kind == "cuda" else "the CPU"
    if wish.rocm or wish.source in ("amd", "source"):
        option = f"--rocm {wish.rocm}" if wish.rocm else f"--source {wish.source}"
        raise UserError(
            f"{option} asks for ROCm, but the plan is for {what} ({target.fact})",
            hint=f"would match: --gpu gfxNNN for an AMD card, or leave out {option.split()[0]}",
            key=option.split()[0],
        )
    row = _releases(wish)[0]
    found = _with_python(m, wish, [_Row("pip", "", "", row)])
    if found is None:
        raise UserError(
            f"torch {short(row.version)} and Surefoot do not both run on Python {short(m.python_version)}",
            hint="would match: --env uv, which brings its own",
            key="--env",
        )
    _, python = found
    channel = "pytorch-cpu" if target.kind == "cpu" and not wish.index else ""
    index = load_table().channels.get(channel)
    tag = index.wheel_tag if index else ""
    return Choice(
        targets=(),
        rocm="",
        torch=f"{short(row.version)}.0{tag}",
        # Without local tags a mirror may serve torch and torchvision of different builds, and text needs none.
        vision="" if wish.index else f"{short(row.vision)}.0{tag}",
        audio="",
        index=wish.index or (index.url if index else ""),
        source="pip",
        channel=channel,
        python=short(python),
        kind=target.kind,
        reason=f"{target.fact}; torch {short(row.version)} is the newest release in the table",
        **_callers(m, wish),
    )


def _from_source(m: Machine, wish: Wish, target: Target) -> Choice:
    """The torch of a source build: the ROCm that is here, else the newest that the targets and the driver allow."""
    table, bound = load_table(), bool(m.driver) and target.here
    here = {short(v): path for path, v in m.rocm_trees.items() if v and target.here and not m.wsl}
    rows = [
        _Row("source", "", short(parse_version(rocm)), release)
        for release in _releases(wish)
        for rocm in (*reversed(release.amd), *reversed(release.rocm))
        if not wish.rocm or parse_version(rocm)[:2] == parse_version(wish.rocm)[:2]
    ]
    rows = [row for row in rows if not _blind(m, target, row)]
    if bound and m.container:
        rows = [row for row in rows if driver_allows(m, parse_version(row.rocm)[:2])]

    def rank(row: _Row) -> tuple[bool, bool, bool]:
        # No known defect, a driver that goes with it, a ROCm that is here already; of equals the newest torch.
        fitting = not bound or driver_allows(m, parse_version(row.rocm)[:2])
        return not _sound(row, target.gfx), not fitting, row.rocm not in here

    best = min(rows, key=rank, default=None)
    served = _with_python(m, wish, [best] if best else [])
    if best is None or best.torch is None or served is None:
        raise _no_row(m, wish, target)
    torch, found, python = best.torch, best.rocm, served[1]
    release = parse_version(found)
    from_pip = found not in here and release >= (7, 9)  # before, ROCm is no Python packages
    channel = ("amd-10" if release >= (10,) else "amd-7.14") if from_pip else ""
    toolchain = f"the ROCm in {here[found]}" if found in here else f"ROCm {found}'s own packages"
    return Choice(
        targets=target.gfx,
        rocm=found,
        torch=f"{short(torch.version)}.0+rocm{found}",
        vision="",
        audio="",
        index=wish.index or (table.channels[channel].url if channel else ""),
        source="source",
        channel=channel,
        python=short(python),
        reason=f"{target.fact}; built here with {toolchain}",
        notes=("a source build is rarely needed: try --source pip, then --source amd",),
        **_callers(m, wish),
    )


def _callers(m: Machine, wish: Wish) -> dict[str, Any]:
    """How the environment's Python and pip are called."""
    if wish.env != "system":
        python = quote(f"{wish.folder.rstrip('/')}/bin/python")
        return {"interpreter": python, "pip": f"{python} -m pip"}
    # A container's Python is its own to change, also where it is marked as the package manager's (PEP 668).
    allowed = "PIP_BREAK_SYSTEM_PACKAGES=1 " if m.container else ""
    return {"interpreter": "python3", "pip": f"{allowed}python3 -m pip"}


def _no_row(m: Machine, wish: Wish, target: Target) -> UserError:
    """The refusal: what was asked for, and what would match if one part of the wish gave way."""
    asked = [f"--{n} {v}" for n in ("source", "torch", "rocm") if (v := getattr(wish, n))]
    facts = [f"Python {short(m.python_version)}"] if wish.env == "system" else []
    if m.driver and target.here and m.container:
        facts.append(f"the host's driver {short(m.driver, 3)}")
    ways = []
    parts = [n for n in ("rocm", "torch", "source") if getattr(wish, n)]
    for size in range(1, len(parts) + 1):
        for names in combinations(parts, size):
            if found := _select(m, target, _without(wish, names)):
                ways.append(f"without --{' and --'.join(names)}: {_words(found[0])}")
        if ways:
            break
    if wish.env == "system" and (found := _select(m, target, replace(wish, env="venv"))):
        ways.append(f"--env uv with Python {short(found[1])}: {_words(found[0])}")
    rows = [load_table().gpu(gfx) for gfx in target.gfx]
    if all(row and row.support != "bring-up" for row in rows):
        ways.append("a build from source: --source source")
    ways += ["another card: --gpu gfxNNN", "no GPU: --gpu cpu"]
    with_what = " with ".join([" ".join(asked) or "any torch", *facts])
    return UserError(
        f"no row of the table serves {', '.join(target.gfx)} and {with_what}",
        hint="would match: " + "; ".join(dict.fromkeys(ways)),
        key=asked[0].split()[0] if asked else "--gpu",
    )


def _without(wish: Wish, names: tuple[str, ...]) -> Wish:
    empty: dict[str, Any] = dict.fromkeys(names, "")
    return replace(wish, **empty)


def _words(row: _Row) -> str:
    if row.torch is None:
        return "AMD's nightly wheels"
    return f"torch {short(row.torch.version)} for ROCm {row.rocm} ({'PyTorch' if row.source == 'pip' else 'AMD'})"
