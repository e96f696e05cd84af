"""What is said of a tutorial's package installs, environments, source builds and checks of torch, for one machine."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass

from surefoot.doctor.fixes import driver_allows, fits, torch_for
from surefoot.machine.table import TorchRelease, load_table
from surefoot.machine.versions import Version, local_tag, parse_version, rocm_of_tag, short
from surefoot.setup.addons import bitsandbytes_library
from surefoot.setup.advice_rules import OUTDATED, RIGHT, UNKNOWN, WRONG, Context, Ruling, load_words, rule, triton_flash
from surefoot.setup.tutorial import Piece

_AMD_INDEX = re.compile(r"repo\.amd\.com|nightlies\.amd\.com|devreleases\.amd\.com")
_TRIO = ("torch", "torchvision", "torchaudio")


@dataclass(frozen=True)
class Package:
    """One requirement: its normalised name (`.` for a folder), extras, version specifier and text."""

    name: str
    extras: tuple[str, ...]
    version: str
    text: str


@dataclass(frozen=True)
class Install:
    """A `pip install`: requirements and the options that decide where they come from."""

    packages: tuple[Package, ...]
    values: dict[str, tuple[str, ...]]
    flags: frozenset[str]

    def value(self, *names: str) -> str:
        """The last value of an option under any of its names, or an empty string."""
        return next((self.values[name][-1] for name in names if name in self.values), "")

    @property
    def index(self) -> str:
        """The index that replaces the default one."""
        return self.value("-i", "--index-url", "--default-index")

    @property
    def extra(self) -> str:
        """An index that is asked beside the others."""
        return self.value("--extra-index-url", "--index", "-f", "--find-links")

    @property
    def pinned(self) -> bool:
        """Whether a constraints file or `--no-deps` keeps torch as it is."""
        return bool(self.value("-c", "--constraint")) or "--no-deps" in self.flags

    @property
    def upgrade(self) -> bool:
        """Whether named packages are replaced by newer ones."""
        return bool(self.flags & {"-U", "--upgrade"})


def read_install(words: tuple[str, ...]) -> Install | None:
    """Read `pip install …`, `python -m pip install …` or `uv pip install …`; None for any other command."""
    left = list(words)
    if re.match(r"(.*/)?(python[\d.]*|\$\w+|\$\{\w+\})$", left[0]) and left[1:3] == ["-m", "pip"]:
        left = left[2:]
    if left[0] == "uv":
        left = left[1:]
    if not left or not re.match(r"(.*/)?pip[\d.]*$", left[0]) or "install" not in left[1:3]:
        return None
    left = left[left.index("install") + 1 :]
    with_value = load_words()["names"]["pip_options_with_value"]
    packages, flags = [], set()
    values: dict[str, tuple[str, ...]] = {}
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name in with_value and word.startswith("-"):
            given = value if equals else left.pop(0) if left else ""
            values[name] = (*values.get(name, ()), given)
        elif word.startswith("-"):
            flags.add(word)
        else:
            packages.append(_package(word))
    return Install(tuple(packages), values, frozenset(flags))


def _package(text: str) -> Package:
    found = re.match(r"(\.{0,2}[\w./~$-]*)(?:\[([^\]]*)\])?\s*(.*)$", text)
    name, extras, version = found.groups() if found else (text, "", "")
    local = "/" in name or name.startswith((".", "~", "$")) or text.startswith("git+")
    listed = tuple(e.strip() for e in (extras or "").split(",") if e.strip())
    return Package("." if local else re.sub(r"[-_.]+", "-", name.lower()), listed, version or "", text)


def install(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge a pip install: sudo first, then each of its packages once."""
    found = read_install(piece.words)
    if not found:
        return
    if piece.sudo:
        yield Ruling("sudo-pip", WRONG)
    if "--break-system-packages" in found.flags:
        yield Ruling("break-system", WRONG)
    if found.value("-r", "--requirement") and not found.pinned:
        yield Ruling("requirements", UNKNOWN, {"file": found.value("-r", "--requirement")})
    trio = [p for p in found.packages if p.name in _TRIO]
    if trio:
        yield from _torch(trio, found, c)
    rest = [ruling for p in found.packages if p.name not in _TRIO for ruling in _other(p, piece, found, c)]
    yield from {r.key: r for r in rest}.values()  # one word on several packages of a kind


