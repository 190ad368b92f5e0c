"""torch's stores that listen on the address that is given for them.

A ``TCPStore`` listens on all interfaces of its machine, and whoever connects may read and write it. Here it listens on
the address that its clients connect to: the loopback, where all ranks are on one machine.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import socket
from contextlib import suppress
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("megatron_pp")

# The modules of torch that make the stores of a job, by this name.
_MAKERS = (
    "torch.distributed",
    "torch.distributed.rendezvous",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
_OF_TORCH = dist.TCPStore
_NAMES = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant")


class BoundStore(_OF_TORCH):
    """A ``TCPStore`` with the same arguments. If it cannot listen there, because the address is not of this machine or
    a store of this process already listens there, it is made as torch makes it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        given = dict(zip(_NAMES, args, strict=False)) | more
        bound = None
        if given.get("is_master") and given.get("master_listen_fd") is None:
            bound = _bound_socket(given["host_name"], given.get("port") or 0)
        if bound is not None:
            given |= {"port": bound.getsockname()[1], "master_listen_fd": bound.detach()}
        super().__init__(**given)


def _bound_socket(host: str, port: int) -> socket.socket | None:
    """A socket bound to that address; None if that is impossible."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError as error:
            made.close()
            logger.debug("no store can listen on %s, port %d alone: %s", host, port, error)
            return None
        return made
    return None


def bind_stores() -> None:
    """Have the stores that torch makes in this process listen only on the address that is given for them."""
    if "master_listen_fd" not in (inspect.getdoc(_OF_TORCH) or "") + (_OF_TORCH.__init__.__doc__ or ""):
        return  # in this release of torch a store does not take a socket
    for path in _MAKERS:
        module = importlib.import_module(path)
        if getattr(module, "TCPStore", None) is _OF_TORCH:
            module.TCPStore = BoundStore  # type: ignore[attr-defined]
