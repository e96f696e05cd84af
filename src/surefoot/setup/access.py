"""Who may open the GPU's device nodes: groups and a new login on metal, the run line of a container."""

from __future__ import annotations

from shlex import quote

from surefoot.doctor.clues import RENDER, group_members, user
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Node
from surefoot.setup.lines import ready
from surefoot.setup.plan import Step
from surefoot.setup.target import Target

_EACH = "for node in /dev/kfd /dev/dri/renderD*; do"
_OPENS = ("test -c /dev/kfd", f'{_EACH} test -r "$node" && test -w "$node" || exit 1; done')
_MEMBER = f'{_EACH} id -nG "$(id -un)" | tr " " "\\n" | grep -qxF "$(stat -c %G "$node")" || exit 1; done'
_JOIN = 'sudo usermod -a -G {} "$(id -un)"'
_UDEV = (
    'KERNEL=="kfd", GROUP="render", MODE="0660"',
    'SUBSYSTEM=="drm", KERNEL=="renderD*", GROUP="render", MODE="0660"',
)


def _gpu_nodes(m: Machine) -> list[tuple[str, Node]]:
    paths = ["/dev/kfd", *(f"{RENDER}{g.render_minor}" for g in m.reachable if g.render_minor >= 0)]
    return [(path, node) for path in paths if (node := m.snapshot.node(path))]


def _opens_fact(nodes: list[tuple[str, Node]]) -> str:
    node = nodes[0][1]
    group = f"group {node.group or node.gid} ({node.gid})"
    return f"{nodes[0][0]} and {len(nodes) - 1} render node(s) open: mode {node.mode:04o}, {group}"


def _refusal(path: str, node: Node) -> str:
    group = f"group {node.group or node.gid} ({node.gid})"
    return f"{path} is mode {node.mode:04o}, {group}; opening it gives {node.open or 'nobody knows what'}"


def access_steps(m: Machine, target: Target, works: bool) -> list[Step]:
    """Plan membership of the groups that own the nodes, and the new login that makes it count.

    Args:
        m: the machine.
        target: what is planned for.
        works: whether the driver has brought the GPUs up, so that what the nodes say will last.

    Returns:
        The steps `groups` and `login`.
    """
    nodes = _gpu_nodes(m) if target.here else []
    refused = [(path, node) for path, node in nodes if node.open != "ok"]
    opens = _opens_fact(nodes) if nodes and not refused and works else ""
    names = list(dict.fromkeys(node.group or group_members(m, node.gid)[0] for _, node in refused))
    member = bool(refused) and all(user(m) and user(m) in group_members(m, node.gid)[1] for _, node in refused)
    if "root" in names:  # nobody joins root's group: the nodes get one of their own
        lines = [
            f"printf '%s\\n' {' '.join(quote(rule) for rule in _UDEV)} | "
            "sudo tee /etc/udev/rules.d/70-surefoot-amdgpu.rules > /dev/null",
            "sudo udevadm control --reload-rules",
            "sudo udevadm trigger",
            _JOIN.format("render"),
        ]
        names = ["render"]
    elif names and all(names):
        lines = [_JOIN.format(",".join(names))]
    else:
        lines = [f'{_EACH} sudo usermod -a -G "$(stat -c %G "$node")" "$(id -un)"; done']
    said = "; ".join(_refusal(path, node) for path, node in refused[:2])
    leave = [f'sudo gpasswd -d "$(id -un)" {name}' for name in names if name]
    groups = Step(
        id="groups",
        title="Join the groups that own the GPU's nodes",
        reason=said or "/dev/kfd and the render nodes are open to the groups that own them",
        commands=ready(m, lines),
        verify=(_MEMBER,),
        undo=ready(m, leave) or ('# sudo gpasswd -d "$(id -un)" GROUP',),
        needs=("reboot",),
        root=True,
        satisfied=f"/etc/group lists {user(m)} in {', '.join(names)}" if member and "root" not in names else opens,
    )
    login = Step(
        id="login",
        title="Log in anew",
        reason="a session keeps the groups that it began with",
        commands=("# end this session, log in again, and go on with: surefoot setup --resume",),
        verify=_OPENS,
        undo=("# nothing to undo",),
        needs=("groups",),
        login=True,
        minutes=1,
        satisfied=opens,
    )
    return [groups, login]


