"""Beyond the catalogue: environment variables, compiled add-ons, known-bad builds (F104 to F116)."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from importlib import resources
from typing import Any

from surefoot.doctor.clues import is_rocm, line, said
from surefoot.doctor.finding import LEVELS, Hit, hit, seen
from surefoot.doctor.texts import BOTH
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import as_dict, as_text, as_texts
from surefoot.machine.versions import parse_version, same_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@lru_cache(maxsize=2)
def load_rows(name: str) -> dict[str, Any]:
    """Read one of the doctor's own TOML files; once a process, since they never change."""
    return tomllib.loads(resources.files("surefoot.doctor").joinpath(name).read_text(encoding="utf-8"))


def _both(given: str, why: str, source: str = "") -> str:
    """Join what was found with its reason, in both languages."""
    english, _, chinese = why.partition(" || ")
    return f"{given}: {english}{source}{BOTH}{given}：{chinese}{source}"


def _applies(m: Machine, row: dict[str, Any]) -> bool:
    gpu = m.torch is not None and m.torch.flavour in ("rocm", "cuda")
    when = {"rocm": is_rocm(m) and m.has_amd, "gpu": gpu, "multi": gpu and len(m.visible) > 1}[row["when"]]
    if row.get("only_without") == "xnack":
        when = when and bool(m.kfd) and all(g.row is not None and not g.row.xnack for g in m.visible)
    if prefix := row.get("unless"):
        when = when and not any(t.startswith(prefix) for t in m.targets)
    if needed := row.get("needs"):
        when = when and m.env(needed) == "1"
    return when


def _variables(m: Machine, kind: str) -> Hit | None:
    found = []
    for row in load_rows("environment.toml")["variable"]:
        value = m.env(row["name"])
        if row["kind"] == kind and value is not None and re.fullmatch(row["value"], value) and _applies(m, row):
            found.append((row["name"], _both(f"{row['name']}={value}", row["why"])))
    names = " ".join(name for name, _ in found)
    return hit(*(text for _, text in found), names=names) if found else None


def f104(m: Machine) -> Hit | None:
    """Variables for debugging that make every step slow."""
    return _variables(m, "slow")


def f105(m: Machine) -> Hit | None:
    """Variables that point to nowhere."""
    found = []
    for name, why in load_rows("environment.toml")["paths"].items():
        value = m.env(name) or ""
        for entry in re.split(r"[:\s]+", value) if name == "LD_PRELOAD" else [value]:
            if entry.startswith("/") and m.snapshot.absent(entry):
                found.append((name, _both(f"{name}={entry}, which is not there", why)))
    names = " ".join(dict.fromkeys(name for name, _ in found))
    return (
        hit(*(text for _, text in found), names=names)
        if found and (is_rocm(m) or m.has_amd or m.torch is not None)
        else None
    )


def f106(m: Machine) -> Hit | None:
    """Variables that do not fit this hardware."""
    return _variables(m, "wrong")


def f107(m: Machine) -> Hit | None:
    """PYTHONPATH or the user's own site folder puts another torch in front."""
    found = []
    for name in ("PYTHONPATH", "PYTHONHOME"):
        value = m.env(name) or ""
        if name == "PYTHONHOME" and value:
            found.append(f"PYTHONHOME={value}")
        if re.search(r"(site|dist)-packages", value):
            found.append(f"{name}={value}")
    shadow = as_text(m.python.get("shadowed_by"))
    if shadow:
        found.append(f"import torch would take {shadow}")
    return hit(*found) if found and m.python.get("kind") in ("venv", "conda", "uv") else None


def _binaries(m: Machine) -> dict[str, dict[str, Any]]:
    return {name: as_dict(row) for name, row in as_dict(m.python.get("binaries")).items()}


def package_of(m: Machine, file: str) -> str:
    """The distribution that a compiled add-on's file belongs to, by its name; else the file's first part."""
    stem = re.split(r"[/.]", file.rpartition("site-packages/")[2] or file)[0].lower()
    owners = [n for n in m.dists if stem.startswith(n.replace("-", "_"))]
    return max(owners, key=len, default=stem)


