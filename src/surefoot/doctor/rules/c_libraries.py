"""C, continued. Libraries inside and beside torch (F45 to F55)."""

from __future__ import annotations

import re

from surefoot.doctor.clues import amd_context, is_rocm, line, said, uncovered
from surefoot.doctor.finding import Hit, hit, seen
from surefoot.doctor.rules.c_python import process_maps, torch_probe_said, wheel_folder_targets, wrong_build
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import as_dict, as_float, as_text
from surefoot.machine.table import load_table
from surefoot.machine.versions import local_tag, parse_version, rocm_of_tag, same_line, short
from surefoot.machine.workarounds import hipblaslt_off, lora_faults


def f45(m: Machine) -> Hit | None:
    """GEMM libraries that do not find their kernel files."""
    text = said(
        m,
        (
            r"Cannot read \S*TensileLibrary|TensileLibrary\S*gfx\w+\.(dat|co|hsaco)|hipModuleLoad.*file not "
            r"found|Could not initialize Tensile|HIP error: file not found|CUDA error: file not found|"
            r"rocblas/library.*No such file|HIPBLAS_STATUS_(INVALID_VALUE|INTERNAL_ERROR)"
        ),
    )
    if not is_rocm(m):
        return None
    moved = []
    for name in ("ROCBLAS_TENSILE_LIBPATH", "HIPBLASLT_TENSILE_LIBPATH"):
        value = m.env(name)
        if value and "site-packages" not in value:
            moved.append(
                f"{name}={value}"
                + (", which is not there" if m.snapshot.absent(value) else ", outside of torch's own tree")
            )
    have = wheel_folder_targets(m, "rocblas")
    lacking = [t for t in m.targets if have and t not in have and m.covers(t)]
    if text:
        return seen(text, *moved, *(f"torch/lib/rocblas/library has no files for {t}" for t in lacking))
    return (
        hit(*moved, *(f"torch/lib/rocblas/library has no files for {t}" for t in lacking)) if moved or lacking else None
    )


def _unlisted(m: Machine) -> list[str]:
    rocm = m.torch.rocm if m.torch else ()
    listed = load_table().hipblaslt_targets(rocm)
    return [t for t in m.targets if listed and t not in listed]


def f46(m: Machine) -> Hit | None:
    """A GPU that hipBLASLt does not know, and hipBLASLt is asked."""
    if not is_rocm(m) or not m.torch:
        return None
    text = m.log_said(r"hipBLASLt on an? unsupported architecture|HIPBLAS_STATUS_NOT_SUPPORTED")
    other = _unlisted(m)
    off = m.env("TORCH_BLAS_PREFER_HIPBLASLT") == "0"
    words = f"not in hipBLASLt's list for ROCm {line(m.torch.rocm)}: {', '.join(other)}" if other else ""
    if text and not off:
        return seen(f"log: {text}", words)
    if off or not other:
        return None
    if m.env("TORCH_BLAS_PREFER_HIPBLASLT") == "1":
        return hit("TORCH_BLAS_PREFER_HIPBLASLT=1", words)
    if (2, 4) <= m.torch.number[:2] <= (2, 5):
        return hit(words, f"torch {m.torch.version} prefers hipBLASLt on every GPU")
    return None


def f47(m: Machine) -> Hit | None:
    """The hipBLASLt kernel that reads past LoRA's narrow operand on gfx120x."""
    if not lora_faults(m) or not m.torch or hipblaslt_off(m) or m.env("PYTORCH_NO_HIP_MEMORY_CACHING") == "1":
        return None
    text = said(m, r"\[gfxhub\d*\].*page fault|page fault.*gfxhub|PERMISSION_FAULTS: 0x3|Memory access fault by GPU")
    cards = [t for t in m.targets if t in ("gfx1200", "gfx1201")]
    evidence = (
        f"the GPU is {cards[0]}",
        f"torch was built for ROCm {line(m.torch.rocm)}; the fault exists from 7.2 on and is mended in 10.1",
    )
    return seen(text, *evidence) if text else hit(*evidence)


