"""The steps below Python: firmware, kernel, driver and restart, and ROCm's own tools where something compiles."""

from __future__ import annotations

from shlex import quote
from typing import Any

from surefoot.doctor.clues import quote as quote_file
from surefoot.doctor.clues import secure_boot
from surefoot.doctor.fixes import REMOVE_DKMS, driver_allows, install
from surefoot.doctor.rules.a_driver import f08, f17, f18
from surefoot.errors import UserError
from surefoot.machine.facts import Machine
from surefoot.machine.table import Driver, Gpu, load_table
from surefoot.machine.versions import Version, parse_version, same_line, short
from surefoot.setup.access import access_steps, container_step
from surefoot.setup.choose import Choice
from surefoot.setup.lines import or_by_hand, ready
from surefoot.setup.plan import STATE_FOLDER, Step
from surefoot.setup.target import Target
from surefoot.setup.wsl import wsl_driver

_NEWER_KERNEL = {
    "ubuntu": "sudo apt install linux-generic-hwe-{version}",
    "debian": "sudo apt install linux-image-amd64",
    "dnf": "sudo dnf install kernel kernel-modules-extra",
    "zypper": "sudo zypper install kernel-default",
    "pacman": "sudo pacman -S linux",
}
_NEWEST_KERNEL = "find /lib/modules -mindepth 1 -maxdepth 1 -printf '%f\\n' | sort -V | tail -n 1"
#: Steps of the machine itself; whatever else is in a plan may as well be in a container's image.
IDS = ("firmware", "kernel", "driver", "reboot", "groups", "login")
_REBOOT_BEFORE = ("firmware", "kernel", "driver")
_BOOT = "/proc/sys/kernel/random/boot_id"
#: Holds the id of the start in which something was changed that counts only from the next one on.
_MARK = f"{STATE_FOLDER}/restart-wanted"
_WANTED = f"cat {_BOOT} > {_MARK}"


def _restart_wanted() -> tuple[str, str]:
    return f"mkdir -p {STATE_FOLDER}", _WANTED


def system_steps(m: Machine, choice: Choice, target: Target) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """Plan everything below Python.

    Args:
        m: the machine.
        choice: the torch, whose ROCm the driver must serve.
        target: what is planned for.

    Returns:
        The steps in order, and notes for the reader.

    Raises:
        UserError: this distribution cannot get the driver that the card needs.
    """
    if target.kind == "cpu" or (target.kind == "cuda" and m.container):
        return (), ()
    if target.kind == "cuda" and m.wsl:
        return (), ("the driver is Windows' own: install NVIDIA's there, and none in WSL",)
    if target.kind == "cuda":
        return _nvidia_driver(m, target), ()
    if m.container:
        return (container_step(m, target),), ("driver and firmware are the host's: nothing here can change them",)
    if m.wsl:
        return (wsl_driver(m),), ("the driver is Windows' own: keep AMD Software: Adrenalin Edition up to date there",)
    plan = _Driver(m, choice, target)
    steps = [plan.firmware(), plan.kernel(), plan.driver()]
    steps.append(
        _reboot(m, any(_WANTED in s.commands for s in steps if not s.satisfied), _REBOOT_BEFORE, "test -c /dev/kfd")
    )
    steps += access_steps(m, target, plan.works)
    return tuple(steps), plan.notes()


def _reboot(m: Machine, needed: bool, needs: tuple[str, ...], check: str) -> Step:
    """A new start, where a step below asks for it."""
    return Step(
        id="reboot",
        title="Start the machine again",
        reason="a new kernel, driver or firmware counts from the next start on",
        commands=ready(m, ["sudo systemctl reboot"]),
        verify=(f'test "$(cat {_MARK} 2> /dev/null)" != "$(cat {_BOOT})"', check),
        undo=("# nothing to undo",),
        needs=needs,
        root=True,
        reboot=True,
        minutes=3,
        satisfied="" if needed else "nothing before it changes kernel, driver or firmware",
    )


