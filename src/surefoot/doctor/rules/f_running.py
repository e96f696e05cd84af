"""F. Run time and training (F80 to F99)."""

from __future__ import annotations

import re

from surefoot.doctor.clues import amd_context, is_rocm, kfd_open, line, quote, said
from surefoot.doctor.finding import Hit, hit, seen
from surefoot.machine.facts import Machine
from surefoot.machine.gfx import is_rdna2
from surefoot.machine.hardware import PCI
from surefoot.machine.snapshot import as_dict, as_int, as_text, as_texts
from surefoot.machine.table import Gpu
from surefoot.machine.versions import parse_version
from surefoot.machine.workarounds import expandable, ll_avoided, wrong_ll_sums


def bnb_files(m: Machine) -> list[str] | None:
    """Native libraries inside bitsandbytes, or None when they were not listed."""
    addon = as_dict(as_dict(m.python.get("addons")).get("bitsandbytes"))
    files = addon.get("files")
    return [f for f in as_texts(files) if "libbitsandbytes" in f] if isinstance(files, list) else None


def f80(m: Machine) -> Hit | None:
    """A bitsandbytes that looks for a ROCm library that it does not have."""
    dist = m.dists.get("bitsandbytes")
    text = m.log_said(
        r"No compatible ROCm binary|libbitsandbytes_rocm\d+\.so\S*.*(not found|cannot open|No such file)|"
        r"(not found|Could not find|Missing|configured).*(libbitsandbytes_rocm|rocm8[0-9]|ROCm binary)"
    )
    if not is_rocm(m) or not m.torch:
        return None
    hip, files = parse_version(m.torch.hip), bnb_files(m)
    rocm_files = [f for f in files or [] if "_rocm" in f]
    version = f"bitsandbytes {dist.version}" if dist else ""
    known = f"it has {', '.join(sorted(rocm_files))}" if rocm_files else ""
    if text:
        return seen(f"log: {text}", version, f"HIP is {m.torch.hip}", known)
    if not dist or len(hip) < 2 or m.env("BNB_ROCM_VERSION"):
        return None
    number = parse_version(dist.version)
    if (0, 48) <= number < (0, 50) and hip[1] >= 10:
        return hit(version, f"HIP is {m.torch.hip}; this bitsandbytes makes {hip[0] * 10 + hip[1]} of it")
    if number >= (0, 48) and rocm_files and not _has_library(rocm_files, hip, number):
        return hit(version, f"HIP is {m.torch.hip}", known)
    return None


def _has_library(files: list[str], hip: tuple[int, ...], number: tuple[int, ...]) -> bool:
    """Whether a library for this HIP is there; from 0.50 on any of the same major is taken with a warning."""
    names = {n.group(1) for f in files if (n := re.search(r"_rocm(\d+)", f))}
    if f"{hip[0]}{hip[1]}" in names:
        return True
    return number >= (0, 50) and any(n.startswith(str(hip[0])) for n in names)


def f81(m: Machine) -> Hit | None:
    """A bitsandbytes without any ROCm library."""
    dist, files = m.dists.get("bitsandbytes"), bnb_files(m)
    if not dist or not is_rocm(m):
        return None
    text = m.log_said(r"libbitsandbytes_(cpu|cuda\w*)\.so|compiled without GPU support|bitsandbytes\S* .*without GPU")
    none = files is not None and not any("_rocm" in f or "_hip" in f for f in files)
    old = parse_version(dist.version) < (0, 48)
    # A source build carries its library under its own name: an old version alone proves nothing once files are known.
    if not (none or (files is None and old) or (text and (none or old))):
        return None
    evidence = (f"bitsandbytes is {dist.version}", f"its libraries: {', '.join(files)}" if files else "")
    return seen(*evidence, f"log: {text}") if text else hit(*evidence)


def f82(m: Machine) -> Hit | None:
    """A DeepSpeed operator does not compile on ROCm."""
    text = m.log_said(
        r"ATen/cuda/CUDAContext\.h|(Error building extension|Building extension module|Unable to JIT load "
        r"the) '?(the )?(cpu_adam|fused_adam|fused_lamb|cpu_adagrad|transformer|async_io)|"
        r"strip_empty_entries|DeepSpeedCPUAdam.* has no attribute|CPUAdamBuilder|ninja is required to "
        r"load C\+\+ extensions"
    )
    if not text or not amd_context(m):
        return None
    ds, ninja = m.dists.get("deepspeed"), "ninja" in m.dists or m.snapshot.present("/usr/bin/ninja")
    igpu = len(m.reachable) > 1 and m.reachable[0].integrated
    return seen(
        f"log: {text}",
        f"deepspeed is {ds.version}" if ds else "",
        "" if ninja else "no ninja was found",
        "the integrated graphics come first" if igpu else "",
    )


