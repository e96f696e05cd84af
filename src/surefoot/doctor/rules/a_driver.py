"""A. Machine, kernel, driver (F01 to F19)."""

from __future__ import annotations

import re

from surefoot.doctor.clues import (
    dkms_for_running,
    gpu_words,
    is_rocm,
    line,
    newest_rocm,
    pci_words,
    quote,
    said,
    secure_boot,
)
from surefoot.doctor.finding import Hit, hit, seen
from surefoot.machine.facts import Machine
from surefoot.machine.hardware import KFD
from surefoot.machine.snapshot import key_values
from surefoot.machine.table import load_table
from surefoot.machine.versions import parse_version


def f01(m: Machine) -> Hit | None:
    """No AMD GPU on the bus although ROCm software is installed."""
    wanted = is_rocm(m) or m.rocm_trees or m.rocm_pip
    if m.wsl or not wanted or not m.pci_looked or m.amd_pci or m.kfd or m.nvidia_pci:
        return None
    what = f"torch {m.torch.version}" if is_rocm(m) and m.torch else f"ROCm {line(m.rocm)}"
    return hit(
        "/sys/bus/pci/devices lists no display controller or accelerator of vendor 0x1002", f"{what} is installed"
    )


def f02(m: Machine) -> Hit | None:
    """The card is reserved for a virtual machine."""
    taken = [g for g in m.amd_pci if g.driver in ("vfio-pci", "pci-stub", "xen-pciback", "pciback")]
    usable = [g for g in m.amd_pci if g.driver == "amdgpu" and not (g.row and g.row.integrated)]
    if not taken or usable:
        return None
    return hit(*(f"/sys/bus/pci/devices/{g.bdf}/driver -> {g.driver}" for g in taken), bdf=taken[0].bdf)


def f03(m: Machine) -> Hit | None:
    """The amdgpu module is not loaded."""
    told = said(m, r"ROCk module is NOT (loaded|live)")
    if m.wsl or not m.amd_pci or m.module_loaded is True or (m.module_loaded is None and not told):
        return None
    if all(g.driver in ("vfio-pci", "pci-stub") for g in m.amd_pci):
        return None
    return hit("/sys/module/amdgpu is not there" if m.module_loaded is False else "", pci_words(m), told)


def f04(m: Machine) -> Hit | None:
    """Blacklisted amdgpu or mode setting is switched off."""
    if not m.amd_pci or (m.module_loaded and (m.kfd or not m.snapshot.absent("/dev/kfd"))):
        return None
    found = []
    for path in m.snapshot.glob("/etc/modprobe.d/*"):
        text = re.search(
            r"^\s*(blacklist\s+amdgpu\b|install\s+amdgpu\s+\S*/(true|false)).*$", m.snapshot.text(path), re.M
        )
        if text:
            found.append(f"{path}: {text.group(0).strip()}")
    pattern = (
        r"(?:^|\s)((?:modprobe\.blacklist|module_blacklist|rd\.driver\.blacklist)=\S*\bamdgpu\b\S*|nomodeset|"
        r"amdgpu\.modeset=0)(?=\s|$)"
    )
    if option := re.search(pattern, m.cmdline):
        found.append(f"/proc/cmdline has {option.group(1)}")
    return hit(*found) if found else None


def f05(m: Machine) -> Hit | None:
    """Secure Boot refuses the unsigned DKMS module."""
    enrolled = m.snapshot.command("mokutil-test-key")
    if enrolled and "already enrolled" in enrolled.out:
        return None
    pattern = (
        r"Key was rejected by service|unsigned module loading is restricted|"
        r"Loading of module with unavailable key|amdgpu: .*module verification failed.*rejected"
    )
    text = said(m, pattern)
    if text and m.module_loaded is not True:
        return seen(text, "Secure Boot is on" if secure_boot(m) else "")
    built = dkms_for_running(m)
    if secure_boot(m) and m.module_loaded is False and built and m.amd_pci and not f04(m):
        return hit("Secure Boot is on", f"DKMS driver {built} is installed for {m.kernel} but not loaded")
    return None


