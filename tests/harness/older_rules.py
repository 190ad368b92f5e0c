"""The streams of autograd as an approximation has them: a node waits for all that ran before it, the caller for all
nodes, and AccumulateGrad runs where the node before it did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from megatron_pp.testing.streams import device
from megatron_pp.testing.streams.autograd_streams import NodeStreams


class _OlderStreams(NodeStreams):
    def _enter(self, task: Any, node: Any) -> None:
        if node.name().endswith("AccumulateGrad"):
            task.lanes[node] = self._current
        super()._enter(task, node)
        for source in (task.caller, *task.leaves):
            if source is not self._current:
                self._current.wait_for_lane(source)
        task.leaves[self._current] = None


@contextmanager
def older_rules(wanted: bool) -> Iterator[None]:
    """Devices that are made meanwhile have the approximation, where it is ``wanted``."""
    with patch.object(device, "NodeStreams", _OlderStreams if wanted else NodeStreams):
        yield