def _nvidia_driver(m: Machine, target: Target) -> tuple[Step, ...]:
    version = m.snapshot.text("/proc/driver/nvidia/version").splitlines()
    fact = version[0] if version else "/dev/nvidia0 is there" if m.snapshot.present("/dev/nvidia0") else ""
    lines = ready(m, ["sudo apt install ubuntu-drivers-common", "sudo ubuntu-drivers install"])
    if m.distro != "ubuntu":
        lines = (
            'echo "install NVIDIA\'s driver from your distribution, start the machine again, then go on" >&2',
            "exit 1",
        )
    driver = Step(
        id="driver", title="Install NVIDIA's driver", reason=target.fact, commands=(*lines, *_restart_wanted()),
        verify=("modinfo nvidia > /dev/null",),
        undo=("# remove the nvidia-driver packages with the package manager",), root=True,
        disk_gib=1.5, minutes=5, downloads=("0.5 GiB from the distribution",), satisfied=fact if target.here else "",
    )  # fmt: skip
    return driver, _reboot(m, not driver.satisfied, ("driver",), "nvidia-smi -L")


def _newer_kernel(m: Machine, minimum: str) -> list[str]:
    line = _NEWER_KERNEL.get(m.distro) or _NEWER_KERNEL.get(m.packager) or f"# install a kernel from {minimum} on"
    return or_by_hand(line.format(version=m.os_release.get("VERSION_ID", "")))


