"""Commands for this distribution, this container and this ROCm line, to fill the placeholders of the texts."""

from __future__ import annotations

from surefoot.doctor.clues import gpu_words
from surefoot.machine.facts import Machine
from surefoot.machine.table import TorchRelease, load_table
from surefoot.machine.versions import Version, parse_version, short

_INSTALL = {
    "apt": "sudo apt install {}",
    "dnf": "sudo dnf install {}",
    "zypper": "sudo zypper install {}",
    "pacman": "sudo pacman -S {}",
    "emerge": "sudo emerge {}",
    "nix": "# add {} to environment.systemPackages || 把 {} 加入 environment.systemPackages",
}
_PACKAGES = {
    "headers": {
        "apt": "linux-headers-{kernel}",
        "dnf": "kernel-devel-{kernel}",
        "zypper": "kernel-default-devel",
        "pacman": "linux-headers",
    },
    "firmware": {
        "apt": "linux-firmware",
        "dnf": "linux-firmware",
        "zypper": "kernel-firmware-amdgpu",
        "pacman": "linux-firmware",
    },
    "modules": {"apt": "linux-modules-extra-{kernel}", "dnf": "kernel-modules-extra"},
    "compiler": {"apt": "build-essential", "dnf": "gcc gcc-c++", "zypper": "gcc gcc-c++", "pacman": "base-devel"},
    "libstdcxx": {"apt": "libstdc++-{gcc}-dev", "dnf": "libstdc++-devel", "zypper": "libstdc++-devel", "pacman": "gcc"},
    "git": {"apt": "git", "dnf": "git", "zypper": "git", "pacman": "git"},
    "python_dev": {"apt": "python3-dev", "dnf": "python3-devel", "zypper": "python3-devel", "pacman": "python"},
    "ninja": {
        "apt": "ninja-build libaio-dev",
        "dnf": "ninja-build libaio-devel",
        "zypper": "ninja libaio-devel",
        "pacman": "ninja libaio",
    },
}
REMOVE_DKMS = {
    "apt": "sudo apt remove amdgpu-dkms",
    "dnf": "sudo dnf remove amdgpu-dkms",
    "zypper": "sudo zypper remove amdgpu-dkms",
}
_BOOTLOADER = {
    "apt": "sudo update-grub",
    "dnf": "sudo grubby --update-kernel=ALL --args=iommu=pt",
    "zypper": "sudo grub2-mkconfig -o /boot/grub2/grub.cfg",
    "pacman": "sudo grub-mkconfig -o /boot/grub/grub.cfg",
}
_INITRAMFS = {
    "apt": "sudo update-initramfs -u",
    "dnf": "sudo dracut -f",
    "zypper": "sudo dracut -f",
    "pacman": "sudo mkinitcpio -P",
}


def install(m: Machine, what: str) -> str:
    """The command that installs something with this distribution's package manager.

    Args:
        m: the machine.
        what: a key of the package table, as headers, firmware or compiler.

    Returns:
        One command line, or a line for the reader where the distribution is unknown.
    """
    name = _PACKAGES[what].get(m.packager, "")
    if what == "firmware" and m.distro == "debian":
        name = "firmware-amd-graphics"
    if what == "firmware" and "pve" in m.kernel:
        name = "pve-firmware"
    if not name:
        return f"# install your distribution's package for: {what} || 安装发行版中对应的软件包：{what}"
    return _INSTALL[m.packager].format(name.replace("{kernel}", m.kernel or "$(uname -r)"))


def pip(m: Machine) -> str:
    """How packages are installed into the Python that was looked at."""
    torch = m.dists.get("torch")
    return "uv pip" if torch and torch.installer == "uv" else "python -m pip"


def torch_for(m: Machine) -> tuple[TorchRelease, str] | None:
    """Choose a torch and the ROCm variant of it that has kernels for this machine's GPUs, from PyTorch's own index.

    Args:
        m: the machine.

    Returns:
        The torch release and its ROCm variant; None when no official wheel has the kernels.
    """
    table, targets, python = load_table(), set(m.compute_targets), m.python_version[:2]
    served = any(row.python[0] <= python <= row.python[1] for row in table.torch[-3:])
    for row in reversed(table.torch):
        if "(I)" in row.source or (served and not row.python[0] <= python <= row.python[1]):
            continue
        for rocm in reversed(row.rocm):
            version = parse_version(rocm)[:2]
            allowed = version < (7, 14) and fits(targets, version) and (not m.driver or driver_allows(m, version))
            if allowed and targets and targets <= table.wheel_targets(version):
                return row, rocm
    return None


def fits(targets: set[str], rocm: Version) -> bool:
    """Leave out ROCm lines with a known defect: RDNA2 after 6.4, LoRA on gfx120x from 7.2, gfx906 from 6.4."""
    if any(t.startswith("gfx103") for t in targets) and rocm >= (7, 0):
        return False
    if any(t.startswith("gfx120") for t in targets) and rocm >= (7, 2):
        return False
    return not (targets & {"gfx900", "gfx906"} and rocm >= (6, 4))


def driver_allows(m: Machine, rocm: Version) -> bool:
    """Tell whether the loaded out-of-tree driver's published window holds a ROCm; an unknown driver forbids nothing."""
    row = load_table().driver_of(m.driver)
    return row is None or row.userspace[0] <= rocm <= row.userspace[1]


