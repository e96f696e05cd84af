"""B. Access, containers, WSL (F20 to F34)."""

from __future__ import annotations

import re

from surefoot.doctor.clues import RENDER, amd_context, denied, group_members, is_rocm, kfd_open, line, quote, said, user
from surefoot.doctor.finding import Hit, hit, seen
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Node, as_int


def f20(m: Machine) -> Hit | None:
    """A container that was not given the GPU's device nodes."""
    if not m.container or not amd_context(m) or m.container == "gvisor":
        return None
    if m.wsl or m.snapshot.present("/dev/dxg"):
        if m.snapshot.absent("/dev/dxg"):
            return hit(
                "/dev/dxg is not there", f"this is a {m.container} container under WSL", device="--device /dev/dxg"
            )
        return None
    missing = [p for p in ("/dev/kfd", "/dev/dri") if m.snapshot.absent(p)]
    if not missing and m.kfd and not m.reachable:
        missing = [f"{RENDER}{m.kfd[0].render_minor}"]
    if not missing:
        return None
    nodes = f"/sys shows {len(m.kfd)} GPU(s) of the host" if m.kfd else ""
    return hit(
        *(f"{p} is not there" for p in missing),
        f"this is a {m.container} container",
        nodes,
        device="--device /dev/kfd --device /dev/dri",
    )


def _who(m: Machine, node: Node) -> tuple[bool, bool]:
    """Whether the node's group is among the process's groups, and whether the group file lists the user in it."""
    _, members = group_members(m, node.gid)
    in_process = m.groups is not None and node.gid in m.groups
    in_file = bool(user(m)) and user(m) in members
    return in_process, in_file


def _describe(path: str, node: Node) -> str:
    group = node.group or str(node.gid)
    return f"{path} is mode {node.mode:04o}, group {group} ({node.gid}); opening it gives {node.open}"


def _userns(m: Machine) -> bool:
    text = m.snapshot.text("/proc/self/uid_map").split()
    return len(text) >= 3 and not (text[0] == "0" and text[1] == "0" and as_int(text[2]) >= 4294967295)


def _guarded(m: Machine) -> bool:
    """Whether a security module is known to be at work."""
    enforcing = m.snapshot.command("getenforce")
    return bool(enforcing and "Enforcing" in enforcing.out) or bool(m.kernel_said(r"avc:\s+denied|apparmor=\"DENIED\""))


def _kind_of_denial(m: Machine) -> tuple[str, list[tuple[str, Node]]]:
    """Sort an EACCES into the one rule that explains it."""
    refused = denied(m, "EACCES")
    if not refused:
        return "", []
    node = refused[0][1]
    in_process, in_file = _who(m, node)
    grants = node.mode & 0o006 == 0o006 or (in_process and node.mode & 0o060 == 0o060) or m.root
    if _userns(m) and m.container:
        return "f26", refused
    if grants and m.groups is not None and (m.root or kfd_open(m) != "ok" or _guarded(m)):
        return "f117", refused  # mode bits allow it, so something else refuses
    if kfd_open(m) == "ok":
        return "f23", refused
    if (
        m.container
        and m.groups is not None
        and len(m.groups - {as_int(m.snapshot.section("process").get("gid"), -1)}) > 0
    ):
        return "f24", refused
    if in_file and not in_process and m.groups is not None:
        return "f22", refused
    return "f21", refused


def _groups_words(m: Machine) -> str:
    return f"this process's groups: {', '.join(str(g) for g in sorted(m.groups or []))}" if m.groups is not None else ""


def _access_hit(m: Machine, which: str) -> Hit | None:
    kind, refused = _kind_of_denial(m)
    if kind != which:
        return None
    node = refused[0][1]
    name = node.group or group_members(m, node.gid)[0]
    numbers = sorted({n.gid for _, n in refused})
    flags = " ".join(f"--group-add {g}" for g in numbers)
    names = ",".join(sorted({n.group for _, n in refused if n.group})) or name or "render"
    return hit(
        *(_describe(p, n) for p, n in refused[:3]), _groups_words(m),
        group=name or str(node.gid), groups=names, gid=str(node.gid), flags=flags, path=refused[0][0],
    )  # fmt: skip


def _told_denied(m: Machine) -> str:
    """What a program said of a refused /dev/kfd, where nobody tried to open it here."""
    if kfd_open(m) not in ("", "EACCES") or _kind_of_denial(m)[0]:
        return ""
    return said(m, r"Unable to open /dev/kfd read-write: Permission denied|not member of .?(render|video).? group")


def _old_session(m: Machine) -> bool:
    """Whether the group file lists the user for /dev/kfd while this process lacks the group."""
    node = m.snapshot.node("/dev/kfd")
    in_process, in_file = _who(m, node) if node else (False, False)
    return in_file and not in_process and m.groups is not None and not m.container


def _pod_fix(found: Hit) -> tuple[str, ...]:
    return (
        "# in the pod's spec: || 在 Pod 的 spec 中：",
        f"# securityContext: {{supplementalGroups: [{found.values['gid']}]}}",
    )


