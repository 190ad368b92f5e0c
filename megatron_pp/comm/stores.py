"""Clients of torch's stores.

A call on a TCPStore's client blocks while another thread's ``get`` or ``wait`` on the same client does. Two threads of
a process that each wait there for a peer's thread, which waits for the other's client, wait for ever. So what has a
thread of its own, and each pipeline, has a client of its own.
"""

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

_CONNECTING = 10.0  # seconds
_CALL_TIMEOUT = timedelta(seconds=30)


def private_client(store: Any) -> Any:
    """A client of the same store with a connection of its own, if the kind of store has connections. Raises OSError
    where its process is gone."""
    below = store
    while isinstance(below, PrefixStore):
        below = below.underlying_store
    if isinstance(below, TCPStore):
        # A client of torch's would try again for as long as the store's own timeout.
        socket.create_connection((below.host, below.port), _CONNECTING).close()
    if hasattr(store, "clone"):
        return store.clone()
    if isinstance(below, TCPStore):  # older versions of torch
        return TCPStore(below.host, below.port, is_master=False, wait_for_workers=False, timeout=_CALL_TIMEOUT)
    return store