def f83(m: Machine) -> Hit | None:
    """The IOMMU or the bridges' access control stand between GPUs, and the first collective hangs."""
    if len(m.visible) < 2 or not m.cmdline:
        return None
    open_way = re.search(r"\biommu=(pt|off)\b|iommu\.passthrough=1|(amd|intel)_iommu=off", m.cmdline)
    groups = m.snapshot.glob("/sys/kernel/iommu_groups/*/type")
    translated = next((p for p in groups if m.snapshot.text(p).startswith("DMA")), "")
    bridges = m.snapshot.command("lspci")
    acs = re.search(r"ACSCtl:.*SrcValid\+.*", bridges.out) if bridges and not m.virtual_machine else None
    if open_way and not acs:
        return None
    text = m.log_said(r"Missing \"?iommu=pt|hang|hung|NCCL.*timeout|collective operation timeout|stuck")
    avoided = m.env("NCCL_P2P_DISABLE") == "1"
    if not text and (avoided or not (acs or translated)):
        return None
    evidence = (
        "" if open_way else "/proc/cmdline has no iommu=pt",
        f"{len(m.visible)} GPUs are visible",
        quote(m, translated) if translated else "",
        f"lspci: {acs.group(0).strip()}" if acs else "",
    )
    return seen(f"log: {text}", *evidence) if text else hit(*evidence)


def f84(m: Machine) -> Hit | None:
    """A collective timed out."""
    text = m.log_said(r"Watchdog caught collective operation timeout")
    name = m.env("NCCL_SOCKET_IFNAME")
    return seen(f"log: {text}", f"NCCL_SOCKET_IFNAME={name}" if name else "") if text else None


def f85(m: Machine) -> Hit | None:
    """RCCL's LL protocol adds up wrongly on MI350 with ROCm 10.1."""
    if not wrong_ll_sums(m) or ll_avoided(m):
        return None
    return hit(
        f"{len(m.visible)} gfx950 GPUs are visible", f"ROCm is {line(m.rocm)}", "NCCL_PROTO does not leave LL out"
    )


def f86(m: Machine) -> Hit | None:
    """A kernel touched memory that is not its own."""
    text = said(m, r"Memory access fault by GPU node|\[gfxhub\d*\].{0,20}page fault|\[gfxhub\d*\] no-retry page fault")
    return seen(text) if text and (amd_context(m) or "amdgpu" in text) else None


def f87(m: Machine) -> Hit | None:
    """The GPU hung or was reset."""
    text = m.kernel_said(
        r"amdgpu.*ring \S+ timeout|ring \S+ timeout, signaled|GPU reset (begin|failed)|MES might be in "
        r"unrecoverable state|qcm fence wait loop timeout"
    )
    if text:
        return seen(f"dmesg: {text}")
    refused = said(m, r"HSA_STATUS_ERROR_OUT_OF_RESOURCES|\b0x1008\b|hsa_init.*4104")
    if not refused or m.wsl or m.container == "gvisor" or kfd_open(m) != "ok" or (m.override and not m.override_target):
        return None
    renders = [m.snapshot.node(p) for p in m.snapshot.glob("/dev/dri/renderD*")]
    if not m.kfd or any(n and n.open not in ("ok", "") for n in renders):
        return None
    return seen(refused, "/dev/kfd and the render nodes open, KFD lists the GPU: the GPU itself no longer answers")


def f88(m: Machine) -> Hit | None:
    """The option expandable_segments on ROCm."""
    name = expandable(m)
    if not name or not m.torch:
        return None
    value = m.env(name) or ""
    both = "together with max_split_size_mb, tensors were read as zeros" if "max_split_size_mb" in value else ""
    text = said(
        m,
        (
            r"hsaKmtMemoryVaMap|illegal (memory )?address|(reads?|became|filled with|all) zeros?|HIP error: "
            r"an illegal memory access"
        ),
    )
    evidence = (f"{name}={value}", f"torch is {m.torch.version}", both)
    return seen(*evidence, text, name=name) if text else hit(*evidence, name=name)


