"""Which network interface the processes of several machines talk over.

gloo binds to whatever the machine's own name resolves to, which is 127.0.1.1 on Debian and Ubuntu and nothing at all in
many containers: processes on other machines then cannot reach it. The interface that leads to MASTER_ADDR can.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping, Sequence
from ipaddress import ip_address

from surefoot.errors import UserError

OUTSIDE = "192.0.2.1"  # an address that is kept for documentation (RFC 5737); nothing is sent to it


def tie_to_network(environ: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to MASTER_ADDR, unless a person has set it.

    Args:
        environ: of this process; a run of one process is left alone.

    Raises:
        UserError: MASTER_ADDR is not known here, or a variable names an interface that is not there.
    """
    if environ.get("WORLD_SIZE", "1") == "1":
        return
    found = interfaces()
    check_names(environ, list(found))
    if "GLOO_SOCKET_IFNAME" in environ or "MASTER_ADDR" not in environ:
        return
    own = own_address(environ["MASTER_ADDR"])
    if ip_address(own).is_loopback and environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"]) != environ["WORLD_SIZE"]:
        # The machine's own name is MASTER_ADDR, and /etc/hosts has a loopback address for it: others know it by the
        # address on the way to the outside. No route there leaves gloo to its own choice.
        try:
            own = own_address(OUTSIDE)
        except UserError:
            return
    name = next((name for name, addresses in found.items() if own in addresses), None)
    if name is not None:
        environ["GLOO_SOCKET_IFNAME"] = name


def interfaces() -> dict[str, list[str]]:
    """List this machine's network interfaces that are up, with their IP addresses."""
    import psutil

    up = psutil.net_if_stats()
    return {
        name: [entry.address.partition("%")[0] for entry in entries]
        for name, entries in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }


def own_address(master: str) -> str:
    """Return the address of this machine that its packets to another one carry; nothing is sent.

    Args:
        master: name or address of the other one.

    Returns:
        The address.

    Raises:
        UserError: the name is not known, or no route leads there.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR is {master}, which {socket.gethostname()} cannot reach: {error.strerror or error}",
            hint="it must be the name or address of the machine with NODE_RANK 0, as all the others know it",
        ) from error


def check_names(environ: Mapping[str, str], names: Sequence[str]) -> None:
    """Make sure that the interfaces which variables name are there: gloo wants whole names, NCCL their beginnings.

    Args:
        environ: of this process.
        names: of the interfaces.

    Raises:
        UserError: one is not.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        wanted = [name for name in value.split(",") if name]
        if variable.startswith("GLOO"):
            missing = [name for name in wanted if name not in names]
        elif value.startswith("^") or not wanted:  # all but these
            continue
        elif value.startswith("="):
            wanted = [name.removeprefix("=") for name in wanted]
            missing = wanted if not set(wanted) & set(names) else []
        else:
            missing = wanted if not any(name.startswith(tuple(wanted)) for name in names) else []
        if missing:
            raise UserError(
                f"{variable} is {value}, and {socket.gethostname()} has no {', '.join(missing)}: "
                f"its interfaces are {', '.join(names)}",
                hint=f"unset {variable}, or name the interface that leads to MASTER_ADDR",
            )
