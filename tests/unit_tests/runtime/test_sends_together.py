"""Small sends of gloo, whose end cannot be polled, are waited for together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit_tests.runtime.test_hot_loop_calls import SHAPE, StillTransport, make_step

BYTES = 4 * SHAPE[2]


class NumberedSend(StillTransport):
    """The work of a send, which notes when it is waited for."""

    def __init__(self, waited: list[int], number: int) -> None:
        self.waited = waited
        self.number = number

    def wait(self, timeout: Any = None) -> bool:
        self.waited.append(self.number)
        return True

    def is_completed(self) -> bool:
        return False


class LikeGloo(StillTransport):
    """A transport that lets ``most`` sends stay unfinished."""

    groups_calls = False

    def __init__(self, rank: int, size: int, most: int) -> None:
        super().__init__(rank, size)
        self.most = most
        self.asked: set[float] = set()
        self.waited: list[int] = []
        self.before_each_send: list[int] = []

    def unfinished_sends(self, allowed: int, message_bytes: float) -> int:
        self.asked.add(message_bytes)
        return self.most

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> StillTransport:
        self.before_each_send.append(len(self.waited))
        return NumberedSend(self.waited, len(self.before_each_send))


@pytest.mark.parametrize("policy", ["plain", "batched", "overlap"])
def test_the_older_half_is_waited_for_last_send_first_and_none_is_left(policy: str) -> None:
    transport = LikeGloo(0, 2, most=4)
    make_step(2, 1, 0, 12, policy, transport)()
    assert transport.asked == {BYTES}
    assert transport.waited == [3, 2, 1, 6, 5, 4, 9, 8, 7, 12, 11, 10]
    assert all(sent - waited <= 5 + (policy == "overlap") for sent, waited in enumerate(transport.before_each_send))


def test_others_are_waited_for_one_by_one() -> None:
    transport = LikeGloo(0, 2, most=0)
    make_step(2, 1, 0, 5, "plain", transport)()
    assert transport.waited == [1, 2, 3, 4, 5]