def visible(m: Machine, target: Target) -> str:
    """Numbers of the GPUs that are meant, as HIP_VISIBLE_DEVICES takes them.

    Args:
        m: the machine.
        target: what is planned for.

    Returns:
        `0,1`; empty where all GPUs are meant or the machine is another.
    """
    wanted = [str(i) for i, gpu in enumerate(m.reachable) if gpu.gfx in target.gfx]
    return ",".join(wanted) if target.here and 0 < len(wanted) < len(m.reachable) else ""


# ---- containers ----
def node_groups(m: Machine) -> tuple[int, ...]:
    """Numbers of the groups that own this machine's GPU nodes; empty where they are not known."""
    nodes = [n for p in ("/dev/kfd", *m.snapshot.glob(f"{RENDER}*")) if (n := m.snapshot.node(p))]
    return tuple(sorted({n.gid for n in nodes if n.gid > 0}))


def run_flags(m: Machine, target: Target) -> str:
    """The options that give a docker container the GPUs, groups by number since names differ inside.

    Args:
        m: the host.
        target: what is planned for.

    Returns:
        Options of `docker run`, empty for a CPU.
    """
    if target.kind == "cpu":
        return ""
    if target.kind == "cuda":
        return "--gpus all --ipc=host"
    if m.wsl:
        return "--device=/dev/dxg -v /usr/lib/wsl:/usr/lib/wsl --security-opt seccomp=unconfined --ipc=host"
    numbers = [str(gid) for gid in node_groups(m)] if target.here else []
    groups = numbers or ['"$(stat -c %g /dev/kfd)"', '"$(stat -c %g /dev/dri/renderD128)"']
    added = " ".join(f"--group-add {group}" for group in groups)
    added += f" -e HIP_VISIBLE_DEVICES={shown}" if (shown := visible(m, target)) else ""
    return f"--device=/dev/kfd --device=/dev/dri {added} --security-opt seccomp=unconfined --ipc=host"


def container_step(m: Machine, target: Target) -> Step:
    """Plan how this container comes to its GPU, which nothing inside it can change.

    Args:
        m: the machine, a container.
        target: what is planned for.

    Returns:
        The step `groups`: satisfied, or one that says how to start the container and fails.
    """
    nodes = _gpu_nodes(m)
    fine = bool(nodes) and all(node.open == "ok" for _, node in nodes) and target.here
    gids = [str(gid) for gid in node_groups(m) if gid != 65534]  # nobody's: a user name space hides the true one
    unknown = "GID (on the host: stat -c %g /dev/kfd)"
    if m.container == "k8s":
        told = f"the pod needs amd.com/gpu and securityContext.supplementalGroups [{', '.join(gids) or unknown}]"
    elif m.container == "apptainer":
        told = "start apptainer with --rocm, as a user who is in the group that owns /dev/kfd on the host"
    else:
        added = " ".join(f"--group-add {gid}" for gid in gids or [unknown])
        added = "--group-add keep-groups" if m.container == "podman" else added
        told = (
            f"start this container with --device=/dev/kfd --device=/dev/dri {added} --security-opt seccomp=unconfined"
        )
    return Step(
        id="groups",
        title="Have this container given the GPU",
        reason=f"this is a {m.container} container: nodes and groups come with its start, the groups by number",
        commands=(f"echo {quote(told)} >&2", "exit 1"),
        verify=_OPENS,
        undo=("# nothing was changed",),
        satisfied=_opens_fact(nodes) if fine else "",
    )