def f89(m: Machine) -> Hit | None:
    """Shared memory that ROCm may not use because the kernel's limit is small."""
    apus = [g for g in m.visible if g.integrated]
    if not apus or len(apus) != len(m.visible):
        return None
    text = m.log_said(r"(HIP|CUDA) out of memory|OutOfMemoryError|hipErrorOutOfMemory")
    vram = max(
        (as_int(m.snapshot.text(p)) for p in m.snapshot.glob("/sys/class/drm/card*/device/mem_info_vram_total")),
        default=0,
    )
    gtt = max(
        (as_int(m.snapshot.text(p)) for p in m.snapshot.glob("/sys/class/drm/card*/device/mem_info_gtt_total")),
        default=0,
    )
    limits = {n: as_int(m.snapshot.text(f"/sys/module/{n}/parameters/pages_limit")) for n in ("ttm", "amdttm")}
    both = bool(limits["ttm"] and limits["amdttm"] and limits["ttm"] != limits["amdttm"])
    carved = vram >= 16 << 30 and 0 < gtt < vram
    words = (
        f"mem_info_vram_total is {vram / 2**30:.0f} GiB, mem_info_gtt_total is {gtt / 2**30:.0f} GiB"
        if vram and gtt
        else "",
        f"ttm.pages_limit is {limits['ttm']}, amdttm.pages_limit is {limits['amdttm']}: two modules, two limits"
        if both
        else "",
    )
    half = 0 < gtt <= m.ram * 0.6 if m.ram else False
    if text and (carved or both or half):
        return seen(f"log: {text}", *words)
    return hit(*words) if carved or both else None


def f90(m: Machine) -> Hit | None:
    """NaN from the first step with Gemma-3 on RDNA."""
    text = m.log_said(r"(loss|grad_norm)\W{1,6}nan\b|nan (loss|gradient)|loss is nan")
    gemma = m.log_said(r"gemma.?3")
    if not text or not gemma or not any(t.startswith("gfx11") for t in m.targets):
        return None
    return seen(f"log: {text}", f"log: {gemma}", f"the GPU is {m.targets[0]}")


def f91(m: Machine) -> Hit | None:
    """Triton rounds bf16 products towards zero."""
    text = said(
        m,
        (
            r"fdot2.{0,60}(trunc|round|RNE)|bf16.{0,80}(truncat|mismatch|not close|inaccura)|Tensor-likes are "
            r"not close.*bfloat16"
        ),
    )
    if not text or not any(t.startswith(("gfx11", "gfx12")) and t != "gfx1250" for t in m.targets):
        return None
    return seen(text, f"the GPU is {m.targets[0]}")


def f92(m: Machine) -> Hit | None:
    """RDNA2 crashes in the second step with ROCm 7.2."""
    cards = [t for t in m.compute_targets if is_rdna2(t)]
    if not cards or not is_rocm(m) or not m.torch or m.torch.rocm[:2] != (7, 2):
        return None
    text = m.log_said(r"Segmentation fault|SIGSEGV|exitcode\s*:\s*-11")
    evidence = (f"the GPU is {cards[0]}", f"torch is {m.torch.version}")
    return seen(*evidence, f"log: {text}") if text else hit(*evidence)