# ---- torch itself ----
def _torch(trio: list[Package], found: Install, c: Context) -> Iterator[Ruling]:
    url = found.index or found.extra
    release, rocm = _pinned(trio)
    tag = re.search(r"/whl/(?:nightly/|test/)?(rocm[\d.]+|cu\d+|cpu|xpu)", url)
    channel = tag.group(1) if tag else ""
    values = {"url": url, "channel": channel, "names": " ".join(p.name for p in trio)}
    if not c.amd:
        yield from _torch_elsewhere(c, "rocm" if rocm or _AMD_INDEX.search(url) else channel, values)
    elif not url and not rocm and found.upgrade:
        yield Ruling("torch-upgrade", WRONG, values)
    elif not url:
        yield Ruling("torch-local-tag" if rocm else "torch-plain", WRONG, values)
    elif not found.index:
        yield Ruling("torch-extra-index", WRONG, values)
    elif channel and not channel.startswith("rocm"):
        yield Ruling("torch-other-build", WRONG, values)
    elif "radeon.com" in url:
        yield Ruling("torch-radeon", OUTDATED, values)
    elif channel:
        yield from _official(c, parse_version(channel[4:]), release, "/nightly/" in url, values)
    elif _AMD_INDEX.search(url):
        yield from _amd_index(trio, c, url, values)


def _torch_elsewhere(c: Context, channel: str, values: dict[str, str]) -> Iterator[Ruling]:
    if channel.startswith("rocm"):
        yield Ruling("torch-rocm-here", WRONG, values)
    elif c.side == "nvidia":
        yield Ruling(
            "torch-cpu-on-nvidia" if channel == "cpu" else "torch-cuda", WRONG if channel == "cpu" else RIGHT, values
        )
    elif channel == "cpu":
        yield Ruling("torch-cpu", RIGHT, values)
    else:
        yield Ruling("torch-cuda-on-cpu", OUTDATED, values)


def _pinned(trio: list[Package]) -> tuple[Version, Version]:
    """The torch version and the ROCm of the local tag that the requirements pin, each empty when they do not."""
    torch = next((p.version for p in trio if p.name == "torch"), "")
    exact = torch.removeprefix("==").strip() if torch.startswith("==") else ""
    tags = [rocm_of_tag(local_tag(p.version)) for p in trio]
    return parse_version(exact), next((tag for tag in tags if tag), ())


def _official(c: Context, rocm: Version, release: Version, nightly: bool, values: dict[str, str]) -> Iterator[Ruling]:
    """Judge PyTorch's own index for one ROCm."""
    table = load_table()
    holders = [row for row in table.torch if any(parse_version(v) == rocm for v in row.rocm)]
    targets, choice = c.m.compute_targets, torch_for(c.m)
    values = values | {"rocm": short(rocm, 3), "mine": ", ".join(targets), "torch": short(release)}
    served = table.wheel_targets(rocm) if rocm < (7, 14) else table.rocm[-1].gfx
    lacking = [t for t in targets if t not in served]
    window = table.driver_of(c.m.driver) if c.m.driver else None
    if release and holders and not any(row.version == release[:2] for row in holders):
        yield Ruling("torch-no-pair", WRONG, values | {"has": ", ".join(short(row.version) for row in holders)})
    elif lacking:
        yield Ruling("torch-no-kernels", WRONG, values | {"lacking": ", ".join(lacking)})
    elif nightly:
        yield Ruling("torch-nightly", OUTDATED, values)
    elif not holders:
        yield Ruling("torch-no-channel", WRONG, values | {"has": ", ".join(_channels(table.torch))})
    elif not fits(set(targets), rocm):
        kinds = {"gfx103": "torch-rdna2", "gfx120": "torch-gfx12"}
        yield Ruling(next((k for p, k in kinds.items() if targets[0].startswith(p)), "torch-defect"), WRONG, values)
    elif window and not driver_allows(c.m, rocm):
        span = f"{window.stream}: {short(window.userspace[0])} – {short(window.userspace[1])}"
        yield Ruling("torch-driver", WRONG, values | {"window": span})
    elif choice and parse_version(choice[1])[:2] > rocm[:2]:
        yield Ruling("torch-older", OUTDATED, values)
    else:
        yield Ruling("torch-right", RIGHT, values)


def _channels(rows: tuple[TorchRelease, ...]) -> list[str]:
    """ROCm channels of the last releases."""
    return list(dict.fromkeys(v for row in rows[-5:] if "(I)" not in row.source for v in row.rocm))


