"""C. Wheel selection and Python environment (F35 to F44)."""

from __future__ import annotations

import fnmatch
import re

from surefoot.doctor.clues import amd_context, display_only, gpu_words, is_rocm, line, pci_words, said
from surefoot.doctor.finding import Hit, hit, seen
from surefoot.machine.facts import Machine
from surefoot.machine.gfx import base_name
from surefoot.machine.snapshot import Dist, as_text
from surefoot.machine.table import load_table
from surefoot.machine.versions import local_tag, parse_version, rocm_of_tag, same_line, short, soname_major


def wrong_build(m: Machine) -> bool:
    """Whether torch is no ROCm build although an AMD GPU that ROCm could use is here, and no NVIDIA GPU is."""
    if not m.torch or is_rocm(m) or m.has_nvidia or not m.has_amd:
        return False
    if display_only(m):
        return False
    known_old = [load_table().unsupported_asic(g.device) for g in m.amd_pci]
    return not (known_old and all(known_old))


def f35(m: Machine) -> Hit | None:
    """A CPU or CUDA torch on an AMD machine."""
    if not wrong_build(m) or not m.torch:
        return None
    nvidia = sorted(n for n in m.dists if n.startswith("nvidia-"))
    text = m.log_said(r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|is_available\(?\)?\W+False")
    kind = f"for CUDA {m.torch.cuda}" if m.torch.flavour == "cuda" else "for CPU only"
    evidence = (
        f"torch/version.py: {m.torch.version}, built {kind}, hip = None",
        f"the machine has {gpu_words(m)}" + (f" ({pci_words(m)})" if m.amd_pci else ""),
        f"{len(nvidia)} nvidia-* packages are installed" if nvidia else "",
    )
    return seen(*evidence, f"log: {text}") if text else hit(*evidence)


def _rocm_leftovers(m: Machine) -> list[Dist]:
    marks = ("triton-rocm", "pytorch-triton-rocm")
    found = []
    for dist in m.dists.values():
        kernels = re.match(r"(amd-torch-device|rocm-sdk)-", dist.name) and not dist.version.startswith("0.0.1")
        if (
            dist.name in marks
            or kernels
            or (dist.name in ("torchvision", "torchaudio") and rocm_of_tag(local_tag(dist.version)))
        ):
            found.append(dist)
    return sorted(found, key=lambda d: d.name)


def f36(m: Machine) -> Hit | None:
    """A ROCm torch was replaced later by a dependency's choice."""
    torch = m.dists.get("torch")
    if not torch or not m.torch or is_rocm(m) or not amd_context(m) or m.has_nvidia:
        return None
    left = _rocm_leftovers(m)
    log = m.log_said(
        r"Attempting uninstall: torch|Uninstalling torch-\S*rocm|Found existing installation: torch \S*rocm"
    )
    pulled = _pulled_by(m, torch)
    nvidia = [d for d in m.dists.values() if d.name.startswith("nvidia-") and d.modified and torch.modified]
    newer = m.torch.flavour == "cuda" and bool(nvidia) and bool(pulled)
    if not left and not log and not newer:
        return None
    evidence = (
        (
            f"torch is {m.torch.version}, but ROCm's own packages are still here: "
            f"{', '.join(f'{d.name} {d.version}' for d in left[:4])}"
        )
        if left
        else "",
        f"installed in the same minutes as torch and asking for it: {', '.join(pulled[:4])}" if pulled else "",
    )
    return seen(*evidence, f"log: {log}") if log else hit(*evidence)


def _pulled_by(m: Machine, torch: Dist) -> list[str]:
    """Packages that ask for torch and came within ten minutes of it, torch's own companions left out."""
    own = {"torch", "torchvision", "torchaudio"}
    return sorted(
        d.name
        for d in m.dists.values()
        if d.name not in own
        and d.modified
        and torch.modified
        and abs(d.modified - torch.modified) < 600
        and any(re.match(r"torch(?![\w-])(?!.*extra\s*==)", r) for r in d.requires)
    )


def f37(m: Machine) -> Hit | None:
    """Companions (torch, torchvision, torchaudio) that do not belong together."""
    text = m.log_said(
        r"operator torchvision::\w+ does not exist|torch(vision|audio)\S*\.so.*undefined symbol|undefined "
        r"symbol.*torch(vision|audio)"
    )
    if not m.torch:
        return None
    row, tag = load_table().torch_release(m.torch.number), _flavour(m.torch.version, m.torch.flavour)
    wrong = []
    for name, wants in (("torchvision", row.vision if row else ()), ("torchaudio", row.audio if row else ())):
        dist = m.dists.get(name)
        if not dist:
            continue
        other = _flavour(
            dist.version,
            m.torch.flavour if dist.installer not in ("pip", "uv") or not local_tag(m.torch.version) else "cuda",
        )
        if other != tag:
            wrong.append(f"{name} is {dist.version}, torch is {m.torch.version}")
        elif wants and parse_version(dist.version)[:2] != wants[:2]:
            wrong.append(f"{name} is {dist.version}, torch {short(m.torch.number)} goes with {name} {short(wants)}")
    if not wrong and not text:
        return None
    return seen(f"log: {text}", *wrong) if text else hit(*wrong)


def _flavour(version: str, without_tag: str) -> str:
    """Sort a package's local tag: rocm7.2, cpu, cuda; no tag means PyPI's own build."""
    tag = local_tag(version)
    if rocm := rocm_of_tag(tag):
        return f"rocm{short(rocm)}"
    if tag.startswith("cu") or (not tag and without_tag == "cuda"):
        return "cuda"
    return "cpu" if tag == "cpu" or (not tag and without_tag == "cpu") else (tag or without_tag)


# The index that pip asks when nothing is configured: naming it changes nothing.
_DEFAULT_INDEX = re.compile(r"//pypi\.[a-z]+/simple/?['\"]?$")


def f38(m: Machine) -> Hit | None:
    """A pip or uv that is configured to ask somewhere else than the ROCm index."""
    if not wrong_build(m) and not (m.torch is None and m.log_said(r"Looking in (indexes|links)")):
        return None
    found = []
    env = m.snapshot.section("env")
    for name in sorted(env):
        tool = re.fullmatch(
            r"(PIP|UV)_(EXTRA_INDEX_URL|FIND_LINKS|CONSTRAINTS?|INDEX_URL|INDEX|DEFAULT_INDEX|OVERRIDE)", name
        )
        value = m.env(name) or ""
        if tool and value and "rocm" not in value and not _DEFAULT_INDEX.search(value):
            found.append(f"{name}={value}")
    pattern = r"^\s*\[?\[?\s*((?:extra-)?index-url|find-links|constraint|url|default|index)\b\s*=\s*(.+)$"
    for path in (p for p in m.snapshot.glob("*") if re.search(r"(pip\.conf|pip\.ini|/pip/.*conf|uv\.toml)$", p)):
        for key, value in re.findall(pattern, m.snapshot.text(path), re.M):
            if "rocm" not in value and not _DEFAULT_INDEX.search(value):
                found.append(f"{path}: {key} = {value.strip()}")
    for entry in re.findall(r"^\S*\.(?:extra-index-url|index-url|find-links|constraint)='?.*$", m.log, re.M):
        if "rocm" not in entry and not _DEFAULT_INDEX.search(entry):
            found.append(f"pip config list: {entry}")
    return hit(*found[:6]) if found else None


def f39(m: Machine) -> Hit | None:
    """No ROCm wheel exists for this torch, Python or ABI."""
    table, python = load_table(), m.python_version[:2]
    text = m.log_said(
        r"No matching distribution found for torch\b|Could not find a version that satisfies the "
        r"requirement torch\b|there (is|are) no versions? of torch\b|has no wheels? with a matching (Python|platform)"
    )
    if text and amd_context(m):
        asked = re.search(r"torch==(\d+\.\d+)", m.log)
        row = table.torch_release(parse_version(asked.group(1))) if asked else None
        index = re.search(r"whl/rocm(\d+\.\d+(?:\.\d+)?)", m.log)
        words = f"torch {short(row.version)} exists for ROCm {', '.join(row.rocm)}" if row else ""
        newest = [r for r in table.torch if index and index.group(1) in r.rocm]
        ends = (
            f"the rocm{index.group(1)} index holds torch {', '.join(short(r.version) for r in newest)}"
            if index and newest
            else ""
        )
        return seen(f"log: {text}", words, ends, f"Python is {short(python)}" if python else "")
    if is_rocm(m) or not python or not (wrong_build(m) or (m.has_amd and m.torch is None and m.dists_known)):
        return None
    newest_python = table.torch[-1].python[1][:2]
    if python < (3, 8) or python > newest_python:
        return hit(
            f"Python is {short(python)}",
            f"ROCm wheels of torch exist for Python 3.8 (old ones) to {short(newest_python)}",
        )
    if m.python.get("free_threaded") is True and python < (3, 14):
        return hit(f"Python is a free-threaded {short(python)}", "free-threaded ROCm wheels begin with 3.14t")
    return None


def f40(m: Machine) -> Hit | None:
    """The wheel's platform is not this machine's."""
    text = m.log_said(
        r"is not a supported wheel on this platform|manylinux_2_\d+\S* .*not (compatible|supported)|requires glibc"
    )
    libc = m.python.get("libc") if isinstance(m.python.get("libc"), str) else ""
    machine = m.snapshot.section("system").get("machine")
    reasons = []
    if isinstance(libc, str) and libc.startswith("musl"):
        reasons.append(f"the C library is {libc}")
    elif isinstance(libc, str) and libc.startswith("glibc") and () < parse_version(libc[5:]) < (2, 28):
        reasons.append(f"the C library is {libc}; the wheels are built for manylinux_2_28")
    if machine in ("aarch64", "arm64", "ppc64le", "riscv64") and amd_context(m):
        reasons.append(f"the processor is {machine}; ROCm wheels exist for x86_64 only")
    if text and amd_context(m):
        return seen(f"log: {text}", *reasons)
    refused = m.log_said(r"No matching distribution found for torch\b")
    if reasons and refused and amd_context(m):
        return seen(f"log: {refused}", *reasons)
    return hit(*reasons) if reasons and amd_context(m) and not is_rocm(m) else None


def f41(m: Machine) -> Hit | None:
    """A placeholder or a namesake from PyPI."""
    found, instead = [], ""
    for dist in sorted(m.dists.values(), key=lambda d: d.name):
        for row in load_table().placeholders:
            if not fnmatch.fnmatchcase(dist.name, row.name) or not (
                "*" in row.versions or dist.version in row.versions
            ):
                continue
            if row.versions == ("*",) and not (m.has_amd or is_rocm(m)):
                continue  # the namesake is somebody's ordinary package elsewhere
            if dist.name == "pytorch-triton-rocm" and m.torch and m.torch.number[:2] == (2, 1):
                continue
            found.append(f"{dist.name} {dist.version}" + (f": {dist.summary}" if dist.summary else ""))
            # What it stands for comes with a torch from the right index, or has a name of its own.
            instead = (
                f"{{pip}} install {row.instead}"
                if row.instead.isascii() and " " not in row.instead
                else "{torch_command}"
            )
    names = [f.split()[0] for f in found]
    return hit(*found, names=" ".join(names), instead=instead) if found else None


def f42(m: Machine) -> Hit | None:
    """A nightly wheel that relies on the loader's path for its system libraries."""
    text = m.log_said(r"librocm_sysdeps_\S+: cannot open shared object file")
    return seen(f"log: {text}") if text else None


def f43(m: Machine) -> Hit | None:
    """A ROCm library that the loader does not find."""
    text = m.log_said(
        r"lib(hiprtc|hipblas|hipblaslt|amdhip64|hsa-runtime64|rocblas|MIOpen|rccl|roctx64|hipsparse|"
        r"hipfft|rocsolver|amd_comgr|rocprofiler\S*)"
        r"\S*\.so\S*: cannot open shared object file"
    )
    if not text:
        return None
    return seen(f"log: {text}", *(f"{root} holds ROCm {line(v)}" for root, v in list(m.rocm_trees.items())[:2]))


def library_entries(m: Machine) -> list[tuple[str, str]]:
    """Entries of LD_LIBRARY_PATH and LD_PRELOAD that hold ROCm, as (variable, entry)."""
    found = []
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        for entry in re.split(r"[:\s]", m.env(name) or ""):
            if re.search(r"/rocm|/\.singularity\.d/libs|_rocm_sdk|/site-packages/torch/lib", entry):
                found.append((name, entry))
    return found


def f44(m: Machine) -> Hit | None:
    """Another ROCm's libraries are loaded into torch's process."""
    text = m.log_said(
        r"/opt/rocm\S*/lib\S*\.so\S*: undefined symbol|undefined symbol.*/opt/rocm|/opt/rocm\S*\.so\S*: "
        r"version .* not found"
    )
    if not is_rocm(m) or not m.torch:
        return None
    clashes = [c for name, entry in library_entries(m) if (c := _clash(m, name, entry))]
    mapped = re.search(r"^.*\s(/opt/rocm\S*/lib\S*\.so\S*)$", process_maps(m), re.M)
    if mapped and "/torch/lib/" in process_maps(m):
        clashes.append(f"the process maps {mapped.group(1)} beside torch's own libraries")
    if text and m.torch.version and not m.torch.version.endswith("+distro"):
        return seen(f"log: {text}", *clashes, f"torch is {m.torch.version}")
    return hit(*clashes, f"torch is {m.torch.version} and brings its own ROCm") if clashes else None


def process_maps(m: Machine) -> str:
    """Memory maps of a process, where the snapshot has them."""
    return "\n".join(m.snapshot.text(path) for path in m.snapshot.glob("/proc/*/maps"))


def _clash(m: Machine, name: str, entry: str) -> str:
    """Say how a library path's ROCm differs from torch's; empty when it does not or nobody knows."""
    own = m.torch.rocm if m.torch else ()
    folder = entry.rstrip("/")
    if folder == "/.singularity.d/libs":
        names = [
            n for n in m.snapshot.listing(folder) if n.startswith(("libamdhip64", "libhsa-runtime64", "librocblas"))
        ]
        return f"{name} has {entry}, where the host's {names[0]} was put" if names else ""
    if other := _other_environment(m, folder):
        return f"{name} has {entry}, libraries of another environment ({other})"
    root = re.match(r"(/opt/rocm(?:-[\d.]+|/core-[\d.]+)?|.*/_rocm_sdk_\w+)", folder)
    if not root:
        return ""
    place = m.snapshot.link(root.group(1)) or root.group(1)
    if not place.startswith("/"):
        place = f"/opt/{place}"
    version = m.rocm_trees.get(place) or m.rocm_trees.get(root.group(1)) or _in_name(place)
    if version and own and not same_line(version, own):
        return f"{name} has {entry} (ROCm {line(version)}), torch was built for ROCm {line(own)}"
    majors = {soname_major(n) for n in m.snapshot.listing(folder) if n.startswith("libamdhip64.so")} - {None}
    wanted = 7 if own >= (7,) else (own[0] if own else None)
    if not version and majors and wanted not in majors:
        return f"{name} has {entry} with libamdhip64.so.{min(x for x in majors if x is not None)}"
    return ""


def _other_environment(m: Machine, folder: str) -> str:
    """The environment that a folder inside some site-packages belongs to, if that is not the one looked at."""
    found = re.match(r"(/.+)/lib(?:64)?/python[\d.]+/site-packages/(?:torch/lib|_rocm_sdk_)", folder)
    executable = as_text(m.python.get("executable"))
    own = {executable.rpartition("/bin/")[0], (m.env("VIRTUAL_ENV") or "").rstrip("/")} - {"", "/usr", "/usr/local"}
    return found.group(1) if found and own and found.group(1) not in own else ""


def _in_name(path: str) -> tuple[int, ...]:
    found = re.search(r"(?:rocm-|core-)(\d+(?:\.\d+)+)", path)
    return parse_version(found.group(1)) if found else ()


def wheel_folder_targets(m: Machine, library: str) -> set[str]:
    """Targets whose data files a library inside torch has; empty when they were not listed."""
    torch = m.python.get("torch")
    gfx = torch.get("gfx") if isinstance(torch, dict) else None
    names = gfx.get(library) if isinstance(gfx, dict) else None
    return {base_name(n) for n in names if isinstance(n, str)} if isinstance(names, list) else set()


def torch_probe_said(m: Machine) -> str:
    """Quote an answer that torch itself gave about its devices."""
    return said(m, r"device_count\(?\)?\W+0|Invalid device id")