# ---- bare metal ----
class _Driver:
    """The steps of one machine of metal; which kernel driver it needs is settled once."""

    def __init__(self, m: Machine, choice: Choice, target: Target) -> None:
        self.m, self.choice, self.target = m, choice, target
        self.rows: list[Gpu] = [row for gfx in target.gfx if (row := load_table().gpu(gfx))]
        self.kernel_version = parse_version(m.kernel)
        seen = {gpu.gfx for gpu in m.kfd}
        self.works = target.here and bool(m.kfd) and set(target.gfx) <= seen
        self.apu = all(row.integrated for row in self.rows)
        self.oldest = max((parse_version(row.kernel_min) for row in self.rows), default=())
        self.stream = self._stream()

    @property
    def dkms(self) -> bool:
        """Whether the driver is, or becomes, the out-of-tree one."""
        return self.stream is not None or (bool(self.m.driver) and self.target.here and not self.apu)

    def _stream(self) -> Driver | None:
        """The driver stream to install; None where the inbox driver serves or the one that is loaded fits."""
        m, rocm = self.m, parse_version(self.choice.rocm)[:2] or load_table().rocm[-1].version
        wants = max((parse_version(row.dkms_min) for row in self.rows), default=())
        if self.apu:
            return None
        if m.driver and self.target.here:
            if driver_allows(m, rocm) and m.driver >= wants:
                return None
        elif not wants and (self.works or not self.kernel_version or self.kernel_version >= self.oldest):
            return None
        elif not wants and load_table().repo("driver", m.packager, m.distro) is None:
            return None  # a newer kernel is the way there
        return self._newest_stream(rocm, wants)

    def _newest_stream(self, rocm: Version, wants: Version) -> Driver:
        table, m = load_table(), self.m
        if table.repo("driver", m.packager, m.distro) is None:
            card = ", ".join(self.target.gfx)
            raise UserError(
                f"{card} with ROCm {short(rocm)} needs amdgpu-dkms, which AMD has not for {m.distro or 'this system'}",
                hint="would match: Ubuntu, RHEL or SLES; or a container on a host that has that driver",
                key="--gpu",
            )
        for row in reversed(table.drivers):
            broken = any(
                row.modules[0][:2] == b.module[:2] and self.kernel_version >= b.kernel for b in table.dkms_breaks
            )
            if row.userspace[0] <= rocm <= row.userspace[1] and row.modules[-1] >= wants and not broken:
                return row
        raise UserError(
            f"no driver in the table goes with ROCm {short(rocm)} on kernel {m.kernel}",
            hint="would match: another ROCm (--rocm), or another kernel",
            key="--rocm",
        )

    def firmware(self) -> Step:
        """Firmware files of the GPU."""
        old = f17(self.m) if self.target.here else None  # a release of 2025-11 that AMD took back on 2025-12-01
        newer = "-name 'gc_11_5_1_mes*' -newermt 2025-12-01" if old else "-name '*.bin*'"
        listed = ", ".join(f"{gfx} x{sum(g.gfx == gfx for g in self.m.kfd)}" for gfx in self.target.gfx)
        return Step(
            id="firmware",
            title="Bring the GPU's firmware up to date",
            reason=old.evidence[0] if old else "amdgpu loads its firmware from /lib/firmware/amdgpu when it starts",
            commands=(*ready(self.m, or_by_hand(install(self.m, "firmware"))), *_restart_wanted()),
            verify=(f"find /lib/firmware/amdgpu {newer} -print -quit | grep -q .",),
            undo=("# firmware packages may stay",),
            root=True, disk_gib=0.5, minutes=2, downloads=("0.3 GiB from the distribution",),
            satisfied=f"KFD lists {listed}: the driver has its firmware" if self.works and not old else "",
        )  # fmt: skip

    def kernel(self) -> Step:
        """A kernel that the driver goes with, and its headers where the driver is built."""
        m = self.m
        saved = f18(m) if self.target.here and self.works else None
        minimum = "6.18.4" if saved else short(self.oldest) if not self.dkms and self.oldest else ""
        too_old = bool(saved) or (not self.dkms and bool(self.kernel_version) and self.kernel_version < self.oldest)
        root: dict[str, Any] = {"root": True, "needs": ("firmware",), "downloads": ("0.2 GiB from the distribution",)}
        if too_old:
            return Step(
                id="kernel", title=f"Install a kernel from {minimum} on",
                reason=saved.evidence[0] if saved else f"kernel {m.kernel} is too old for the card",
                commands=(*ready(m, _newer_kernel(m, minimum)), *_restart_wanted()),
                verify=(f"printf '%s\\n' {minimum} \"$({_NEWEST_KERNEL})\" | sort -V -C",),
                undo=("# choose the old kernel in the boot menu",), disk_gib=0.5, minutes=3, **root,
            )  # fmt: skip
        headers = f"/lib/modules/{m.kernel}/build"
        modules = 'test -d "/lib/modules/$(uname -r)/kernel/drivers/gpu/drm/amd"'
        bare = self.target.here and f08(m) is not None
        lines = [*or_by_hand(install(m, "headers"))] if self.stream else []
        lines += or_by_hand(install(m, "modules")) if bare or (self.stream and m.distro == "ubuntu") else []
        fact = f"kernel {m.kernel}" + (f"; the inbox driver serves the card from {minimum} on" if minimum else "")
        if self.works:
            fact = f"kernel {m.kernel}: its driver brought the card up"
        if self.stream and m.snapshot.present(headers):
            fact = f"{headers} is there: the driver can be built for kernel {m.kernel}"
        done = not bare and (not self.stream or m.snapshot.present(headers)) and bool(m.kernel)
        return Step(
            id="kernel",
            title="Install what the running kernel lacks" if lines else "A kernel that the card's driver goes with",
            reason="the driver is built against the headers of the running kernel" if self.stream else fact,
            commands=ready(m, lines) or (modules,),
            verify=('test -e "/lib/modules/$(uname -r)/build"',) if self.stream else (modules,),
            undo=("# headers and modules may stay",), disk_gib=0.3, minutes=2, satisfied=fact if done else "", **root,
        )  # fmt: skip

    def driver(self) -> Step:
        """The kernel driver: the inbox one, or AMD's by DKMS within its window; never DKMS on an APU."""
        m = self.m
        common: dict[str, Any] = {"id": "driver", "needs": ("kernel",), "root": True}
        if self.apu and m.driver and self.target.here:
            return Step(
                title="Go back to the kernel's own driver",
                reason=quote_file(m, "/sys/module/amdgpu/version") + ": an APU takes the inbox driver only, never DKMS",
                commands=(*ready(m, or_by_hand(REMOVE_DKMS.get(m.packager, "# remove the amdgpu-dkms package"))),
                          *_restart_wanted()),
                verify=('test -z "$(modinfo -F version amdgpu)"',),
                undo=("# install amdgpu-dkms again",), minutes=2, **common,
            )  # fmt: skip
        if self.stream:
            return self._dkms_step(self.stream)
        if m.driver and self.target.here:
            row = load_table().driver_of(m.driver)
            window = (
                f", stream {row.stream}: goes with ROCm {short(row.userspace[0])} to {short(row.userspace[1])}"
                if row
                else ""
            )
            fact = quote_file(m, "/sys/module/amdgpu/version") + window
        else:
            fact = "the kernel's own amdgpu is loaded and has /dev/kfd" if self.works and m.module_loaded else ""
        why = "an APU takes the inbox driver only" if self.apu else "the inbox driver of this kernel serves the card"
        return Step(
            title="Load the kernel's own amdgpu driver", reason=why,
            commands=ready(m, ["sudo modprobe amdgpu"]),
            verify=("test -d /sys/module/amdgpu", "test -c /dev/kfd"),
            undo=("# it is loaded at every start anyway",), satisfied=fact, **common,
        )  # fmt: skip

    def _dkms_step(self, row: Driver) -> Step:
        m, repo = self.m, load_table().repo("driver", self.m.packager, self.m.distro)
        assert repo is not None
        low, high = (short(v) for v in row.userspace)
        loaded = quote_file(m, "/sys/module/amdgpu/version") + "; " if m.driver and self.target.here else ""
        needs = next((f"{r.gfx} wants amdgpu-dkms {r.dkms_min} or newer; " for r in self.rows if r.dkms_min), "")
        modules = "|".join(short(module).replace(".", "[.]") for module in row.modules)
        return Step(
            title=f"Install AMD's kernel driver {row.stream} (amdgpu-dkms)",
            reason=f"{loaded}{needs}driver {row.stream} goes with ROCm {low} to {high}; "
            f"the plan has {self.choice.rocm or 'a nightly'}",
            commands=(*ready(m, repository_lines(m, "driver", row.stream) + _installs(m, repo.packages)),
                      *_restart_wanted()),
            verify=(f"modinfo -F version amdgpu | grep -qE '^({modules})[.]'",),
            undo=ready(m, [REMOVE_DKMS[m.packager]]),
            disk_gib=1.0, minutes=8, downloads=("0.1 GiB from repo.radeon.com",),
            id="driver", needs=("kernel",), root=True,
        )  # fmt: skip

    def notes(self) -> tuple[str, ...]:
        """What no step can do."""
        m, found = self.m, []
        if not self.target.here:
            found.append(
                f"planned for {', '.join(self.target.gfx)}, which is not in this machine; the steps below Python take "
                f"{m.os_release.get('PRETTY_NAME') or m.distro or 'its distribution'} and kernel {m.kernel or '?'}"
            )
        found += self._system_listed()
        if self.stream and secure_boot(m):
            found.append("Secure Boot is on: enrol DKMS's key (mokutil --import) and confirm it at the next start")
        if m.env("SLURM_JOB_ID"):
            found.append("this is a Slurm job: steps that need root are for the cluster's administrators")
        return tuple(found)

    def _system_listed(self) -> list[str]:
        """Say where AMD's list of systems has this distribution or kernel not; the inbox driver may well serve."""
        m = self.m
        own = f"{m.distro} {m.os_release.get('VERSION_ID', '')}".strip()
        family = "ryzen" if self.apu else "instinct" if any(row.wavefront == 64 for row in self.rows) else "radeon"
        listed = [row.rpartition(" ") for row in load_table().os_rows.get(family, ()) if row.startswith(f"{own} ")]
        kernels = [kernel for _, _, kernel in listed]
        newer = parse_version(self.choice.rocm) >= (10,) or not self.choice.rocm
        if not own or not newer or short(self.kernel_version) in kernels:
            return []
        what = f"{own} with kernel {' or '.join(kernels)}, not {short(self.kernel_version)}" if kernels else f"no {own}"
        return [f"AMD's list of systems for ROCm 10.0 and {family.capitalize()} cards has {what}"]