def _amd_index(trio: list[Package], c: Context, url: str, values: dict[str, str]) -> Iterator[Ruling]:
    """Judge AMD's own indexes, where kernels are packages of their own, one a target."""
    targets = c.m.compute_targets
    wanted = {e.removeprefix("device-") for p in trio for e in p.extras if e.startswith("device-")}
    values = values | {"mine": ", ".join(targets), "want": ",".join(f"device-{t}" for t in targets)}
    per_family = re.search(r"/(gfx[\w-]+)/?$", url)
    if per_family:
        yield Ruling("torch-family-index", OUTDATED, values)
    elif "all" not in wanted and any(t not in wanted for t in targets):
        yield Ruling("torch-no-device", WRONG, values)
    elif "nightl" in url or "devreleases" in url:
        listed = all((row := load_table().gpu(t)) and row.support == "listed" for t in targets)
        yield Ruling("torch-nightly" if listed else "torch-amd-nightly", OUTDATED if listed else RIGHT, values)
    else:
        yield Ruling("torch-amd", RIGHT, values)


# ---- other packages ----
def _other(package: Package, piece: Piece, found: Install, c: Context) -> Iterator[Ruling]:
    name, names = package.name, load_words()["names"]
    values = {
        "package": name,
        "text": f'-e "{package.text}"' if found.flags & {"-e", "--editable"} else f'"{package.text}"',
    }
    row = next((p for p in load_table().placeholders if fnmatch.fnmatchcase(name, p.name)), None)
    if name in ("flash-attn", "flash-attention", "flash-attn-3") or (name == "." and _in_flash(piece, found, c)):
        yield from _flash(piece, found, c, released=name != ".")
    elif row and not (found.index and "amd.com" in found.index) and not (found.index and "/whl/rocm" in found.index):
        yield Ruling("placeholder", WRONG, values | {"instead": row.instead, "source": row.source})
    elif name == "triton" and c.amd:
        yield Ruling("triton", WRONG, values)
    elif name == "deepspeed" or "deepspeed" in package.extras:
        yield from _deepspeed(found, c, values)
    elif name == "bitsandbytes":
        yield from _bitsandbytes(package, c, values)
    elif name in names["cuda_only"] and c.amd and not found.index:
        yield Ruling("cuda-only", WRONG, values)
    elif "torch" in package.extras and c.amd and not found.pinned:
        yield Ruling("torch-extra", WRONG, values)
    elif name in names["need_torch"]:
        yield from rule(
            "needs-torch-pinned" if found.pinned else "needs-torch",
            RIGHT if found.pinned or not c.amd else OUTDATED,
            package=name,
        )
    elif name in names["no_torch"]:
        yield Ruling("no-torch", RIGHT, values)
    elif name == "." and not found.pinned:
        yield Ruling("folder", UNKNOWN, values)


def _in_flash(piece: Piece, found: Install, c: Context) -> bool:
    """Whether `pip install .` stands in a clone of flash-attention."""
    named = any(
        n in piece.env for n in ("GPU_ARCHS", "FLASH_ATTENTION_TRITON_AMD_ENABLE", "FLASH_ATTENTION_FORCE_BUILD")
    )
    places = [p.text for p in c.pieces if p.line <= piece.line and p.text.startswith("cd ")]
    rocm_flag = any("--rocm" in v for values in found.values.values() for v in values)
    return named or rocm_flag or bool(places and re.search(r"flash-?att", places[-1]))


def _flash(piece: Piece, found: Install, c: Context, released: bool) -> Iterator[Ruling]:
    """Judge flash-attn; the option `--rocm` never existed."""
    options = [
        v
        for name in ("--global-option", "--install-option", "--build-option", "-C", "--config-settings")
        for v in found.values.get(name, ())
    ]
    isolated = "--no-build-isolation" not in found.flags
    ck = load_table().addons["flash_attn_ck"]["release_gfx" if released else "gfx"]
    left = [t for t in c.m.compute_targets if t not in ck]
    if any("--rocm" in value for value in options):
        yield from rule("flash-rocm-option" if c.amd else "flash-rocm-option-here", WRONG)
    elif c.side == "cpu":
        yield from rule("flash-cpu", WRONG)
    elif isolated:
        yield from rule("flash-isolation", WRONG)
    elif not c.amd:
        yield from rule("flash-cuda", RIGHT)
    elif c.variable("FLASH_ATTENTION_TRITON_AMD_ENABLE", piece).upper() in ("TRUE", "1"):
        yield from triton_flash(c)
    elif left:
        yield from rule("flash-no-ck", WRONG, left=", ".join(left))
    elif c.variable("GPU_ARCHS", piece):
        yield from rule("flash-right", RIGHT)
    else:
        yield from rule("flash-no-archs", OUTDATED)