def f48(m: Machine) -> Hit | None:
    """A stand-alone amdsmi that clashes with torch's own."""
    dist = m.dists.get("amdsmi")
    if not dist or not is_rocm(m) or not m.torch:
        return None
    text = torch_probe_said(m) or said(
        m, r"amdsmi.*(Error|Exception|AMDSMI_STATUS)|libamd_smi\.so.*(undefined symbol|cannot open)"
    )
    libs = as_dict(m.python.get("torch")).get("libs")
    bundled = isinstance(libs, list) and any(isinstance(n, str) and n.startswith("libamd_smi") for n in libs)
    evidence = (
        f"amdsmi {dist.version} is installed beside torch {m.torch.version}",
        "torch/lib has its own libamd_smi" if bundled else "",
    )
    if text:
        return seen(*evidence, text)
    different = not same_line(parse_version(dist.version), m.torch.rocm) and parse_version(dist.version)[:1] < (20,)
    return hit(*evidence) if bundled and different else None


def f49(m: Machine) -> Hit | None:
    """A torch built for NumPy 1 with NumPy 2."""
    numpy = m.dists.get("numpy")
    text = m.log_said(r"_ARRAY_API not found|compiled using NumPy 1\.x|A module that was compiled using NumPy 1")
    two = numpy is not None and parse_version(numpy.version) >= (2,)
    versions = f"numpy is {numpy.version}, torch is {m.torch.version}" if numpy and m.torch else ""
    if text and (two or numpy is None):
        return seen(f"log: {text}", versions)
    if not m.torch or not two:
        return None
    radeon = ".git" in local_tag(m.torch.version) and rocm_of_tag(local_tag(m.torch.version))[:1] == (6,)
    return hit(versions) if m.torch.number[:2] <= (2, 2) or radeon else None


def f50(m: Machine) -> Hit | None:
    """An older conda C++ library is found first."""
    text = m.log_said(r"GLIBCXX_3\.4\.\d+['`\u2019]? not found|CXXABI_1\.3\.\d+['`\u2019]? not found")
    newest = as_text(m.python.get("conda_libstdcxx"))
    old = m.python.get("kind") == "conda" and () < parse_version(newest) < (3, 4, 30)
    words = f"conda's libstdc++ ends at GLIBCXX_{newest}" if newest else ""
    if text:
        return seen(f"log: {text}", words)
    if old and is_rocm(m) and m.torch and m.torch.rocm >= (6, 4):
        return hit(words, f"torch {m.torch.version} wants GLIBCXX_3.4.30")
    return None


def owners(m: Machine, module: str) -> list[str]:
    """Distributions that own files of an import name, as `name version`."""
    return sorted(f"{d.name} {d.version}" for d in m.dists.values() if module in d.top)


def f51(m: Machine) -> Hit | None:
    """Two triton packages share one folder, or torch got another triton than its own."""
    mine = owners(m, "triton")
    text = m.log_said(
        r"has no attribute '?launch_enter_hook|ptxas fatal.*sm_|0 active drivers|triton\S* .*cannot "
        r"import name|cannot import name '\w+' from 'triton|No module named 'triton\."
    )
    if len(mine) > 1:
        evidence = f"triton/ belongs to {' and '.join(mine)}"
        return seen(evidence, f"log: {text}") if text else hit(evidence)
    torch = m.dists.get("torch")
    wanted = (
        next(
            (w for r in torch.requires if (w := re.match(r"((?:pytorch-)?triton-rocm|triton)\s*\(?==\s*([\w.+]+)", r))),
            None,
        )
        if torch
        else None
    )
    if not is_rocm(m) or not wanted or not mine:
        return seen(f"log: {text}", *mine) if text and amd_context(m) and is_rocm(m) else None
    name, version = wanted.group(1), wanted.group(2)
    if not mine[0].startswith(f"{name} ") or parse_version(mine[0].split()[1])[:3] != parse_version(version)[:3]:
        evidence = f"torch asks for {name} {version}, but triton/ belongs to {mine[0]}"
        return seen(evidence, f"log: {text}") if text else hit(evidence)
    return seen(f"log: {text}", *mine) if text else None


