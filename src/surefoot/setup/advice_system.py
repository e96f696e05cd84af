"""What is said of a tutorial's tools, groups, device nodes, drivers and containers, for one machine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from surefoot.machine.facts import Machine
from surefoot.machine.gfx import is_gfx
from surefoot.machine.table import load_table
from surefoot.machine.versions import short
from surefoot.setup.advice_rules import OUTDATED, RIGHT, WRONG, Context, Ruling, rule
from surefoot.setup.tutorial import Piece


def tool(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge commands that look at the machine."""
    name = piece.words[0].rpartition("/")[2]
    if name in ("rocm-smi", "amd-smi", "rocminfo", "rocm-bandwidth-test", "hipconfig"):
        if not c.amd:
            yield from rule("no-amd", WRONG, what=name)
        elif name == "rocm-smi":
            gone = c.m.rocm >= (10, 1)
            yield from rule("rocm-smi-gone" if gone else "rocm-smi", OUTDATED, rocm=short(c.m.rocm) or "?")
        elif name in ("amd-smi", "rocminfo"):
            yield from rule(name, RIGHT)
    elif is_gfx(name) and piece.words == (name,):
        yield from rule("arch-unquoted", WRONG)
    elif name in ("nvidia-smi", "nvcc"):
        yield from rule("nvidia-tool", RIGHT if c.side == "nvidia" else WRONG, what=name)


def groups(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge joining the groups of the GPU's nodes, and opening the nodes to everybody."""
    words = piece.words
    if words[0] == "chmod" and re.search(r"/dev/(kfd|dri)", piece.text):
        yield from rule("chmod", WRONG, owner=_owner(c.m) or "render")
        return
    named = {g for word in words[1:] for g in re.split(r"[,\s]", word)} & {"video", "render"}
    if words[0] not in ("usermod", "adduser", "gpasswd") or not named:
        return
    owner = _owner(c.m)
    values = {"named": ",".join(sorted(named)), "owner": owner or "render"}
    flags = "".join(w for w in words[1:] if re.fullmatch(r"-\w+", w))
    if not c.amd:
        yield Ruling("no-amd", WRONG, {"what": "video/render"})
    elif c.m.wsl:
        yield Ruling("groups-wsl", WRONG, values)
    elif c.m.container:
        yield Ruling("groups-container", WRONG, values | {"flag": _group_flag(c.m)})
    elif words[0] == "usermod" and "a" not in flags and "--append" not in words:
        yield Ruling("groups-replace", WRONG, values)
    elif owner in ("video", "render") and owner not in named:
        yield Ruling("groups-owner", WRONG, values)
    else:
        later = [p for p in c.pieces if p.line > piece.line]
        anew = any(re.match(r"(newgrp|reboot|logout|exit|su\b|shutdown|systemctl reboot)", p.text) for p in later)
        member = bool((node := c.m.snapshot.node("/dev/kfd")) and c.m.groups and node.gid in c.m.groups)
        yield Ruling("groups-member" if member else "groups-login" if anew else "groups", RIGHT, values)


def _owner(m: Machine) -> str:
    node = m.snapshot.node("/dev/kfd")
    return node.group if node else ""


def _group_flag(m: Machine) -> str:
    rootless = m.container == "podman" and m.snapshot.text("/proc/self/uid_map").split()[:2] != ["0", "0"]
    return "--group-add keep-groups" if rootless else "--group-add $(stat -c %g /dev/kfd)"


def driver(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge installing AMD's kernel driver or a system-wide ROCm."""
    words, m = piece.words, c.m
    tools = {"apt": "apt", "apt-get": "apt", "dnf": "dnf", "yum": "dnf", "zypper": "zypper", "pacman": "pacman"}
    if words[0] == "amdgpu-install":
        dkms, rocm = "--no-dkms" not in words, any("rocm" in w or "hip" in w for w in words)
    elif words[0] in tools and {"install", "-S", "in"} & set(words):
        dkms = any(re.match(r"amdgpu(-dkms)?$|amdgpu-dkms", w) for w in words)
        rocm = any(re.match(r"(rocm|amdrocm|hip-runtime|rocm-hip)[\w.+-]*$", w) for w in words[1:])
    else:
        return
    values = {"driver": short(m.driver, 3), "kernel": m.kernel, "window": _window(m), "packager": m.packager}
    if not (dkms or rocm):
        return
    if not c.amd:
        yield Ruling("no-amd", WRONG, {"what": "amdgpu-dkms" if dkms else "ROCm"})
    elif m.packager and tools.get(words[0], m.packager) != m.packager:
        yield Ruling("packager", WRONG, values | {"what": words[0]})
    else:
        yield from [_dkms(m, values)] if dkms else []
        yield from [Ruling("system-rocm", OUTDATED, values)] if rocm else []


def _dkms(m: Machine, values: dict[str, str]) -> Ruling:
    if m.wsl:
        return Ruling("driver-wsl", WRONG, values)
    if m.container:
        return Ruling("driver-container", WRONG, values)
    if m.compute_targets and all((row := load_table().gpu(t)) and row.integrated for t in m.compute_targets):
        return Ruling("driver-apu", WRONG, values)
    if m.inbox:
        return Ruling("driver-inbox", OUTDATED, values)
    return Ruling("driver-window" if values["window"] else "driver", RIGHT, values)


def _window(m: Machine) -> str:
    row = load_table().driver_of(m.driver) if m.driver else None
    return f"{row.stream}: ROCm {short(row.userspace[0])} – {short(row.userspace[1])}" if row else ""


def container(piece: Piece, c: Context) -> Iterator[Ruling]:
    """Judge `docker run` and `podman run`."""
    if piece.words[0] not in ("docker", "podman") or "run" not in piece.words:
        return
    text = piece.text
    kfd, wants_nvidia = "/dev/kfd" in text, "--gpus" in text or "--runtime=nvidia" in text
    if c.amd and wants_nvidia:
        yield from rule("run-nvidia-flag", WRONG)
    elif not c.amd and kfd:
        yield from rule("no-amd", WRONG, what="/dev/kfd")
    elif c.side == "nvidia" and wants_nvidia:
        yield from rule("run-gpus", RIGHT)
    elif not c.amd or not (kfd or "rocm" in text):
        return
    elif c.m.wsl:
        yield from rule("run-wsl", RIGHT if "/dev/dxg" in text else WRONG)
    elif not (kfd and "/dev/dri" in text) and "--privileged" not in text:
        yield from rule("run-devices", WRONG)
    elif "--privileged" in text:
        yield from rule("run-privileged", OUTDATED)
    elif re.search(r"--group-add[= ](video|render)\b", text) or "--group-add" not in text:
        yield from rule("run-groups", OUTDATED)
    else:
        yield from rule("run-right", RIGHT)
