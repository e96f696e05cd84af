"""The parts of a capture that read the file system, one function a subject."""

from __future__ import annotations

import os
import re
from pathlib import Path

from surefoot.machine.probe import Probe


def system(probe: Probe) -> None:
    """Look at kernel, distribution, memory, container and virtual machine."""
    kernel = probe.file("/proc/sys/kernel/osrelease").strip()
    for path in (
        "/proc/version",
        "/proc/cmdline",
        "/proc/sys/kernel/numa_balancing",
        "/proc/sys/kernel/dmesg_restrict",
        "/proc/1/cgroup",
    ):
        probe.file(path)
    probe.file("/proc/self/uid_map")
    probe.file("/etc/os-release")
    probe.file("/proc/meminfo", only="MemTotal|MemAvailable|SwapTotal")
    lines = probe.file("/proc/cpuinfo", 8192).splitlines()
    probe.tree["files"]["/proc/cpuinfo"] = "\n".join(
        [x for x in lines if x.startswith(("model name", "flags", "Features"))][:2]
    )
    probe.file("/proc/mounts", 65536, only=" / | /dev/shm | /tmp | /home| /opt")
    for path in ("/.dockerenv", "/run/.containerenv"):
        if probe.glob(path):
            probe.tree["files"][path] = ""
        else:
            probe.tree["files"][path] = None
    for path in ("/sys/class/dmi/id/sys_vendor", "/sys/class/dmi/id/product_name", "/sys/kernel/security/lockdown"):
        probe.file(path)
    probe.file(f"/boot/config-{kernel}", 400_000, only="HSA_AMD|PCI_P2PDMA|DMABUF_MOVE_NOTIFY")
    _secure_boot(probe)
    probe.folder("/lib/modules")
    probe.folder(f"/lib/modules/{kernel}")
    probe.link(f"/lib/modules/{kernel}/build")
    probe.folder(f"/lib/modules/{kernel}/kernel/drivers/gpu/drm/amd")
    target = probe.tree["links"].get(f"/lib/modules/{kernel}/build")
    if isinstance(target, str) and target.startswith("/") and not probe.glob(target):
        probe.tree["files"][target] = None
    probe.files("/sys/kernel/iommu_groups/*/type", most=8)


def _secure_boot(probe: Probe) -> None:
    path = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    probe.file(path)
    value = probe.tree["files"].get(path)
    if isinstance(value, str):  # four bytes of attributes, then 0 or 1
        probe.tree["files"][path] = "1" if value.endswith("\x01") else "0"


def driver(probe: Probe) -> None:
    """Look at kernel modules, their parameters and DKMS."""
    modules = probe.folder("/sys/module", only="amd|ttm|nvidia|nouveau|radeon|vfio")
    for name in ("amdgpu", "nvidia"):
        if name not in modules:
            if "/sys/module" in probe.tree["dirs"] and isinstance(probe.tree["dirs"]["/sys/module"], list):
                probe.tree["files"][f"/sys/module/{name}"] = None
            continue
        for leaf in ("initstate", "version", "srcversion"):
            probe.file(f"/sys/module/{name}/{leaf}")
    for leaf in ("noretry", "cwsr_enable", "gttsize", "mes", "vm_fragment_size"):
        if "amdgpu" in modules:
            probe.file(f"/sys/module/amdgpu/parameters/{leaf}")
    for name in ("ttm", "amdttm"):
        if name in modules:
            probe.file(f"/sys/module/{name}/parameters/pages_limit")
    probe.file("/proc/driver/nvidia/version")
    probe.folder("/etc/modprobe.d")
    probe.files("/etc/modprobe.d/*", 8192)
    for log in probe.glob("/var/lib/dkms/amdgpu/*/build/make.log")[:2]:
        probe.file(log, 262_144, only="error|Error")
    probe.files("/sys/kernel/debug/dri/*/amdgpu_firmware_info", 8192, most=4)


def gpus(probe: Probe) -> None:
    """Look at KFD topology, PCI devices, counters and device nodes."""
    top = "/sys/devices/virtual/kfd"
    if not probe.glob(top):
        probe.tree["files"][top] = None
    nodes = f"{top}/kfd/topology/nodes"
    for leaf in ("gpu_id", "name", "properties", "mem_banks/*/properties"):
        probe.files(f"{nodes}/*/{leaf}", 4096)
    probe.files(f"{nodes}/*/io_links/*/properties", 1024, most=64)
    _pci(probe)
    for leaf in (
        "mem_info_vram_total",
        "mem_info_vram_used",
        "mem_info_gtt_total",
        "current_compute_partition",
        "current_memory_partition",
    ):
        probe.files(f"/sys/class/drm/card*/device/{leaf}", 256)
    probe.files("/sys/class/drm/card*/device/ras/*_err_count", 256, most=160)
    for path in ("/dev/kfd", "/dev/dxg"):
        probe.node(path)
    probe.folder("/dev/dri")
    for path in probe.glob("/dev/dri/*"):
        if "/by-path" not in path:
            probe.node(path, try_open="renderD" in path)
    for path in ("/dev/nvidia0", "/dev/nvidiactl"):
        probe.node(path, try_open=False)
    probe.folder("/sys/class/infiniband")
    probe.folder("/usr/lib/wsl/lib")


