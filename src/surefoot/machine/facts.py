"""What a snapshot says about the machine, as typed facts that rules and plans build on."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from surefoot.machine import hardware, torch_facts
from surefoot.machine.gfx import parse_override
from surefoot.machine.hardware import AMD, NVIDIA, KfdGpu, PciGpu
from surefoot.machine.snapshot import Dist, Snapshot, as_dict, as_float, as_int, as_numbers
from surefoot.machine.table import load_table
from surefoot.machine.torch_facts import Torch
from surefoot.machine.versions import Version, parse_version

#: What systemd-detect-virt says of containers, which are no virtual machines.
_CONTAINERS = ("docker", "podman", "lxc", "lxc-libvirt", "systemd-nspawn", "openvz", "rkt", "proot", "container-other")

#: Commands that a capture runs by itself; any other command in a snapshot was run by a person who had a reason.
_CAPTURED = frozenset(
    (
        *("rocminfo", "rocm-smi", "amd-smi", "amd-smi-list", "amd-smi-static", "nvidia-smi", "dkms", "hipcc", "lspci"),
        *("mokutil", "mokutil-test-key", "modinfo", "getenforce", "systemd-detect-virt", "ldconfig", "packages"),
        *("dmesg", "journal"),
    )
)
_PACKAGERS = {
    "apt": ("debian", "ubuntu", "linuxmint", "pop", "neon", "kali", "proxmox"),
    "dnf": ("fedora", "rhel", "centos", "rocky", "almalinux", "ol", "amzn", "azurelinux", "alinux"),
    "zypper": ("suse", "opensuse", "sles", "opensuse-tumbleweed", "opensuse-leap"),
    "pacman": ("arch", "cachyos", "manjaro", "endeavouros"),
    "emerge": ("gentoo",),
    "nix": ("nixos",),
}


class Machine:
    """Facts derived from one snapshot; the same for a live machine and for a file."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    # ---- system ----
    @cached_property
    def kernel(self) -> str:
        """The running kernel's release, as uname -r prints it."""
        return self.snapshot.text("/proc/sys/kernel/osrelease")

    @cached_property
    def os_release(self) -> dict[str, str]:
        """/etc/os-release as a mapping; keys in capitals."""
        pairs = (re.split(r"[= ]", line, maxsplit=1) for line in self.snapshot.text("/etc/os-release").splitlines())
        return {pair[0]: pair[1].strip("\"'") for pair in pairs if len(pair) == 2}

    @cached_property
    def distro(self) -> str:
        """The distribution's id: ubuntu, debian, rhel, fedora, ..."""
        return self.os_release.get("ID", "")

    @cached_property
    def packager(self) -> str:
        """Which package manager the distribution has: apt, dnf, zypper, pacman, emerge, nix, or empty."""
        names = [self.distro, *self.os_release.get("ID_LIKE", "").split()]
        return next((tool for name in names for tool, ids in _PACKAGERS.items() if name in ids), "")

    @cached_property
    def wsl(self) -> bool:
        """Whether this is WSL2."""
        return "microsoft" in self.kernel.lower()

    @cached_property
    def container(self) -> str:
        """The container kind: docker, podman, k8s, apptainer, lxc, gvisor, or empty for none seen."""
        see = self.snapshot
        if see.env("KUBERNETES_SERVICE_HOST") is not None or "kubepods" in see.text("/proc/1/cgroup"):
            return "k8s"
        if see.env("APPTAINER_NAME") is not None or see.env("SINGULARITY_NAME") is not None:
            return "apptainer"
        if see.present("/run/.containerenv") or see.env("container") == "podman":
            return "podman"
        told = re.search(r"(?:^|\0|\n)container=([\w-]+)", see.text("/proc/1/environ"))
        detected = see.command("systemd-detect-virt")
        marks = {see.env("container") or "", told.group(1) if told else "", detected.out.strip() if detected else ""}
        if marks & {"lxc", "lxc-libvirt", "systemd-nspawn", "openvz"} or "/lxc" in see.text("/proc/1/cgroup"):
            return "lxc"
        if "podman" in marks:
            return "podman"
        if (
            self.virtual_machine == "firecracker"
        ):  # such a micro-VM may carry an image's marker file without being a container
            return ""
        marked = see.present("/.dockerenv") or "docker" in see.text("/proc/1/cgroup") or "docker" in marks
        return "docker" if marked else ""

    @cached_property
    def sandbox(self) -> str:
        """The user-space kernel that stands between programs and devices (gvisor), or empty."""
        version = self.snapshot.text("/proc/version") + self.snapshot.text("/proc/sys/kernel/version")
        return "gvisor" if "gvisor" in version.lower() or re.search(r"Starting gVisor", self.dmesg) else ""

    @cached_property
    def virtual_machine(self) -> str:
        """The hypervisor below, by name, `some` when only its presence is known, or empty."""
        see = self.snapshot
        vendor = (see.text("/sys/class/dmi/id/sys_vendor") + " " + see.text("/sys/class/dmi/id/product_name")).lower()
        names = {
            "virtualbox": "virtualbox", "innotek": "virtualbox", "vmware": "vmware", "parallels": "parallels",
            "qemu": "kvm", "kvm": "kvm", "microsoft corporation virtual": "hyperv", "xen": "xen", "bochs": "kvm",
            "amazon ec2": "ec2", "google compute": "gce", "utm": "utm", "apple virtualization": "apple",
        }  # fmt: skip
        if "firecracker" in see.text("/proc/cmdline") or "-fc" in self.kernel:
            return "firecracker"
        found = next((kind for mark, kind in names.items() if mark in vendor), "")
        if found:
            return found
        detected = see.command("systemd-detect-virt")
        if detected and detected.out.strip() not in ("", "none", "wsl", *_CONTAINERS):
            return detected.out.strip()
        return "some" if re.search(r"^flags\b.*\bhypervisor\b", see.text("/proc/cpuinfo"), re.M) else ""

    @cached_property
    def cmdline(self) -> str:
        """The kernel's command line."""
        return self.snapshot.text("/proc/cmdline")

    # ---- what was said ----
    @cached_property
    def dmesg(self) -> str:
        """Kernel messages; empty when they could not be read."""
        answer = self.snapshot.command("dmesg")
        texts = [self.snapshot.journal("dmesg"), answer.out if answer and answer.rc == 0 else ""]
        return "\n".join(text for text in texts if text)

    @cached_property
    def log(self) -> str:
        """What the failing program printed, given with --log, and the answers of commands that no capture runs."""
        commands = self.snapshot.section("commands")
        others = [self.snapshot.command(n) for n in sorted(commands) if n.split(" ")[0] not in _CAPTURED]
        texts = [self.snapshot.journal("log"), *(f"{a.out}\n{a.err}".strip() for a in others if a)]
        return "\n".join(text for text in texts if text)

    def kernel_said(self, pattern: str) -> str:
        """The first kernel message that matches, or an empty string."""
        return _first_line(pattern, self.dmesg)

    def log_said(self, pattern: str) -> str:
        """The first line of the program's output that matches, or an empty string."""
        return _first_line(pattern, self.log)

    def said(self, pattern: str) -> str:
        """The first matching line of the program's output, the kernel's messages or a probe's error output."""
        return self.log_said(pattern) or self.kernel_said(pattern) or _first_line(pattern, self._command_errors)

    @cached_property
    def _command_errors(self) -> str:
        names = ("rocminfo", "amd-smi", "rocm-smi", "nvidia-smi")
        answers = [self.snapshot.command(name) for name in names]
        return "\n".join(f"{a.err}\n{a.out}" for a in answers if a and (a.rc != 0 or a.err))

    # ---- GPUs ----
    @cached_property
    def pci(self) -> tuple[PciGpu, ...]:
        """Display controllers and accelerators on the PCI bus."""
        return hardware.pci_gpus(self.snapshot)

    @cached_property
    def amd_pci(self) -> tuple[PciGpu, ...]:
        """AMD's among them."""
        return tuple(gpu for gpu in self.pci if gpu.vendor == AMD)

    @cached_property
    def nvidia_pci(self) -> tuple[PciGpu, ...]:
        """NVIDIA's among them."""
        return tuple(gpu for gpu in self.pci if gpu.vendor == NVIDIA)

    @cached_property
    def pci_looked(self) -> bool:
        """Whether the PCI bus could be listed."""
        listed = self.snapshot.listed(hardware.PCI) or bool(self.snapshot.listing(hardware.PCI))
        return listed or self.snapshot.absent(hardware.PCI)

    @cached_property
    def kfd(self) -> tuple[KfdGpu, ...]:
        """AMD GPUs in the KFD topology, whether or not this process may use them."""
        return hardware.kfd_gpus(self.snapshot)

    @cached_property
    def reachable(self) -> tuple[KfdGpu, ...]:
        """GPUs whose render node exists here, in ROCm's own order (containers are often given only some)."""
        see = self.snapshot
        here = [g for g in self.kfd if g.render_minor < 0 or not see.absent(f"/dev/dri/renderD{g.render_minor}")]
        nodes = {g.node: see.node(f"/dev/dri/renderD{g.render_minor}") for g in here}
        forbidden = {number for number, node in nodes.items() if node and node.open == "EPERM"}
        if len(forbidden) < len(here):  # ROCm skips a node that a device cgroup forbids
            here = [g for g in here if g.node not in forbidden]
        return tuple(here)

    @cached_property
    def visible(self) -> tuple[KfdGpu, ...]:
        """GPUs left by ROCR_VISIBLE_DEVICES and then HIP_ or CUDA_VISIBLE_DEVICES, which indexes the rest."""
        left = list(self.reachable)
        left = _mask(left, self.snapshot.env("ROCR_VISIBLE_DEVICES"))
        hip = self.snapshot.env("HIP_VISIBLE_DEVICES")
        return tuple(_mask(left, hip if hip is not None else self.snapshot.env("CUDA_VISIBLE_DEVICES")))

    @cached_property
    def rocminfo_targets(self) -> tuple[str, ...]:
        """Where no KFD exists, as under WSL, the targets that rocminfo lists."""
        answer = self.snapshot.command("rocminfo") if self.wsl or not self.kfd else None
        return hardware.rocminfo_gpus(answer.out) if answer else ()

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """True targets of the visible GPUs, each once: from KFD, else rocminfo under WSL, else the PCI ids."""
        names = [g.gfx for g in self.visible] or list(self.rocminfo_targets)
        if not names and not self.kfd:
            names = [gpu.row.gfx for gpu in self.amd_pci if gpu.row]
        return tuple(dict.fromkeys(names))

    @cached_property
    def compute_targets(self) -> tuple[str, ...]:
        """The same without integrated graphics that stand beside a discrete card."""
        table = load_table()
        discrete = tuple(t for t in self.targets if not (row := table.gpu(t)) or not row.integrated)
        return discrete or self.targets

    @cached_property
    def has_amd(self) -> bool:
        """Whether anything shows that the person has an AMD GPU here."""
        return bool(self.amd_pci or self.kfd or self.rocminfo_targets or (self.wsl and self._wsl_amd))

    @cached_property
    def _wsl_amd(self) -> bool:
        see = self.snapshot
        nvidia = see.present("/usr/lib/wsl/lib/libcuda.so.1") or see.present("/usr/lib/wsl/lib/nvidia-smi")
        rocm = bool(self.rocm_trees or self.rocm_pip or (self.torch and self.torch.flavour == "rocm"))
        return not nvidia and (rocm or see.present("/opt/rocm") or see.command("rocminfo") is not None)

    @cached_property
    def has_nvidia(self) -> bool:
        """Whether an NVIDIA GPU is here."""
        wsl = self.wsl and self.snapshot.present("/usr/lib/wsl/lib/libcuda.so.1")
        return bool(self.nvidia_pci or wsl or self.snapshot.present("/dev/nvidia0"))

    # ---- kernel driver ----
    @cached_property
    def module_loaded(self) -> bool | None:
        """Whether the amdgpu kernel module is loaded; None when nobody could look."""
        if self.snapshot.present("/sys/module/amdgpu"):
            return True
        return False if self.snapshot.absent("/sys/module/amdgpu") else None

    @cached_property
    def driver(self) -> Version:
        """Version of an out-of-tree amdgpu driver; empty for the inbox one or when unknown."""
        return parse_version(self.snapshot.text("/sys/module/amdgpu/version"))

    @cached_property
    def inbox(self) -> bool:
        """Whether the loaded driver is known to be the kernel's own."""
        return self.module_loaded is True and self.snapshot.absent("/sys/module/amdgpu/version")

    @cached_property
    def dkms(self) -> tuple[tuple[str, str, str], ...]:
        """Rows of `dkms status` for amdgpu: (version, kernel, state)."""
        answer = self.snapshot.command("dkms")
        return hardware.dkms_rows(answer.out) if answer else ()

    # ---- ROCm ----
    @cached_property
    def rocm_trees(self) -> dict[str, Version]:
        """ROCm installations outside of Python: folder → version (empty when it does not say)."""
        see, found = self.snapshot, {}
        for path in see.glob("/opt/rocm*/.info/version"):
            found[path.removesuffix("/.info/version")] = parse_version(see.text(path))
        for name in (*see.listing("/opt"), *(f"rocm/{n}" for n in see.listing("/opt/rocm"))):
            match = re.fullmatch(r"(rocm-|rocm/core-)(\d[\d.]*)", name)
            if match and see.present(f"/opt/{name}"):
                found.setdefault(f"/opt/{name}", parse_version(match.group(2)))
        header = see.text("/usr/include/rocm-core/rocm_version.h")
        numbers = re.findall(r"ROCM_VERSION_(?:MAJOR|MINOR|PATCH)\s+(\d{1,4})", header)
        if numbers:
            found["/usr"] = tuple(int(n) for n in numbers)
        return found

    @cached_property
    def rocm_system(self) -> Version:
        """Version of the newest ROCm outside of Python; empty for none."""
        return max(self.rocm_trees.values(), default=())

    @cached_property
    def rocm_pip(self) -> Version:
        """Version of the ROCm that came as Python packages; empty for none."""
        dist = self.dists.get("rocm-sdk-core")
        return parse_version(dist.version) if dist else ()

    @cached_property
    def rocm(self) -> Version:
        """The ROCm that torch runs on: its own tag, else pip's SDK, else the system's."""
        torch = self.torch.rocm if self.torch else ()
        if self.rocm_pip and torch and self.rocm_pip[:2] > torch[:2]:
            return self.rocm_pip
        return torch or self.rocm_pip or self.rocm_system

    # ---- Python ----
    @cached_property
    def python(self) -> dict[str, Any]:
        """The captured Python section."""
        return self.snapshot.section("python")

    @cached_property
    def python_version(self) -> Version:
        """Version of the Python that was looked at."""
        return parse_version(self.python.get("version"))

    @cached_property
    def dists(self) -> dict[str, Dist]:
        """Installed distributions by normalised name."""
        return torch_facts.read_dists(self.python.get("dists"))

    @cached_property
    def dists_known(self) -> bool:
        """Whether site-packages could be read."""
        return isinstance(self.python.get("dists"), dict)

    @cached_property
    def torch(self) -> Torch | None:
        """The installed torch, or None when there is none (or nobody could look)."""
        return torch_facts.read_torch(as_dict(self.python.get("torch")), self.dists)

    def covers(self, gfx: str) -> bool | None:
        """Tell whether torch has kernels for a target, generic ones allowed; None when its list is unknown."""
        if not self.torch or self.torch.flavour != "rocm" or not (self.torch.targets or self.torch.split):
            return None
        row = load_table().gpu(gfx)
        return gfx in self.torch.targets or bool(row and row.generic and row.generic in self.torch.targets)

    # ---- environment and process ----
    def env(self, name: str) -> str | None:
        """An environment variable, or None."""
        return self.snapshot.env(name)

    @cached_property
    def override(self) -> str | None:
        """HSA_OVERRIDE_GFX_VERSION (or its per-device form), None when unset or empty."""
        env = self.snapshot.section("env")
        names = sorted(n for n in env if re.fullmatch(r"HSA_OVERRIDE_GFX_VERSION(_\d+)?", n))
        return next((value for n in names if (value := self.snapshot.env(n))), None)

    @cached_property
    def override_target(self) -> str:
        """The target that the override pretends; empty when there is none or it is invalid."""
        return parse_override(self.override) if self.override else ""

    @cached_property
    def groups(self) -> frozenset[int] | None:
        """Numbers of the groups this process really has, or None when unknown."""
        process = self.snapshot.section("process")
        line = re.search(r"^Groups:?[ \t]*([\d \t]*)$", self.snapshot.text("/proc/self/status"), re.M)
        if line:
            return frozenset(as_int(g, -1) for g in line.group(1).split()) | frozenset([as_int(process.get("gid"), -1)])
        numbers = as_numbers(process.get("groups"))
        if numbers is None:
            return None
        extra = [process["gid"]] if as_int(process.get("gid"), -1) >= 0 else []
        return frozenset(as_int(g, -1) for g in [*numbers, *extra])

    @cached_property
    def root(self) -> bool:
        """Whether the process is root (in its own name space)."""
        return as_int(self.snapshot.section("process").get("uid"), -1) == 0

    def limit(self, name: str) -> float | None:
        """A soft resource limit (`nofile`, `memlock` in bytes); infinity for unlimited, None when unknown."""
        value = as_dict(self.snapshot.section("process").get("limits")).get(name)
        words = {"nofile": "Max open files", "memlock": "Max locked memory"}[name]
        line = re.search(rf"^{words}\s+(unlimited|\d{{1,18}})\b", self.snapshot.text("/proc/self/limits"), re.M)
        if line:
            value = line.group(1) if line.group(1) == "unlimited" else int(line.group(1))
        if value == "unlimited":
            return float("inf")
        value = as_int(value, -1) if isinstance(value, str) else value
        return as_float(value, -1.0) if isinstance(value, (int, float)) and as_float(value, -1.0) >= 0 else None

    @cached_property
    def ram(self) -> int:
        """Bytes of main memory; 0 when unknown."""
        return hardware.meminfo_bytes(self.snapshot, "MemTotal")


def _first_line(pattern: str, text: str) -> str:
    if not text:
        return ""
    found = re.search(pattern, text, re.I)
    if not found:
        return ""
    start = text.rfind("\n", 0, found.start()) + 1
    end = text.find("\n", found.end())
    return text[start : end if end >= 0 else len(text)].strip()[:300]


def _mask(gpus: list[KfdGpu], value: str | None) -> list[KfdGpu]:
    """Apply one *_VISIBLE_DEVICES list of indexes or UUIDs; as in the runtime, an entry that names nothing ends it."""
    if value is None:
        return gpus
    kept: list[KfdGpu] = []
    for entry in value.split(","):
        entry = entry.strip()
        if re.fullmatch(r"\d{1,6}", entry) and int(entry) < len(gpus):
            gpu = gpus[int(entry)]
        else:
            gpu = next((g for g in gpus if g.uuid and entry.upper() == g.uuid.upper()), None)
        if gpu is None:
            break
        if gpu not in kept:
            kept.append(gpu)
    return kept