# ---- package repositories and ROCm's tools ----
def repository_lines(m: Machine, kind: str, version: str) -> list[str]:
    """Commands that add AMD's `driver` or `rocm` repository to this distribution's package manager.

    Args:
        m: the machine.
        kind: driver or rocm.
        version: the driver's stream or ROCm's release.

    Returns:
        Lines with sudo; empty where AMD has no such repository.
    """
    repo = load_table().repo(kind, m.packager, m.distro)
    if repo is None:
        return []
    os_version = m.os_release.get("VERSION_ID", "")
    url = repo.url.format(version=version, os=os_version, major=os_version.partition(".")[0])
    name = "amdgpu" if kind == "driver" else "rocm"
    if m.packager == "apt":
        own = m.os_release.get("UBUNTU_CODENAME") or m.os_release.get("VERSION_CODENAME", "")
        codename = repo.codenames.get(own, own) or "$(sed -n s/^VERSION_CODENAME=//p /etc/os-release)"
        lines = [
            "sudo apt-get update",
            "sudo apt install ca-certificates curl gnupg",
            "sudo install -d -m 0755 /etc/apt/keyrings",
            f"curl -fsSL {repo.key} | sudo gpg --dearmor --yes -o /etc/apt/keyrings/rocm.gpg",
            f'echo "deb [arch=amd64 signed-by=/etc/apt/keyrings/rocm.gpg] {url} {codename} main" | '
            f"sudo tee /etc/apt/sources.list.d/{name}.list > /dev/null",
        ]
        if kind == "rocm":  # Ubuntu has packages of the same names, of another ROCm
            pin = "printf '%s\\n' 'Package: *' 'Pin: release o=repo.radeon.com' 'Pin-Priority: 600'"
            lines.append(f"{pin} | sudo tee /etc/apt/preferences.d/rocm-pin-600 > /dev/null")
        return [*lines, "sudo apt-get update"]
    folder = "/etc/yum.repos.d" if m.packager == "dnf" else "/etc/zypp/repos.d"
    fields = (f"[{name}]", f"name={name}", f"baseurl={url}", "enabled=1", "gpgcheck=1", f"gpgkey={repo.key}")
    major = os_version.partition(".")[0]
    lines = [f"sudo dnf install {address.format(major=major)}" for address in repo.first]
    lines += [f"printf '%s\\n' {' '.join(quote(f) for f in fields)} | sudo tee {folder}/{name}.repo > /dev/null"]
    return lines + (["sudo zypper --gpg-auto-import-keys refresh"] if m.packager == "zypper" else [])


