"""Two "hosts" on one machine: network namespaces, connected by a virtual cable that can be cut. Needs Linux and root.

    with two_hosts() as (left, right, cable):
        subprocess.Popen(left.command("scripts/launch_multinode.sh"), ...)
        cable.cut()

Outside the namespaces only a file in ``/etc/netns`` is changed, which sets their name service. A process that waits for
this process to close a pipe removes the namespaces. So they, and all programs in them, end even if this process is
killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLEAN_UP = """
cat > /dev/null
for name in "$@"; do
    ip netns pids "$name" 2> /dev/null | xargs -r kill -9
    ip netns del "$name" 2> /dev/null
    rm -rf "/etc/netns/$name"
done
"""


_NAMES = Path("/etc/netns")  # ``ip netns exec`` shows its files instead of those in /etc


class NamespaceError(RuntimeError):
    """A namespace or a link cannot be made."""


@dataclass(frozen=True)
class Host:
    """A namespace, the interface at its end of the cable, and the interface's address."""

    namespace: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The words that run ``command`` on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]


@dataclass(frozen=True)
class Cable:
    """The cable between the hosts. ``end`` is the host at which it is cut."""

    end: Host

    def cut(self) -> None:
        """Cut the cable."""
        _run(f"ip -n {self.end.namespace} link set {self.end.interface} down")

    def restore(self) -> None:
        """Connect the cable again."""
        _run(f"ip -n {self.end.namespace} link set {self.end.interface} up")


def why_not() -> str:
    """Why this machine cannot make namespaces; empty if it can."""
    if shutil.which("ip") is None:
        return "needs the command ip (package iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = _new_name()
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"may not make network namespaces: {tried.stderr.strip()}" if tried.returncode != 0 else ""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host, Cable]]:
    """A context with two hosts and the cable. At its end they, and all programs in them, are removed. Raises
    NamespaceError."""
    name = _new_name()
    left = Host(f"{name}_a", "cable", "10.77.0.1")
    right = Host(f"{name}_b", "cable", "10.77.0.2")
    names = (left.namespace, right.namespace)
    cleaner = subprocess.Popen(
        ["sh", "-c", _CLEAN_UP, "clean_up", *names], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        for host in (left, right):
            _run(f"ip netns add {host.namespace}")
            _run(f"ip -n {host.namespace} link set lo up")
            # c10d looks up its peers' names. The usual name service cannot be reached, so this one refuses at once.
            (_NAMES / host.namespace).mkdir(parents=True)
            (_NAMES / host.namespace / "resolv.conf").write_text("nameserver 127.0.0.1\noptions attempts:1\n")
        _run(
            f"ip link add {left.interface} netns {left.namespace} type veth "
            f"peer name {right.interface} netns {right.namespace}"
        )
        for host in (left, right):
            _run(f"ip -n {host.namespace} address add {host.address}/24 dev {host.interface}")
            _run(f"ip -n {host.namespace} link set {host.interface} up")
        yield left, right, Cable(right)
    finally:
        assert cleaner.stdin is not None
        cleaner.stdin.close()
        cleaner.wait()


def _new_name() -> str:
    return f"mpp_{uuid.uuid4().hex[:8]}"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode != 0:
        raise NamespaceError(f"`{command}` failed: {done.stderr.strip()}")
