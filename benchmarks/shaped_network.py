"""A network namespace for each rank, joined by links of a chosen rate; for benchmarks on one machine. Needs root.

    with shaped_network(2, rate_mbit=1000) as places:
        run_processes(rank_main, 2, args=(places,), backend=None)

    def rank_main(rank, size, places):
        places[rank].enter()        # before the process group is made
        dist.init_process_group(...)

Every pair of ranks has a link (a veth pair) of its own, and each direction of it a token bucket of its own, so that
no transfer takes another link's bandwidth. Nothing outside the namespaces is changed.

Namespaces are removed when the benchmark ends, also by SIGTERM. Their names have the process id of the benchmark. If a
benchmark is killed, the next one removes its namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from benchmarks.report import BenchmarkError

_CLONE_NEWNET = 0x40000000
_NAME = re.compile(r"mpp(\d+)_\d+")
# Jumbo frames, as clusters have; with frames of 1500 bytes, shaping keeps two cores busy from 1 Gbit/s on.
_MTU_BYTES = 9000
_TCP = {
    # The limit of a connection's queue at a link, about that of a network card's driver. With Linux's 1 to 4 MB all
    # later packets, also acknowledgements of the other direction, would wait for 20 to 80 ms at 400 Mbit/s.
    "tcp_limit_output_bytes": 128 * 1024,
    # Engines take turns, so an engine's connections are idle for seconds between two of its steps, unlike in training.
    # By default TCP would start slowly each time, but only for engines that have connections of their own.
    "tcp_slow_start_after_idle": 0,
}
_BURST_BYTES = 32 * 1024  # small, because short messages would pass unshaped; at least one segment of the loopback


@dataclass(frozen=True)
class Place:
    namespace: str
    interface: str
    address: str

    def enter(self) -> None:
        """Move this process into the namespace, and let gloo use its interface. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{self.namespace}") as handle:
            if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {self.namespace}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


@contextlib.contextmanager
def shaped_network(size: int, rate_mbit: float) -> Iterator[list[Place]]:
    """A context with the namespaces and links, which it removes at its end. ``rate_mbit`` holds for each direction of
    each link. Raises BenchmarkError if the process may not make them, or if ip, tc or sysctl is missing."""
    for tool in ("ip", "tc", "sysctl"):
        if shutil.which(tool) is None:
            raise BenchmarkError(f"a shaped link needs the command `{tool}` (packages iproute2, procps)")
    if os.geteuid() != 0:
        raise BenchmarkError("a shaped link needs root, to make network namespaces; run this subcommand as root")
    remove_orphans()
    prefix = f"mpp{os.getpid()}"
    places = [Place(f"{prefix}_{rank}", f"v{rank}_{(rank + 1) % size}", f"10.77.0.{rank + 1}") for rank in range(size)]
    with sigterm_unwinds():
        try:
            _make(places, rate_mbit)
            yield places
        finally:
            for place in places:
                _remove(place.namespace)


def remove_orphans() -> list[str]:
    """Remove the namespaces of benchmarks that have ended. Returns their names."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    found = [match for line in listed.splitlines() if (match := _NAME.fullmatch(line.split()[0]))]
    orphans = [match[0] for match in found if not os.path.exists(f"/proc/{match[1]}")]
    for name in orphans:
        _remove(name)
    return orphans


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """In this context SIGTERM raises an exception, so that every ``finally`` runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def _make(places: list[Place], rate_mbit: float) -> None:
    for place in places:
        _run(f"ip netns add {place.namespace}")
        _run(f"ip -n {place.namespace} link set lo up")
        for name, value in _TCP.items():
            _run(f"ip netns exec {place.namespace} sysctl -q -w net.ipv4.{name}={value}")
    for first in range(len(places)):
        for second in range(first + 1, len(places)):
            _connect(places, first, second, rate_mbit)
    for here, place in enumerate(places):
        for there, other in enumerate(places):
            if here != there:
                route = f"route add {other.address}/32 dev v{here}_{there} src {place.address}"
                _run(f"ip -n {place.namespace} {route}")


def _connect(places: list[Place], first: int, second: int, rate_mbit: float) -> None:
    ends = [
        f"name v{x}_{y} mtu {_MTU_BYTES} netns {places[x].namespace}" for x, y in ((first, second), (second, first))
    ]
    _run(f"ip link add {ends[0]} type veth peer {ends[1]}")
    for here, there in ((first, second), (second, first)):
        name, end = places[here].namespace, f"v{here}_{there}"
        if end == places[here].interface:
            _run(f"ip -n {name} addr add {places[here].address}/32 dev {end}")
        _run(f"ip -n {name} link set {end} up")
        _run(f"tc -n {name} qdisc add dev {end} root {_bucket(rate_mbit)}")


def _bucket(rate_mbit: float) -> str:
    return f"tbf rate {rate_mbit:g}mbit burst {_BURST_BYTES} latency 200ms"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchmarkError(f"`{command}` failed: {done.stderr.strip()}")