def f110(m: Machine) -> Hit | None:
    """A compiled add-on that was built for CUDA beside a ROCm torch."""
    if not is_rocm(m):
        return None
    pattern = r"lib(cudart|cublas|cuda|c10_cuda|torch_cuda|nvrtc|cusparse)\b"
    wrong = []
    for name, row in sorted(_binaries(m).items()):
        load = as_text(row.get("load"))
        links = [n for n in as_texts(row.get("needed")) if re.match(pattern, n)]
        if "cannot open shared object" in load and re.search(pattern, load):
            links.append(load[:200])
        if links:
            wrong.append((name, f"{name} needs {', '.join(links[:3])}"))
    text = m.log_said(r"lib(cudart|cublas|c10_cuda|torch_cuda|nvrtc|cuda)\S*\.so\S*: cannot open shared object file")
    if not wrong and not text:
        return None
    package = package_of(m, wrong[0][0]) if wrong else ""
    evidence = tuple(e for _, e in wrong[:4])
    return seen(*evidence, f"log: {text}", package=package) if text else hit(*evidence, package=package)


def f111(m: Machine) -> Hit | None:
    """A compiled add-on that was built for another torch or another ROCm."""
    if not m.torch:
        return None
    found = []
    for name, row in sorted(_binaries(m).items()):
        load = as_text(row.get("load"))
        if re.search(r"undefined symbol", load):
            found.append((name, f"{name}: {load[:200]}"))
        for folder in as_texts(row.get("runpath")):
            version = re.search(r"/opt/rocm-(\d+\.\d+)", folder)
            if version and is_rocm(m) and m.torch.rocm and not same_line(parse_version(version.group(1)), m.torch.rocm):
                found.append((name, f"{name} has RUNPATH {folder}, torch was built for ROCm {line(m.torch.rocm)}"))
    text = m.log_said(
        r"(flash_attn|xformers|deepspeed|apex|causal_conv1d|mamba|bitsandbytes|exllama|vllm)\S*\.so\S*: "
        r"undefined symbol: \S+"
    )
    if not found and not text:
        return None
    named = re.search(r"([\w.-]+)\.so\S*: undefined symbol", text)
    package = package_of(m, found[0][0] if found else (named.group(1) if named else ""))
    evidence = tuple(e for _, e in found[:4])
    return seen(*evidence, f"log: {text}", package=package) if text else hit(*evidence, package=package)


def bad_builds(m: Machine) -> list[dict[str, Any]]:
    """Rows of the known-bad table that apply to this machine."""
    found = []
    for row in load_rows("known_bad.toml")["build"]:
        dist = m.dists.get(row["dist"])
        if not dist or not is_rocm(m) or not m.has_amd:
            continue
        version = parse_version(dist.version)
        late = bool(row["min"]) and version < parse_version(row["min"])
        early = bool(row["below"]) and version >= parse_version(row["below"])
        if not version or late or early:
            continue
        if row["gfx"] and not any(t.startswith(tuple(row["gfx"])) for t in m.compute_targets):
            continue
        if row["rocm"] and not parse_version(row["rocm"][0]) <= m.rocm[:2] < parse_version(row["rocm"][1]):
            continue
        found.append({**row, "version": dist.version})
    return found


def f116(m: Machine) -> Hit | None:
    """A package in a version that is known to be broken here."""
    rows = bad_builds(m)
    if not rows:
        return None
    text = said(m, r"nan\b.*4.?bit|unsupported target: 'gfx")
    evidence = tuple(_both(f"{r['dist']} {r['version']}", r["what"], f" ({r['source']})") for r in rows)
    worst = min((r["level"] for r in rows), key=LEVELS.index)
    return Hit(
        (*evidence, text) if text else evidence,
        {"dist": rows[0]["dist"]},
        seen=bool(text),
        level=worst,
        fix=tuple(dict.fromkeys(r["fix"] for r in rows)),
    )
