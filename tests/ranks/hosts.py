"""Two hosts on one machine: network namespaces with a lossy link between them, and a host name for each.

The kernel here has no netem, so the link is a small program between two TUN devices: it passes each IP packet on after
a delay and drops some by lot. What is lost is lost for the kernels' TCP, which has to send it again, as over a cable.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

IP = "/usr/sbin/ip"
TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
LARGEST = 65536  # bytes of an IP packet


@dataclass
class Link:
    """What goes over the wire between two hosts.

    Attributes:
        delay: seconds that a packet takes, each way.
        loss: share of packets that are dropped, each way.
        ends: open TUN devices of both hosts.
        passed: packets that came through.
        lost: packets that did not.
    """

    delay: float
    loss: float
    ends: tuple[int, int]
    passed: int = 0
    lost: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Pass packets on until the link is closed."""
        lot = random.Random(7)
        under_way: list[tuple[float, int, int, bytes]] = []
        while not self._over.is_set():
            wait = 0.05 if not under_way else min(0.05, max(0.0, under_way[0][0] - time.monotonic()))
            for end in select.select(self.ends, [], [], wait)[0]:
                packet = os.read(end, LARGEST)
                if lot.random() < self.loss:
                    self.lost += 1
                    continue
                self.passed += 1
                other = self.ends[1 - self.ends.index(end)]
                heapq.heappush(under_way, (time.monotonic() + self.delay, self.passed, other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # the other host is being taken down
                    os.write(under_way[0][2], under_way[0][3])
                heapq.heappop(under_way)

    def close(self) -> None:
        """End `run`."""
        self._over.set()


@dataclass(frozen=True)
class Host:
    """A network namespace that commands run in, with a host name of its own.

    Attributes:
        name: of the host.
        address: on the link.
        namespace: as `ip netns` knows it.
    """

    name: str
    address: str
    namespace: str

    def start(self, command: Sequence[str], env: Mapping[str, str], **more: object) -> subprocess.Popen[str]:
        """Start a program on this host."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh", *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | more
        return subprocess.Popen([IP, "netns", "exec", self.namespace, *named], env=dict(env), text=True, **pipes)  # type: ignore[call-overload]


def why_not() -> str:
    """Say what this machine lacks for two hosts; empty when it lacks nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path(IP).exists() or not TUN.exists():
        return f"{IP} and {TUN} are needed"
    tried = subprocess.run([IP, "netns", "add", f"try{os.getpid()}"], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        _ip("netns", "del", f"try{os.getpid()}")
    return tried.stderr.strip()


@contextlib.contextmanager
def two_hosts(*, delay: float = 0.02, loss: float = 0.01) -> Iterator[tuple[Host, Host, Link]]:
    """Set two hosts and the link between them up, and take them down again.

    Args:
        delay: seconds, each way.
        loss: share of packets, each way.

    Yields:
        Both hosts and the link.
    """
    hosts = [Host(f"host{n}", f"10.77.0.{n + 1}", f"sf{os.getpid()}h{n}") for n in range(2)]
    made: list[Host] = []
    ends: list[int] = []
    thread: threading.Thread | None = None
    try:
        for number, host in enumerate(hosts):
            _ip("netns", "add", host.namespace)
            made.append(host)
            device = f"sft{os.getpid() % 100000}{number}"
            ends.append(os.open(TUN, os.O_RDWR))
            fcntl.ioctl(ends[-1], TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
            _ip("link", "set", device, "netns", host.namespace, "name", "eth7")
            for words in (["link", "set", "lo", "up"], ["addr", "add", f"{host.address}/24", "dev", "eth7"],
                          ["link", "set", "eth7", "mtu", "1400", "up"]):  # fmt: skip
                _ip("-n", host.namespace, *words)
        link = Link(delay, loss, (ends[0], ends[1]))
        thread = threading.Thread(target=link.run)
        thread.start()
        yield hosts[0], hosts[1], link
    finally:
        if thread is not None:
            link.close()
            thread.join()
        for end in ends:
            os.close(end)
        for host in made:
            _ip("netns", "del", host.namespace)


def _ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True, capture_output=True)