def _pci(probe: Probe) -> None:
    """Keep display controllers and accelerators; the rest of the bus is only counted by its listing."""
    probe.folder("/sys/bus/pci/devices")
    for path in probe.glob("/sys/bus/pci/devices/*/class"):
        if not probe.file(path).startswith(("0x03", "0x12")):
            probe.tree["files"].pop(path, None)
            continue
        folder = path.rpartition("/")[0]
        for leaf in (
            "vendor",
            "device",
            "current_link_speed",
            "current_link_width",
            "max_link_speed",
            "max_link_width",
        ):
            probe.file(f"{folder}/{leaf}", 256)
        probe.file(f"{folder}/resource", 57)
        probe.link(f"{folder}/driver")


def rocm(probe: Probe) -> None:
    """Look at ROCm trees, compilers and library folders."""
    probe.folder("/opt")
    probe.link("/opt/rocm")
    roots = [*probe.glob("/opt/rocm-*"), "/opt/rocm", *probe.glob("/opt/rocm/core-*")]
    for top in roots:
        if not probe.glob(top):
            continue
        probe.file(f"{top}/.info/version", 256)
        for leaf in ("", "/bin", "/include", "/include/hip", "/include/hipblas", "/lib/llvm/amdgcn/bitcode"):
            if probe.glob(top + leaf):
                probe.folder(top + leaf, most=300)
        if probe.glob(f"{top}/lib"):
            probe.folder(f"{top}/lib", most=300, only="lib")
    for path in ("/usr/include/rocm-core/rocm_version.h", "/usr/include/hip/hip_version.h"):
        probe.file(path, 4096)
    probe.folder("/usr/bin", most=80, only="hip|rocm|rocminfo|amd-smi|gcc|clang|ninja")
    probe.folder("/usr/include/c++")
    probe.folder("/usr/lib/gcc/x86_64-linux-gnu")
    for entry in (os.environ.get("LD_LIBRARY_PATH", "")).split(":"):
        if entry.startswith("/") and re.search(r"rocm|singularity", entry):
            probe.folder(entry, only="amdhip|hsa-runtime|rocblas|hipblas|MIOpen")
    probe.files("/etc/ld.so.conf.d/*", 2048, most=40)
    probe.files("/usr/lib/x86_64-linux-gnu/librocdxg*", 1)


def settings(probe: Probe) -> None:
    """Look at pip, uv and package source configuration, and what path variables point to."""
    home = str(Path.home())
    prefix = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or ""
    places = [
        "/etc/pip.conf",
        "/etc/xdg/pip/pip.conf",
        f"{home}/.config/pip/pip.conf",
        f"{home}/.pip/pip.conf",
        f"{home}/.config/uv/uv.toml",
        "/etc/uv/uv.toml",
    ]
    for path in [*places, *([f"{prefix}/pip.conf"] if prefix else [])]:
        probe.file(path, 8192)
    for pattern in ("/etc/apt/sources.list.d/*", "/etc/yum.repos.d/*", "/etc/zypp/repos.d/*"):
        for path in probe.glob(pattern)[:60]:
            text = probe.file(path, 4096)
            if not re.search(r"rocm|amdgpu|radeon|amd\.com", text + path):
                probe.tree["files"].pop(path, None)
    for path in probe.glob("/etc/udev/rules.d/*"):
        text = probe.file(path, 4096)
        if "kfd" not in text and "renderD" not in text:
            probe.tree["files"].pop(path, None)
    for name in (
        "HSA_TOOLS_LIB",
        "ROCP_TOOL_LIBRARIES",
        "LD_PRELOAD",
        "ROCM_PATH",
        "ROCM_HOME",
        "HIP_PATH",
        "HIP_CLANG_PATH",
        "HIP_DEVICE_LIB_PATH",
        "MIOPEN_SYSTEM_DB_PATH",
        "MIOPEN_USER_DB_PATH",
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "CUDA_HOME",
        "ROCBLAS_TENSILE_LIBPATH",
        "HIPBLASLT_TENSILE_LIBPATH",
    ):
        for entry in re.split(r"[:\s]+", os.environ.get(name, "")):
            if entry.startswith("/"):
                if probe.glob(globbing_safe(entry)):
                    probe.tree["dirs"].setdefault(entry, [])
                else:
                    probe.tree["files"][entry] = None


def globbing_safe(path: str) -> str:
    """Quote a path so that a glob takes it literally."""
    return re.sub(r"([*?\[])", r"[\1]", path)