def f52(m: Machine) -> Hit | None:
    """Two HIP runtimes in one process, or a triton built for another ROCm."""
    if not is_rocm(m) or not m.torch:
        return None
    loaded = sorted(set(re.findall(r"\S*/libamdhip64\.so\.(\d+)", m.log + process_maps(m))))
    if len(loaded) > 1:
        return seen(f"the process maps libamdhip64.so.{' and libamdhip64.so.'.join(loaded)}")
    for name in ("triton", "triton-rocm", "pytorch-triton-rocm"):
        dist = m.dists.get(name)
        rocm = rocm_of_tag(local_tag(dist.version)) if dist else ()
        if dist and rocm and m.torch.rocm and not same_line(rocm, m.torch.rocm):
            return hit(f"{name} is {dist.version}, torch was built for ROCm {line(m.torch.rocm)}")
    return None


def f53(m: Machine) -> Hit | None:
    """Too little room to unpack the wheel."""
    text = m.log_said(r"No space left on device(?!.*/dev/shm)|Errno 28(?!.*/dev/shm)|not enough free (disk )?space")
    needed = {"venv": 15.0, "tmp": 6.0, "pip_cache": 6.0}
    tight = []
    for name, row in m.snapshot.section("disk").items():
        fields = as_dict(row)
        free = as_float(fields.get("free_gib"), -1.0)
        if name in needed and 0 <= free < needed[name]:
            kind = f" ({as_text(fields.get('fs'))})" if fields.get("fs") else ""
            tight.append(f"{as_text(fields.get('path')) or name}{kind} has {free:.1f} GiB free")
    if text:
        return seen(f"log: {text}", *tight)
    to_install = wrong_build(m) or (m.has_amd and m.torch is None and m.dists_known)
    return hit(*tight) if tight and to_install else None


def _selected(m: Machine) -> set[str]:
    """Targets, or families of them, that the installed `rocm` package was made for."""
    dist = m.dists.get("rocm")
    text = " ".join(dist.requires) if dist else ""
    return set(re.findall(r"(?:device|libraries)-(gfx[0-9a-fA-F]+X?)", text))


def f54(m: Machine) -> Hit | None:
    """A `rocm` package from pip's cache that was made for another GPU."""
    chosen = _selected(m)
    families = {t: row.family for t in m.compute_targets if (row := load_table().gpu(t))}
    other = [t for t in m.compute_targets if chosen and t not in chosen and families.get(t) not in chosen]
    return (
        hit(f"the installed `rocm` package selects {', '.join(sorted(chosen))}", f"the GPU is {other[0]}")
        if other
        else None
    )


def f55(m: Machine) -> Hit | None:
    """Different releases of torch and of the pip ROCm."""
    text = m.log_said(r"ROCm SDK version mismatch")
    torch, core = m.dists.get("torch"), m.dists.get("rocm-sdk-core")
    if not is_rocm(m) or not torch or not core or not m.torch:
        return seen(f"log: {text}") if text else None
    asked = next(
        (
            parse_version(w.group(1))
            for r in torch.requires
            if (w := re.match(r"rocm(?:-sdk-core)?(?:\[[^\]]*\])?\s*\(?==\s*([\d.]+)", r))
        ),
        (),
    )
    wants = asked or rocm_of_tag(local_tag(torch.version))
    parts = [core, *(m.dists[n] for n in _sdk_parts(m) if n in m.dists)]
    odd = [d for d in parts if parse_version(d.version)[: len(wants)][:3] != wants[:3]]
    other = (odd or [core])[0]
    words = f"torch {torch.version} wants ROCm {short(wants, 3)}, {other.name} is {other.version}"
    if text:
        return seen(f"log: {text}", words)
    return hit(words) if wants[:2] >= (7, 9) and odd else None


def _sdk_parts(m: Machine) -> list[str]:
    """Packages that must be of one release with rocm-sdk-core; an empty one from PyPI is another matter."""
    names = ["rocm-sdk-libraries", *(f"rocm-sdk-device-{t}" for t in m.targets)]
    return [n for n in names if n in m.dists and not m.dists[n].version.startswith("0.0.1")]


def lacking_device_package(m: Machine) -> list[str]:
    """Visible targets without the kernel package that a split torch needs."""
    return uncovered(m) if m.torch and m.torch.split else []