def _deepspeed(found: Install, c: Context, values: dict[str, str]) -> Iterator[Ruling]:
    if found.pinned:
        yield Ruling("deepspeed-pinned", RIGHT, values)
    elif c.side == "nvidia":
        yield Ruling("deepspeed-nvidia", RIGHT, values)
    else:
        yield Ruling("deepspeed", WRONG, values)


def _bitsandbytes(package: Package, c: Context, values: dict[str, str]) -> Iterator[Ruling]:
    if not c.amd:
        yield Ruling("bitsandbytes", RIGHT, values)
        return
    addon = load_table().addons["bitsandbytes"]
    pinned = parse_version(re.sub(r"^[=<>~!]+\s*", "", package.version)) if re.match(r"==|<=?", package.version) else ()
    rocm = c.m.torch.rocm if c.m.torch else c.m.rocm
    left = [t for t in c.m.compute_targets if t not in addon[bitsandbytes_library(rocm)[1]]]
    values = values | {"min": addon["version_min"], "left": ", ".join(left), "rocm": short(rocm) or "?"}
    if pinned and pinned < parse_version(addon["version_min"]):
        yield Ruling("bitsandbytes-old", OUTDATED, values)
    elif left:
        yield Ruling("bitsandbytes-no-kernels", WRONG, values)
    else:
        yield Ruling("bitsandbytes-rocm", RIGHT, values)


# ---- environments, source builds, checks ----
def environment(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge making an environment, and torch from conda."""
    words, text = piece.words, piece.text
    first = words[0].rpartition("/")[2]
    makes = (
        (first in ("conda", "mamba") and "create" in words) or (first == "uv" and "venv" in words) or "-m venv" in text
    )
    if makes:
        asked = re.search(r"python(?:=+|\s+)?(3\.\d+)", text)
        version, table = parse_version(asked.group(1)) if asked else (), load_table()
        low, high = table.torch[-2].python
        if version and not low <= version <= high:
            values = {"python": short(version), "low": short(low), "high": short(high)}
            yield Ruling("python-range", WRONG, values)
        else:
            conda = "conda" if c.amd else "conda-elsewhere"
            yield Ruling(conda if first in ("conda", "mamba") else "venv", RIGHT)
    elif re.match(r"((conda|mamba) activate\b|(source|\.) .*bin/activate)", text):
        yield Ruling("activate", RIGHT)
    elif first in ("conda", "mamba") and "install" in words and re.search(r"\b(pytorch|torch)\b", text):
        yield Ruling("conda-torch", WRONG if c.amd else OUTDATED)


def source_build(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge the steps of a PyTorch built from source: needed only where no wheel has the kernels."""
    text = piece.text
    clone = piece.words[:2] == ("git", "clone") and re.search(r"/pytorch(?:\.git)?(\s|$)", text)
    within = c.told(r"git clone .*/pytorch(\.git)?(\s|$)|^cd (.*/)?pytorch/?$|build_amd\.py", piece.line)
    elsewhere = [p.text for p in c.pieces if p.line <= piece.line and p.text.startswith("cd ")][-1:]
    if elsewhere and not re.search(r"pytorch", elsewhere[0]):
        within = False
    builds = "build_amd.py" in text or (
        within and re.search(r"setup\.py (install|develop|bdist_wheel)|-m build\b", text)
    )
    if not clone and not builds:
        return
    if not c.amd:
        yield from rule("source-elsewhere", OUTDATED)
        return
    table, targets = load_table(), c.m.compute_targets
    choice = torch_for(c.m)
    covered = choice or (targets and all(t in table.rocm[-1].gfx for t in targets))
    key = "source-setup-py" if "setup.py" in text and not clone else "source"
    yield from rule(key if covered else "source-needed", OUTDATED if covered else RIGHT)


def check(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge lines that ask torch what it sees."""
    text = piece.text
    if "is_bf16_supported" in text and c.amd:
        yield from rule("check-bf16", WRONG)
    elif "torch.version.cuda" in text and c.amd and "torch.version.hip" not in text:
        yield from rule("check-cuda-version", WRONG)
    elif re.search(r"cuda\.(is_available|device_count|get_device_name)|torch\.version\.hip", text):
        yield from rule({"amd": "check-amd", "nvidia": "check-nvidia", "cpu": "check-cpu"}[c.side], RIGHT)