def _installs(m: Machine, packages: tuple[str, ...]) -> list[str]:
    tool = {"apt": "sudo apt install", "dnf": "sudo dnf install", "zypper": "sudo zypper install"}[m.packager]
    return [f"{tool} {' '.join(packages)}"]


def rocm_devel(m: Machine, choice: Choice, target: Target) -> Step:
    """Plan the system's ROCm compiler and headers, which only a build needs; from 7.9 on they are Python packages.

    Args:
        m: the machine.
        choice: the torch whose ROCm they must be.
        target: what is planned for.

    Returns:
        The step `rocm-devel`: satisfied by a ROCm of the same line here, else from the package manager.
    """
    wanted = parse_version(choice.rocm)
    line = short(wanted).replace(".", "[.]")
    trees = [path for path, version in m.rocm_trees.items() if same_line(version, wanted) and target.here]
    header = "include/hip/hip_runtime.h"
    here = next((path for path in trees if m.snapshot.present(f"{path}/{header}")), "")
    repo = load_table().repo("rocm", m.packager, m.distro)
    by_hand = or_by_hand(f"# install the development packages of ROCm {choice.rocm} from your distribution")
    lines = repository_lines(m, "rocm", choice.rocm) + _installs(m, repo.packages) if repo else by_hand
    return Step(
        id="rocm-devel",
        title=f"Install ROCm {choice.rocm}'s compiler and headers",
        reason=f"something compiles: it needs hipcc and headers of ROCm {choice.rocm}, the line of torch",
        commands=ready(m, lines),
        verify=(
            "test -x /opt/rocm/bin/hipcc",
            f"test -e /opt/rocm/{header}",
            f"grep -q '^{line}[.]' /opt/rocm/.info/version",  # another ROCm's compiler does not make this step done
        ),
        undo=("# remove the packages rocm-hip-sdk and rocm-dev with the package manager",),
        needs=("pip-tools",),
        root=True,
        disk_gib=25.0,
        minutes=15,
        downloads=("4 GiB from repo.radeon.com",),
        satisfied=f"{here}/{header} is there (ROCm {choice.rocm})" if here else "",
    )
