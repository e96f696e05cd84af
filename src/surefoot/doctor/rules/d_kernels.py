"""D. Architecture and kernels (F56 to F66)."""

from __future__ import annotations

import re

from surefoot.doctor.clues import effective, is_rocm, line, said, uncovered
from surefoot.doctor.finding import Hit, hit, seen
from surefoot.doctor.rules.c_libraries import lacking_device_package
from surefoot.machine.facts import Machine
from surefoot.machine.gfx import is_rdna2
from surefoot.machine.hardware import rocminfo_gpus
from surefoot.machine.table import load_table
from surefoot.machine.versions import local_tag

NO_KERNEL = r"invalid device function|no kernel image is available|hipErrorNoBinaryForGpu|Unable to find code object"
BAD_IMAGE = r"hipErrorInvalidImage|device kernel image is invalid"


def f56(m: Machine) -> Hit | None:
    """The wheel has no kernels for the GPU."""
    if not m.torch or not is_rocm(m) or m.torch.split:
        return None
    lacking = uncovered(m)
    if not lacking:
        return None
    text = m.log_said(NO_KERNEL)
    have = ", ".join(sorted(m.torch.targets))
    row = load_table().gpu(lacking[0])
    evidence = (
        f"torch {m.torch.version} has kernels for {have} ({m.torch.targets_source})",
        f"visible without kernels: {', '.join(lacking)}",
    )
    values = {"lacking": lacking[0], "workaround": _workaround(m, lacking[0]), "family": row.family if row else "?"}
    return Hit((*evidence, f"log: {text}"), values, seen=True) if text else Hit(evidence, values)


def _workaround(m: Machine, gfx: str) -> str:
    """The override of the right family, labelled, where torch has that family member's kernels; else nothing."""
    row = load_table().gpu(gfx)
    if not row or not row.override:
        return "# no override is safe for it || 没有安全的 override 可用"
    numbers = row.override.split(".")
    if m.torch and f"gfx{numbers[0]}{numbers[1]}{numbers[2]}" not in m.torch.targets:
        return "# this wheel has no kernels of its family either || 该 wheel 也没有同系列的内核"
    risk = f"; {row.override_risk}" if row.override_risk else ""
    return (
        f"# workaround only, same ISA family{risk}: HSA_OVERRIDE_GFX_VERSION={row.override} for this one command"
        f" || 仅为权宜之计（同一 ISA 系列{'，有风险' if risk else ''}）："
        f"仅对该条命令设置 HSA_OVERRIDE_GFX_VERSION={row.override}"
    )


def f57(m: Machine) -> Hit | None:
    """The kernel package of the GPU is not installed."""
    lacking = lacking_device_package(m)
    if not lacking or not m.torch:
        return None
    text = m.log_said(f"{BAD_IMAGE}|{NO_KERNEL}")
    have = ", ".join(sorted(m.torch.targets)) or "none"
    evidence = (
        f"visible: {', '.join(lacking)}",
        f"kernel packages installed for: {have}",
        f"torch is {m.torch.version}",
    )
    return seen(*evidence, f"log: {text}", lacking=lacking[0]) if text else hit(*evidence, lacking=lacking[0])


def f58(m: Machine) -> Hit | None:
    """HSA_OVERRIDE_GFX_VERSION where it does harm."""
    target = m.override_target
    cards = m.visible or m.reachable
    if m.override and target:
        for gpu in cards:
            row = gpu.row
            if gpu.gfx == target:
                continue
            right_family = row is not None and row.override == m.override
            native = m.covers(gpu.gfx)
            if not right_family:
                return hit(
                    f"HSA_OVERRIDE_GFX_VERSION={m.override} pretends {target}",
                    f"KFD says {gpu.name}: another ISA family",
                    true=gpu.gfx,
                )
            if native:
                return hit(
                    f"HSA_OVERRIDE_GFX_VERSION={m.override} pretends {target}",
                    f"KFD says {gpu.name}, and torch has kernels for {gpu.gfx}",
                    true=gpu.gfx,
                )
        return None
    answer = m.snapshot.command("rocminfo")
    if answer and answer.rc == 0 and m.kfd and not m.override:
        pretended = [t for t in rocminfo_gpus(answer.out) if t not in {g.gfx for g in m.kfd}]
        if pretended:
            return hit(
                f"rocminfo prints {pretended[0]}", f"KFD says {m.kfd[0].gfx}: an override is at work", true=m.kfd[0].gfx
            )
    return None


def f59(m: Machine) -> Hit | None:
    """HSA_OVERRIDE_GFX_VERSION that the runtime cannot read."""
    text = said(m, r"HSA_OVERRIDE_GFX_VERSION\S* .*is invalid")
    if m.override and not m.override_target:
        return hit(f"HSA_OVERRIDE_GFX_VERSION={m.override!r}", text)
    return seen(text) if text else None