def f06(m: Machine) -> Hit | None:
    """The DKMS driver does not build on the running kernel."""
    if dkms_for_running(m):
        return None
    text = said(
        m,
        (
            r"Bad return status for module build|Building module.{0,40}\(bad exit status|"
            r"drm_fbdev_ttm_setup.*implicit declaration"
        ),
    )
    if text:
        known = f"the running kernel is {m.kernel}" if m.kernel else ""
        return seen(text, known, *_build_log(m))
    if m.module_loaded is not False:
        return None
    if log := _build_log(m):
        return seen(*log, f"dkms status lists no driver installed for {m.kernel}")
    for row in load_table().dkms_breaks:
        old = [v for v, _, _ in m.dkms if parse_version(v)[:2] == row.module[:2] and parse_version(v) <= row.module]
        if old and parse_version(m.kernel) >= row.kernel:
            return hit(
                f"dkms has amdgpu/{old[0]}, which is known not to build from kernel {line(row.kernel)} on "
                f"({row.source})"
            )
    return None


def _build_log(m: Machine) -> list[str]:
    for path in m.snapshot.glob("/var/lib/dkms/amdgpu/*/build/make.log"):
        error = re.search(r"^.*\b(error:|Error \d).*$", m.snapshot.text(path), re.M)
        if error:
            return [f"{path}: {error.group(0).strip()[:200]}"]
    return []


def f07(m: Machine) -> Hit | None:
    """The DKMS driver was built for another kernel only."""
    if not m.dkms or dkms_for_running(m) or m.module_loaded is not False or not m.kernel or m.container:
        return None
    kernels = [k for _, k, state in m.dkms if k and state.startswith("installed")]
    headers = f"/lib/modules/{m.kernel}/build"
    missing = m.snapshot.absent(headers) or (m.snapshot.link(headers) and m.snapshot.absent(m.snapshot.link(headers)))
    if not kernels and not missing:
        return None
    built = f"dkms status: built for {', '.join(kernels)}" if kernels else f"dkms status: {m.dkms[0][0]} {m.dkms[0][2]}"
    return hit(
        built,
        f"the running kernel is {m.kernel}",
        f"{headers} is not there: the kernel's headers are missing" if missing else "",
    )


def f08(m: Machine) -> Hit | None:
    """The kernel package without amdgpu.ko."""
    folder = f"/lib/modules/{m.kernel}/kernel/drivers/gpu/drm/amd"
    if (
        m.module_loaded is not False
        or not m.amd_pci
        or not m.kernel
        or m.container
        or m.snapshot.absent("/lib/modules")
    ):
        return None
    if dkms_for_running(m) or not m.snapshot.absent(folder):
        return None
    return hit(f"{folder} is not there", f"the running kernel is {m.kernel}")


def f09(m: Machine) -> Hit | None:
    """Firmware missing or too old for the GPU."""
    fatal = m.kernel_said(
        r"hw_init of IP block <\S+> failed|Fatal error during GPU init|amdgpu: failed to load (ucode|"
        r"firmware)|failed to load firmware \"?amdgpu/"
    )
    load = m.kernel_said(r"Direct firmware load for amdgpu/\S+ failed with error -2")
    if m.kfd and len(m.kfd) >= len([g for g in m.amd_pci if g.driver == "amdgpu"]) and not fatal:
        return None
    if not fatal and not (load and not m.kfd):
        text = m.log_said(r"failed to load firmware \"?amdgpu/|Possible missing firmware .*amdgpu")
        return seen(f"log: {text}") if text and not m.kfd else None
    return seen(f"dmesg: {load}" if load else "", f"dmesg: {fatal}" if fatal and fatal != load else "")


