"""Clients of a TCPStore with torch 2.6 and 2.7, which neither clone a store nor tell the prefix of one."""

from __future__ import annotations

import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

_CALL_TIMEOUT = timedelta(seconds=30)


def client_of(store: Store, below: TCPStore) -> Store:
    """A client of ``store``, which is ``below`` or has a prefix on it. It shares its keys with other clients of the
    same prefix and with no others; else a restarted job would read the keys of the attempt before it.

    The keys get a name that the first rank chooses. The call that finds it out goes through ``store`` itself."""
    client = TCPStore(below.host, below.port, is_master=False, wait_for_workers=False, timeout=_CALL_TIMEOUT)
    if store is below:
        return client
    name = store.compare_set("megatron_pp/name of keys", "", uuid.uuid4().hex)
    return PrefixStore(str(name, "ascii"), client)
