"""Clients of torch's stores.

A call on a TCPStore's client blocks while another thread is in a ``get`` or ``wait`` on the same client. So two threads
of a process could hang: each waits for a peer's thread that cannot use the client which the other thread blocks. To
prevent this, each of our threads and each pipeline has a client of its own.
"""

import socket
from typing import Any

from torch.distributed import PrefixStore, TCPStore

_CONNECTING = 10.0  # seconds


def private_client(store: Any) -> Any:
    """A client of the same store with a connection of its own, if the kind of store has connections. Raises OSError if
    the store's process is gone."""
    below = store
    while isinstance(below, PrefixStore):
        below = below.underlying_store
    if isinstance(below, TCPStore):
        # torch's client would try to connect for as long as the store's own timeout.
        socket.create_connection((below.host, below.port), _CONNECTING).close()
    if hasattr(store, "clone"):
        return store.clone()
    if isinstance(below, TCPStore):  # torch 2.6 and 2.7
        from megatron_pp.comm import older_stores

        return older_stores.client_of(store, below)
    return store