def f10(m: Machine) -> Hit | None:
    """The PCI path offers no atomics."""
    text = said(m, r"PCI rejects atomics")
    node = m.snapshot.node("/dev/kfd")
    if not text and node and node.open == "ENOMEM" and not m.kfd and m.amd_pci and not f11(m):
        return hit("opening /dev/kfd gives ENOMEM: KFD took no GPU on", pci_words(m))
    if not text:
        return None
    device = re.search(r"1002:([0-9a-fA-F]{4})", text)
    row = load_table().gpu_of_pci(device.group(1)) if device else None
    if m.kfd and row and row.integrated:
        return None
    return seen(text, "opening /dev/kfd gives ENOMEM" if node and node.open == "ENOMEM" else "")


def f11(m: Machine) -> Hit | None:
    """A GPU that ROCm's kernel side does not know."""
    if m.kfd:
        return None
    text = said(m, r"kfd not supported on this ASIC")
    old = [(g, gfx) for g in m.amd_pci if (gfx := load_table().unsupported_asic(g.device))]
    if text:
        return seen(text, *(f"{g.bdf} is 1002:{g.device.removeprefix('0x')} ({gfx})" for g, gfx in old))
    if old and len(old) == len([g for g in m.amd_pci if not (g.row and g.row.integrated)]):
        return hit(*(f"{g.bdf} is 1002:{g.device.removeprefix('0x')} ({gfx})" for g, gfx in old))
    return None


def f12(m: Machine) -> Hit | None:
    """Kernel driver and ROCm user space outside of the published window."""
    for gpu in m.kfd:
        values = key_values(m.snapshot.text(f"{KFD}/{gpu.node}/properties"))
        # Only a whole properties file proves it: one that was cut short says nothing.
        whole = "drm_render_minor" in values or {"location_id", "domain"} <= set(values)
        if values.get("drm_render_minor", 0) <= 0 and whole:
            return hit(f"nodes/{gpu.node}/properties names no drm_render_minor", driver="the kernel's own")
    row, rocm = load_table().driver_of(m.driver) if m.driver else None, m.rocm[:2]
    if row is None or not rocm or rocm > newest_rocm():
        return None
    low, high = row.userspace
    if low <= rocm <= high:
        return None
    return hit(
        quote(m, "/sys/module/amdgpu/version") + f" (driver stream {row.stream})",
        f"ROCm {line(rocm)} is in use; this driver goes with ROCm {line(low)} to {line(high)}",
        driver=row.stream,
    )


def f13(m: Machine) -> Hit | None:
    """The driver is loaded but its compute part is not there."""
    if m.container or m.wsl or m.module_loaded is not True or not m.snapshot.absent("/dev/kfd"):
        return None
    config = re.search(r"^# CONFIG_HSA_AMD is not set$", m.snapshot.text(f"/boot/config-{m.kernel}"), re.M)
    return hit(
        "/dev/kfd is not there although amdgpu is loaded",
        "/sys/class/kfd is not there" if m.snapshot.absent("/sys/class/kfd") else "",
        f"/boot/config-{m.kernel}: CONFIG_HSA_AMD is not set" if config else "",
    )


def f14(m: Machine) -> Hit | None:
    """The inbox driver is too old for this Instinct card."""
    for gfx in m.targets or tuple(g.row.gfx for g in m.amd_pci if g.row):
        row = load_table().gpu(gfx)
        if row is None or row.wavefront != 64:
            continue
        wants = parse_version(row.dkms_min)
        if wants and m.inbox:
            return hit(
                "the inbox driver is loaded: /sys/module/amdgpu/version is not there",
                f"{gfx} wants amdgpu-dkms {row.dkms_min} or newer",
                card=gfx,
            )
        if wants and m.driver and m.driver < wants and m.rocm >= (7, 14):
            return hit(
                quote(m, "/sys/module/amdgpu/version"),
                f"{gfx} with ROCm {line(m.rocm)} wants amdgpu-dkms {row.dkms_min} or newer",
                card=gfx,
            )
        oldest = parse_version(row.kernel_min)
        if oldest and m.inbox and parse_version(m.kernel) < oldest:
            return hit(
                f"the inbox driver of kernel {m.kernel} is loaded",
                f"{gfx} wants kernel {row.kernel_min} or amdgpu-dkms",
                card=gfx,
            )
    return None