def f93(m: Machine) -> Hit | None:
    """MIOpen cannot use its cache."""
    text = m.log_said(
        r"(MIOpen|sqlite|miopen).*(disk I/O error|locking protocol|database disk image is malformed|"
        r"unable to open database file)|(disk I/O error|locking protocol|database disk image is malformed|"
        r"unable to open database file)"
    )
    if m.env("MIOPEN_USER_DB_PATH") and m.env("MIOPEN_CUSTOM_CACHE_DIR") and not text:
        return None
    row = as_dict(m.snapshot.section("disk").get("miopen"))
    home = as_dict(m.snapshot.section("disk").get("home"))
    fs = as_text(row.get("fs")) or as_text(home.get("fs"))
    network = fs.startswith(("nfs", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.sshfs"))
    words = (
        f"{as_text(row.get('path'))} is on {fs}" if network else "",
        f"{as_text(row.get('path'))} cannot be written" if row.get("writable") is False else "",
    )
    if text:
        return seen(f"log: {text}", *words)
    if not is_rocm(m) or not m.has_amd:
        return None
    ranks = max(as_int(m.env("LOCAL_WORLD_SIZE")), as_int(m.env("SLURM_NTASKS")), as_int(m.env("WORLD_SIZE")))
    if network and ranks > len(m.visible):  # several nodes' ranks share one database over the network
        return Hit(tuple(w for w in (*words, f"{ranks} ranks share it") if w), level="note")
    return hit(*words) if row.get("writable") is False else None


def f94(m: Machine) -> Hit | None:
    """The limit on open files is too low."""
    text = said(m, r"Too many open files|EMFILE")
    limit, cards = m.limit("nofile"), len(m.visible)
    low = limit is not None and limit < 65536
    words = f"/proc/self/limits: Max open files is {limit:.0f}" if limit is not None and low else ""
    if (
        limit is not None
        and limit <= 1024
        and cards >= 4
        and (
            files := said(m, r"hipModuleLoad.*file not found|Cannot read \S*TensileLibrary|CUDA error: file not found")
        )
    ):
        return seen(files, words, f"{cards} GPUs are visible")
    if text and (low or limit is None):
        return seen(text, words)
    # Eight ranks map thousands of kernel files each; with fewer GPUs a low limit alone has hurt nobody.
    return (
        hit(words, f"{cards} GPUs are visible") if low and limit is not None and limit <= 4096 and cards >= 8 else None
    )


def f95(m: Machine) -> Hit | None:
    """Too little lockable memory for RDMA."""
    text = said(
        m, r"ibv_reg_mr\w* .*(failed|Cannot allocate)|Call to ibv_reg_mr|ibv_create_\w+ .*Cannot allocate memory"
    )
    limit = m.limit("memlock")
    low = limit is not None and limit < 1 << 30
    words = f"/proc/self/limits: Max locked memory is {limit / 1024:.0f} KiB" if low and limit is not None else ""
    if text:
        return seen(text, words)
    cards = m.snapshot.listing("/sys/class/infiniband")
    return (
        hit(words, f"/sys/class/infiniband has {', '.join(cards[:3])}")
        if low and cards and len(m.visible) > 1
        else None
    )


def f96(m: Machine) -> Hit | None:
    """A rocm-smi that is no longer part of ROCm."""
    text = m.log_said(r"rocm-smi: (command )?not found|No such file.*rocm-smi|rocm-smi.*not (found|recognized)")
    return seen(f"log: {text}", f"ROCm is {line(m.rocm)}" if m.rocm else "") if text else None


def f97(m: Machine) -> Hit | None:
    """MI350 attention is slow in ROCm 10.0."""
    if "gfx950" not in m.targets or m.rocm[:2] != (10, 0):
        return None
    return hit("the GPU is gfx950", f"ROCm is {line(m.rocm)}")


def f98(m: Machine) -> Hit | None:
    """The card is on a narrow link."""
    found = []
    for gpu in m.kfd:
        folder = f"{PCI}/{gpu.bdf}"
        now, most = (
            as_int(m.snapshot.text(f"{folder}/current_link_width")),
            as_int(m.snapshot.text(f"{folder}/max_link_width")),
        )
        speed = m.snapshot.text(f"{folder}/current_link_speed")
        if gpu.integrated or gpu not in m.visible:
            continue
        if 0 < now <= 4 and (most == 0 or now < most):
            found.append(f"{gpu.name}: PCIe x{now} of x{most}" if most else f"{gpu.name}: PCIe x{now}")
        elif speed.startswith("2.5") and gpu.row and gpu.row.wavefront == 64:
            found.append(f"{gpu.name}: {speed}")  # Radeon cards slow their link down when idle, Instinct cards do not
        bar = re.match(r"0x([0-9a-f]+) 0x([0-9a-f]+)", m.snapshot.text(f"{folder}/resource"))
        size = int(bar.group(2), 16) - int(bar.group(1), 16) + 1 if bar else 0
        told = (
            re.search(rf"{re.escape(gpu.bdf)}.*Detected VRAM RAM=\d+M, BAR=(\d{{1,7}})M", m.dmesg) if gpu.bdf else None
        )
        size = size or (int(told.group(1)) << 20 if told else 0)
        if 0 < size <= 256 << 20 < gpu.vram:
            found.append(f"{gpu.name}: BAR 0 is {size >> 20} MiB of {gpu.vram >> 30} GiB (no resizable BAR)")
    return hit(*found) if found else None


def f99(m: Machine) -> Hit | None:
    """MI300 is cut into partitions."""
    found = [
        p
        for p in m.snapshot.glob("/sys/class/drm/card*/device/current_compute_partition")
        if m.snapshot.text(p) not in ("", "SPX")
    ]
    if found:
        return hit(quote(m, found[0]), f"KFD lists {len(m.kfd)} GPUs" if m.kfd else "")
    looked = any(m.snapshot.text(p) for p in m.snapshot.glob("/sys/class/drm/card*/device/current_compute_partition"))
    slices = [
        g for g in m.kfd if g.gfx in ("gfx942", "gfx950") and g.row and 0 < g.compute_units * 2 < _least_cu(g.row)
    ]
    if looked or not slices:
        return None
    return hit(f"KFD lists {len(m.kfd)} GPUs", f"{slices[0].gfx} with {slices[0].compute_units} CUs, a part of a card")


def _least_cu(row: Gpu) -> int:
    return min(row.compute_units, default=0)
