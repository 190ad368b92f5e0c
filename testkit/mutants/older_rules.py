"""Virtual devices that lack one of the rules on autograd's streams. Then the mutant for that rule is not caught.

Without ``FORWARD`` a node runs on the stream that calls the backward. Without ``LEAF`` AccumulateGrad runs on the
stream of the node before it. Without ``PRODUCERS`` a node waits for all that ran before it, and the caller for all
nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from testkit.streams import device
from testkit.streams.autograd_streams import _STREAM, NodeStreams

FORWARD, LEAF, PRODUCERS = RULES = ("the stream of the forward", "the stream of the leaf", "producers only")


def _is_leaf(node: Any) -> bool:
    return str(node.name()).endswith("AccumulateGrad")


class _Without(NodeStreams):
    def __init__(self, *of_device: Any, missing: Iterable[str]) -> None:
        super().__init__(*of_device)
        self._missing = set(missing)

    def made(self, results: Iterable[torch.Tensor]) -> None:
        if FORWARD not in self._missing:
            super().made(results)
            return
        nodes = [result.grad_fn for result in results if result.grad_fn is not None]
        for leaf in (following for node in nodes for following, _ in node.next_functions if following is not None):
            if _is_leaf(leaf) and _STREAM not in leaf.metadata:
                leaf.metadata[_STREAM] = self.current()

    def _pass_on(self, task: Any, grad: Any, stream: Any, to: Any, place: int) -> None:
        if LEAF in self._missing and _is_leaf(to) and to not in task.ready:
            task.lanes[to] = stream
        super()._pass_on(task, grad, stream, to, place)

    def _enter(self, task: Any, node: Any) -> None:
        super()._enter(task, node)
        if PRODUCERS in self._missing:
            for source in (task.caller, *task.leaves):
                if source is not self._current:
                    self._current.wait_for_lane(source)
            task.leaves[self._current] = None


@contextmanager
def without(*rules: str) -> Iterator[None]:
    """A context in which new devices lack ``rules``, which are some of ``RULES``."""
    with patch.object(device, "NodeStreams", partial(_Without, missing=rules) if rules else NodeStreams):
        yield