def f60(m: Machine) -> Hit | None:
    """Integrated graphics in the way of the discrete card."""
    small = [g for g in m.visible if g.integrated]
    large = [g for g in m.visible if not g.integrated]
    hidden = [g for g in m.reachable if not g.integrated and g not in m.visible]
    if small and not large and hidden and (poor := [g for g in small if m.covers(effective(m, g.gfx)) is False]):
        names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        lists = (f"{n}={v}" for n in names if (v := m.env(n)) is not None)
        return hit(
            f"visible: {', '.join(g.name for g in m.visible)}", f"{poor[0].name} is part of the processor",
            f"hidden: {', '.join(g.name for g in hidden)}", *lists,
        )  # fmt: skip
    if not small or not large:
        return None
    text = m.log_said(r"shared object initialization failed")
    first = m.visible[0].integrated
    lacking = [g for g in small if m.covers(effective(m, g.gfx)) is False]
    if not (text or first or lacking):
        return None
    where = (
        "it comes first, as device 0" if first else (f"torch has no kernels for {lacking[0].gfx}" if lacking else "")
    )
    evidence = (f"visible: {', '.join(g.name for g in m.visible)}", f"{small[0].name} is part of the processor", where)
    return (
        seen(*evidence, f"log: {text}") if text else Hit(tuple(e for e in evidence if e), level="" if first else "note")
    )


def f61(m: Machine) -> Hit | None:
    """Two device lists that together leave nothing."""
    hip = m.env("HIP_VISIBLE_DEVICES") if m.env("HIP_VISIBLE_DEVICES") is not None else m.env("CUDA_VISIBLE_DEVICES")
    rocr = m.env("ROCR_VISIBLE_DEVICES")
    if hip is None or rocr is None or not m.reachable or m.visible:
        return None
    name = "HIP_VISIBLE_DEVICES" if m.env("HIP_VISIBLE_DEVICES") is not None else "CUDA_VISIBLE_DEVICES"
    return hit(
        f"ROCR_VISIBLE_DEVICES={rocr}",
        f"{name}={hip}, which counts in the list that ROCR_VISIBLE_DEVICES left",
        f"{len(m.reachable)} GPU(s) are here, none is left",
    )


def f62(m: Machine) -> Hit | None:
    """bf16 on a GPU that has none."""
    text = m.log_said(r"Cannot select: intrinsic %llvm\.amdgcn\.fdot2\.bf16")
    if not text:
        return None
    return seen(f"log: {text}", *(f"the GPU is {t}" for t in m.targets if is_rdna2(t)))


def f63(m: Machine) -> Hit | None:
    """SDPA falls back to its slow path."""
    text = m.log_said(r"(Flash|Mem(ory)? ?Efficient)( Efficient)? attention .{0,60}experimental")
    gated = [t for t in m.targets if t in load_table().addons["aotriton"]["experimental"]]
    if not text or m.env("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL") == "1":
        return None
    return seen(f"log: {text}", *(f"the GPU is {t}" for t in gated))


def f64(m: Machine) -> Hit | None:
    """fp8 in the encoding of another GPU generation."""
    rows = [r for t in m.targets if (r := load_table().gpu(t))]
    if not rows:
        return None
    fnuz = m.log_said(r"float8_e(4m3|5m2)fnuz|e4m3fnuz|e5m2fnuz|fp8e4b8")
    ocp = m.log_said(r"float8_e4m3fn(?!uz)|float8_e5m2(?!fnuz)|fp8e4nv")
    trouble = m.log_said(r"(not supported|unsupported|only supported|garbage|nan|mismatch|RuntimeError|is invalid)")
    row = rows[0]
    if ocp and row.fp8 == "fnuz" and trouble:
        return seen(
            f"log: {ocp}", f"{row.gfx} computes in the FNUZ encodings", encoding="float8_e4m3fnuz", card=row.gfx
        )
    if fnuz and row.fp8 == "ocp" and trouble:
        return seen(f"log: {fnuz}", f"{row.gfx} computes in the OCP encodings", encoding="float8_e4m3fn", card=row.gfx)
    return None


def f65(m: Machine) -> Hit | None:
    """A processor without the instructions that a build uses."""
    text = said(
        m,
        (
            r"Illegal instruction|SIGILL|trap invalid opcode.*(python|torch|libtorch)|exit(ed)? (with )?(code|"
            r"status):? ?(-4|132)\b"
        ),
    )
    flags = re.search(r"^flags\b.*$", m.snapshot.text("/proc/cpuinfo"), re.M)
    words = set(flags.group(0).split()) if flags else set()
    lacking = [f for f in ("avx2", "avx512f") if words and f not in words]
    if not text or (words and not lacking):
        return None
    return seen(text, f"/proc/cpuinfo lists no {', '.join(lacking)}" if lacking else "")


def f66(m: Machine) -> Hit | None:
    """A Triton kernel that asks for more local memory than a work-group may take."""
    text = m.log_said(r"out of resource: shared memory")
    rows = [r for t in m.targets if (r := load_table().gpu(t))]
    return seen(f"log: {text}", *(f"{r.gfx} gives a work-group {r.lds_kib} KiB" for r in rows[:1])) if text else None


def f115(m: Machine) -> Hit | None:
    """A target whose GEMM kernels were dropped although the wheel still lists it."""
    rocm = m.torch.rocm if m.torch and is_rocm(m) else ()
    old = [t for t in m.targets if t in ("gfx900", "gfx906")]
    if not old or rocm[:2] < (6, 4) or m.torch is None or m.torch.split or not local_tag(m.torch.version):
        return None
    text = m.log_said(f"{NO_KERNEL}|Tensile|rocBLAS error")
    evidence = (
        f"the GPU is {old[0]}",
        (
            f"torch was built for ROCm {line(rocm)}, whose rocBLAS has no kernels for it any more; 6.3 is the "
            f"last that has"
        ),
    )
    return seen(*evidence, f"log: {text}") if text else hit(*evidence)