def torch_command(m: Machine) -> str:
    """The exact command that puts a fitting torch into this environment; for AMD cards with its vision and audio."""
    table, tool = load_table(), pip(m)
    if not m.has_amd:
        index = "" if m.has_nvidia else f" --index-url {table.indexes['pytorch-cpu']}"
        return f"{tool} install --force-reinstall torch{index}"
    release = table.rocm[-1]
    listed = [t for t in m.compute_targets if t in release.gfx]
    # AMD's own index where ROCm comes from pip already, under WSL, and for gfx120x: its LoRA fault is mended there.
    from_amd = bool(listed) and (m.wsl or bool(m.rocm_pip) or any(t.startswith("gfx120") for t in listed))
    choice = None if from_amd else torch_for(m)
    if choice:
        row, rocm = choice
        tag, url = f"+rocm{rocm}", table.indexes["pytorch"].format(rocm=rocm)
        versions = (("torch", row.version), ("torchvision", row.vision), ("torchaudio", row.audio))
        trio = " ".join(f'"{name}=={short(version)}.0{tag}"' for name, version in versions)
        return f"{tool} install --force-reinstall {trio} --index-url {url}"
    if not listed:
        return _nightly_command(m)
    row = next(r for r in reversed(table.torch) if short(release.version) in r.amd)
    tag, extra = f"+rocm{short(release.version)}.0", ",".join(f"device-{t}" for t in listed)
    return (
        f"{tool} install --force-reinstall --index-url {table.indexes['amd-10']} "
        f'"torch[{extra}]=={short(row.version)}.0{tag}" "torchvision[{extra}]=={short(row.vision)}.0{tag}"'
    )


def _nightly_command(m: Machine) -> str:
    """For targets that no release serves: AMD's unsupported nightlies where they have them, else the plain truth."""
    rows = [row for t in m.compute_targets if (row := load_table().gpu(t))]
    if rows and all(row.support == "community" for row in rows):
        extra = ",".join(f"device-{row.gfx}" for row in rows)
        index = load_table().indexes["amd-nightly"]
        return f'{pip(m)} install --pre --force-reinstall --index-url {index} "torch[{extra}]"   # nightly, unsupported'
    return (
        f"# no published ROCm wheel has kernels for {gpu_words(m)}; a source build is the only way"
        f" || 没有任何已发布的 ROCm wheel 含有 {gpu_words(m)} 的内核，只能从源码构建"
    )


def devel_command(m: Machine) -> str:
    """The command that installs what a build needs of the ROCm that is here."""
    if m.rocm_pip or not m.rocm_trees:
        index = load_table().indexes["amd-10" if m.rocm >= (10,) or not m.rocm else "amd-7.14"]
        version = f"=={m.dists['rocm-sdk-core'].version}" if m.rocm_pip else ""
        init = "rocm-sdk init && export ROCM_HOME=$(rocm-sdk path --root)"
        return f'{pip(m)} install --index-url {index} "rocm[libraries,devel]{version}" && {init}'
    if m.packager == "apt" and (0,) < m.rocm_system < (7, 9):
        return "sudo apt install rocm-hip-sdk rocm-dev"
    return "# install the development packages of your ROCm || 安装你的 ROCm 的开发包"


def device_command(m: Machine, gfx: str) -> str:
    """The command that adds the kernel package of one target to the torch that is installed."""
    version = m.torch.version if m.torch else ""
    index = load_table().indexes["amd-10" if m.rocm >= (10,) else "amd-7.14"]
    return f'{pip(m)} install --index-url {index} "torch[device-{gfx}]=={version}"'


def standard_values(m: Machine) -> dict[str, str]:
    """Words for the placeholders that any text may use."""
    gfx = m.compute_targets[0] if m.compute_targets else "gfxNNN"
    discrete = [str(i) for i, g in enumerate(m.reachable) if not g.integrated]
    return {
        "kernel": m.kernel or "$(uname -r)",
        "gfx": gfx,
        "gpus": gpu_words(m),
        "pip": pip(m),
        "torch": m.torch.version if m.torch else "none",
        "rocm": short(m.rocm) or "?",
        "hip": m.torch.hip if m.torch else "",
        "headers": install(m, "headers"),
        "firmware": install(m, "firmware"),
        "modules": install(m, "modules"),
        "compiler": install(m, "compiler"),
        "libstdcxx": install(m, "libstdcxx"),
        "remove_dkms": REMOVE_DKMS.get(m.packager, "# remove the amdgpu-dkms package || 移除 amdgpu-dkms 包"),
        "bootloader": _BOOTLOADER.get(m.packager, "# rebuild the boot loader's configuration || 重新生成引导配置"),
        "python_dev": install(m, "python_dev"),
        "ninja": install(m, "ninja"),
        "initramfs": _INITRAMFS.get(m.packager, "# rebuild your initramfs || 重建 initramfs"),
        "torch_command": torch_command(m),
        "rocm_devel": devel_command(m),
        "rocm_lib": f"{next(iter(m.rocm_trees), '/opt/rocm')}/lib",
        "discrete": ",".join(discrete) or "0",
        "where": "on the host, not in the container: || 在宿主机上（不是在容器里）：" if m.container else "",
        "engine": "podman" if m.container == "podman" else "docker",
    }