def f15(m: Machine) -> Hit | None:
    """An out-of-tree driver on a Ryzen APU."""
    apus = [g for g in m.kfd if g.integrated]
    if not apus or len(apus) != len(m.kfd) or m.container:
        return None
    if m.driver:
        return hit(
            quote(m, "/sys/module/amdgpu/version") + ": an out-of-tree driver is loaded",
            f"the GPU is {apus[0].gfx}, part of the processor",
        )
    built = dkms_for_running(m)
    return (
        hit(
            f"dkms status: amdgpu {built} is installed for {m.kernel}",
            f"the GPU is {apus[0].gfx}, part of the processor",
        )
        if built
        else None
    )


def f16(m: Machine) -> Hit | None:
    """Package names that do not exist, or two ROCm lines in one package manager."""
    text = m.log_said(r"Unable to locate package amdrocm\S*|No package amdrocm\S* available|amdrocm-gfx\w+x\d")
    old, new = [], []
    for folder in ("/etc/apt/sources.list.d", "/etc/yum.repos.d", "/etc/zypp/repos.d"):
        for path in m.snapshot.glob(f"{folder}/*"):
            body = "\n".join(x for x in m.snapshot.text(path).splitlines() if not x.lstrip().startswith("#"))
            if re.search(r"repo\.radeon\.com/rocm/", body):
                old.append(path)
            if re.search(r"repo\.amd\.com/rocm/", body):
                new.append(path)
    mixed = f"{old[0]} has repo.radeon.com/rocm and {new[0]} has repo.amd.com/rocm" if old and new else ""
    if text:
        return seen(f"log: {text}", mixed)
    return hit(mixed) if mixed else None


def f17(m: Machine) -> Hit | None:
    """Strix Halo with the MES firmware that faults."""
    if not any(t == "gfx1151" for t in (*m.targets, *(g.gfx for g in m.kfd))):
        return None
    for path in m.snapshot.glob("/sys/kernel/debug/dri/*/amdgpu_firmware_info"):
        mes = re.search(
            r"^MES(?:_KIQ)? feature version: \d+, firmware version: 0x0*83\b.*$", m.snapshot.text(path), re.M
        )
        if mes:
            return hit(f"{path}: {mes.group(0)}")
    text = said(m, r"\bMES\b.{0,40}\b0x0*83\b")
    if text:
        return seen(text)
    packages = m.snapshot.command("packages")
    bad = re.search(r"^.*linux-firmware\S*\s+\S*202511(11|25)\S*.*$", packages.out, re.M) if packages else None
    return hit(f"installed: {bad.group(0).strip()}") if bad else None


def f18(m: Machine) -> Hit | None:
    """Strix Halo on a kernel that saves the wrong number of registers."""
    kernel = parse_version(m.kernel)
    if not any(g.gfx == "gfx1151" for g in m.kfd) or not kernel or kernel >= (6, 18, 4) or m.wsl or m.driver:
        return None
    if "oem" in m.kernel or m.snapshot.text("/sys/module/amdgpu/parameters/cwsr_enable").strip() == "0":
        return None
    text = said(m, r"CWSR|qcm fence wait loop timeout|context save")
    evidence = (f"kernel {m.kernel} is older than 6.18.4", "the GPU is gfx1151")
    return seen(*evidence, text) if text else hit(*evidence)


def f19(m: Machine) -> Hit | None:
    """The GPU's memory has uncorrectable errors."""
    text = said(
        m,
        r"(?<!\b0 )(?<!\b0 new )uncorrectable (hardware|ECC) errors?( detected)?|poison (is )?consumed|"
        r"Saved bad pages \d+ reaches threshold",
    )
    counts = []
    for path in m.snapshot.glob("/sys/class/drm/card*/device/ras/*_err_count"):
        errors = re.search(r"\bue:\s*([1-9]\d*)", m.snapshot.text(path))
        if errors:
            counts.append(f"{path}: ue: {errors.group(1)}")
    if not text and not counts:
        return None
    return seen(text, *counts, card=gpu_words(m))
