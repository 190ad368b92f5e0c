"""What can be said about NCCL without a GPU: aborts that wait for each other, and what torch is set to leave alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megatron_pp.comm import abort
from megatron_pp.faults.nccl_settings import SETTINGS, leave_failures_to_the_guard, warning


class Communicator:
    """Stands for an NCCL process group whose abort returns when all others are being aborted too."""

    def __init__(self, together: threading.Barrier) -> None:
        self.together = together
        self.aborted = False

    def _get_backend(self, device: Any) -> Any:
        if device.type != "cuda":
            raise RuntimeError("no backend for this device")
        return self

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.together.wait(30.0)
        self.aborted = True


def test_communicators_whose_aborts_wait_for_each_other() -> None:
    together = threading.Barrier(3)
    groups: Any = [Communicator(together) for _ in range(3)]
    abort.abort_groups(groups)
    assert [group.aborted for group in groups] == [True, True, True]


def test_an_abort_that_does_not_return_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(abort, "_NCCL_PATIENCE", 0.2)
    together = threading.Barrier(2)
    group: Any = Communicator(together)
    abort.abort_groups([group])
    assert "aborting 1 NCCL communicator(s) takes longer" in caplog.text
    together.abort()


def test_what_the_user_has_set_stays() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    leave_failures_to_the_guard(environ)
    assert environ == {**SETTINGS, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def test_a_warning_where_torch_would_end_the_process() -> None:
    for environ in ({}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}):
        said = warning(environ)
        assert said is not None
        assert all(f"{name}={value}" in said for name, value in SETTINGS.items())
    assert warning(dict(SETTINGS)) is None