def f21(m: Machine) -> Hit | None:
    """The user is in no group that may open the GPU's nodes."""
    found = _access_hit(m, "f21")
    if found and m.container == "k8s":
        return Hit(found.evidence, found.values, fix=_pod_fix(found))
    if found and m.container:
        flags = found.values["flags"]
        return Hit(
            found.evidence,
            found.values,
            fix=(
                f"docker run ... {flags}",
                "# take the numbers from this host: stat -c %g /dev/kfd || 数字取自本机：stat -c %g /dev/kfd",
            ),
        )
    if not found and (text := _told_denied(m)) and not _old_session(m):
        return seen(text, group="render", groups="render,video", path="/dev/kfd")
    return found


def f22(m: Machine) -> Hit | None:
    """The group file already lists the user, but this session is older."""
    found = _access_hit(m, "f22")
    node = m.snapshot.node("/dev/kfd")
    if not found and node and (text := _told_denied(m)) and _old_session(m):
        name = node.group or str(node.gid)
        found = seen(text, _groups_words(m), group=name, groups=name, gid=str(node.gid), path="/dev/kfd")
    if not found:
        return None
    name, members = group_members(m, int(found.values["gid"]))
    return Hit((*found.evidence, f"/etc/group: {name} has {', '.join(members)}"), found.values, seen=found.seen)


def f23(m: Machine) -> Hit | None:
    """Only a render node cannot be opened, which makes ROCm drop every GPU."""
    return _access_hit(m, "f23")


def f24(m: Machine) -> Hit | None:
    """Group numbers inside the container are not the host's."""
    found = _access_hit(m, "f24")
    if not found:
        return None
    names = [
        f"/etc/group: {x}" for x in m.snapshot.text("/etc/group").splitlines() if x.startswith(("render:", "video:"))
    ]
    if m.container == "k8s":
        return Hit((*found.evidence, *names), found.values, fix=_pod_fix(found))
    return Hit((*found.evidence, *names), found.values)


def f25(m: Machine) -> Hit | None:
    """The device cgroup forbids the nodes."""
    refused = denied(m, "EPERM")
    some_open = kfd_open(m) == "ok" and any(m.snapshot.node(f"{RENDER}{g.render_minor}") for g in m.reachable)
    if refused and some_open and not any(f"{RENDER}{g.render_minor}" in dict(refused) for g in m.reachable):
        return None  # a share of the GPUs was given, which F27 judges
    if refused:
        return hit(
            *(_describe(p, n) for p, n in refused[:3]), f"this is a {m.container} container" if m.container else ""
        )
    text = said(m, r"amdgpu_get_auth \(\d+\) failed \(-1\)|renderD\d+.*(EPERM|Operation not permitted)")
    return seen(text) if text else None


def f26(m: Machine) -> Hit | None:
    """A rootless container dropped the user's groups."""
    found = _access_hit(m, "f26")
    return Hit((*found.evidence, quote(m, "/proc/self/uid_map")), found.values) if found else None


def f27(m: Machine) -> Hit | None:
    """Fewer GPUs can be used than the machine has."""
    given, all_of_them = len(m.reachable), len(m.kfd)
    if given == 0 or given == all_of_them:
        return None
    shares = m.container in ("k8s", "apptainer") or any(m.env(n) for n in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))
    ranks = max(as_int(m.env("LOCAL_WORLD_SIZE")), as_int(m.env("SLURM_NTASKS_PER_NODE")))
    text = m.log_said(r"invalid device ordinal|hipErrorInvalidDevice\b")
    if shares and not (text or ranks > given):
        return None
    kept_away = [f"{RENDER}{g.render_minor}" for g in m.kfd if g not in m.reachable]
    missing = [p for p in kept_away if m.snapshot.absent(p)]
    forbidden = [p for p in kept_away if p not in missing]
    evidence = (
        f"KFD lists {all_of_them} GPUs, {given} of them have a render node here",
        f"not there: {', '.join(missing[:8])}" if missing else "",
        f"opening gives EPERM: {', '.join(forbidden[:8])}" if forbidden else "",
    )
    extra = f"{ranks} ranks are started on this node" if ranks > given else ""
    return seen(*evidence, f"log: {text}") if text else hit(*evidence, extra)


def _shm_size(m: Machine) -> int:
    """Bytes that /dev/shm is limited to; 0 when it is not, or nobody could look."""
    size = re.search(r"^\S+ /dev/shm \S+ \S*\bsize=(\d{1,15})([kKmMgG]?)\b", m.snapshot.text("/proc/mounts"), re.M)
    return int(size.group(1)) << {"": 0, "k": 10, "m": 20, "g": 30}[size.group(2).lower()] if size else 0


