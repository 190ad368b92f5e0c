"""Stores listen where they are told to, and nowhere else."""

from __future__ import annotations

import importlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_pp.comm import bound_stores
from megatron_pp.comm.stores import private_client


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for path in bound_stores._MAKERS:
        module = importlib.import_module(path)
        monkeypatch.setattr(module, "TCPStore", module.TCPStore)  # restored afterwards
    bound_stores.bind_stores()
    return


def listeners(port: int) -> list[str]:
    """The addresses on which a socket of this machine listens on the port."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                words = [struct.pack("<I", int(address[k : k + 8], 16)) for k in range(0, len(address), 8)]
                family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


def make(host: str, port: int = 0, **more: bool) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, **more)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_listens_on_its_address(bound: None, host: str) -> None:
    store = make(host)
    assert listeners(store.port) == ["127.0.0.1"]
    client = dist.TCPStore(host, store.port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    assert private_client(store).get("key") == b"value"


def test_stores_with_the_same_port_share_their_keys(bound: None) -> None:
    """torch's ``env://`` makes such stores."""
    store = make("127.0.0.1", multi_tenant=True)
    again = make("127.0.0.1", store.port, multi_tenant=True)
    store.set("key", "value")
    assert again.get("key") == b"value"
    assert listeners(store.port) == ["127.0.0.1"]


def test_an_address_of_another_machine_is_left_to_torch(bound: None) -> None:
    assert bound_stores._bound_socket("192.0.2.1", 0) is None
    assert bound_stores._bound_socket("no.such.host.invalid", 0) is None


def test_a_port_that_is_taken_is_torchs_error(bound: None) -> None:
    store = make("127.0.0.1")
    with pytest.raises(RuntimeError, match=r"EADDRINUSE|already in use"):
        make("127.0.0.1", store.port)