def f28(m: Machine) -> Hit | None:
    """Too little shared memory for data loader workers and RCCL."""
    text = m.log_said(
        r"DataLoader worker .*killed by signal: Bus error|"
        r"DataLoader worker[^\n]*exited unexpectedly[^\0]{0,400}Bus error|"
        r"Error while creating shared memory segment|insufficient shared memory|shm_open.*No space left|"
        r"/dev/shm/\S* .*No space left"
    )
    size = _shm_size(m)
    small = 0 < size <= 64 << 20
    words = f"/dev/shm holds {size >> 20} MiB" if size else ""
    if text and (small or not size):
        return seen(f"log: {text}", words)
    if small and m.container and m.torch and m.torch.flavour != "cpu":
        return hit(words, f"this is a {m.container} container")
    return None


def f29(m: Machine) -> Hit | None:
    """The container's seccomp filter forbids memory placement."""
    text = said(m, r"(set_mempolicy|move_pages|mbind|get_mempolicy).{0,60}(not permitted|EPERM)")
    filtered = as_int(m.snapshot.section("process").get("seccomp"), -1) == 2
    if not m.container or not amd_context(m) or not (text or filtered) or (m.container == "k8s" and not text):
        return None
    evidence = ("/proc/self/status: Seccomp: 2" if filtered else "", f"this is a {m.container} container")
    return seen(text, *evidence) if text else hit(*evidence)


def _dxg_works(m: Machine) -> bool:
    return m.wsl and bool(m.rocminfo_targets)


def f30(m: Machine) -> Hit | None:
    """Under WSL, torch's own HSA runtime cannot talk to Windows' driver."""
    libs = m.python.get("torch") if isinstance(m.python.get("torch"), dict) else {}
    names = libs.get("libs") if isinstance(libs, dict) else None
    bundled = (
        [n for n in names if isinstance(n, str) and n.startswith("libhsa-runtime64")] if isinstance(names, list) else []
    )
    if not m.wsl or not bundled or not is_rocm(m):
        return None
    text = m.log_said(r"hipErrorNoDevice|No HIP GPUs are available|is_available.*False")
    evidence = (
        f"torch/lib has its own {bundled[0]}",
        f"the kernel is {m.kernel}",
        "rocminfo sees the GPU" if _dxg_works(m) else "",
    )
    return seen(*evidence, f"log: {text}") if text else hit(*evidence)


def f31(m: Machine) -> Hit | None:
    """Under WSL, detection of Windows' driver is switched off."""
    if not m.wsl or m.has_nvidia or not amd_context(m) or _dxg_works(m) or m.snapshot.absent("/dev/dxg"):
        return None
    value, rocm = m.env("HSA_ENABLE_DXG_DETECTION"), m.rocm_system or m.rocm
    if value == "0":
        return hit("HSA_ENABLE_DXG_DETECTION=0")
    if value != "1" and rocm and (7, 0) <= rocm[:2] < (7, 13) and m.snapshot.has("env"):
        return hit(
            "HSA_ENABLE_DXG_DETECTION is not set",
            f"ROCm {line(rocm)} looks for Windows' driver only when told to (automatic from 7.13)",
        )
    return None


def f32(m: Machine) -> Hit | None:
    """Under WSL, Windows' driver or Windows itself is not one that ROCm supports."""
    if not m.wsl:
        return None
    text = said(m, r"thunk_proxy.*Assertion|STATUS_SUCCESS.*failed|HSA_STATUS_ERROR_OUT_OF_RESOURCES|\b0x1008\b")
    return seen(text) if text else None


def f33(m: Machine) -> Hit | None:
    """The WSL runtime package does not exist for this ROCm."""
    text = m.log_said(
        r"Unable to locate package hsa-runtime-rocr4wsl-amdgpu|hsa-runtime-rocr4wsl-amdgpu.*(no "
        r"installation candidate|not found)"
    )
    return seen(f"log: {text}") if text else None


def f34(m: Machine) -> Hit | None:
    """A sandbox between this process and the device."""
    invalid = [*denied(m, "EINVAL"), *denied(m, "ENOTTY"), *denied(m, "ENXIO")]
    text = said(m, r"/dev/kfd.*Invalid argument")
    if not invalid and not text:
        return None
    kind = f"the sandbox is {m.sandbox}" if m.sandbox else (f"this is a {m.container} container" if m.container else "")
    evidence = (*(_describe(p, n) for p, n in invalid[:2]), kind)
    return seen(text, *evidence) if text else hit(*evidence)


def f117(m: Machine) -> Hit | None:
    """Mode bits and groups allow it, yet opening is refused: a security module."""
    found = _access_hit(m, "f117")
    if not found:
        return None
    enforcing = m.snapshot.command("getenforce")
    avc = m.kernel_said(r"avc:\s+denied.*(kfd|renderD|dri)|apparmor=\"DENIED\".*(kfd|renderD|dri)")
    evidence = (
        *found.evidence,
        "getenforce: Enforcing" if enforcing and "Enforcing" in enforcing.out else "",
        f"dmesg: {avc}" if avc else "",
    )
    return Hit(tuple(e for e in evidence if e), found.values, seen=bool(avc))
