"""On which stream autograd runs: the backward of an operation on the stream that was current in its forward.

PyTorch makes the stream of a node wait for the streams of the nodes before it, that of the first node for the caller's
stream, and at the end the caller's stream for all. (Here a node waits for all nodes that ran before it, and
AccumulateGrad runs where the node before it ran.) A CPU does nothing of this, so it is done here when the running node
changes. A node knows no stream, but it has a sequence number, which counts up in each thread: the numbers at which the
current stream changed tell the stream of a forward.
"""

from bisect import bisect_right
from dataclasses import dataclass

import torch

from megatron_pp.testing.streams.timelines import Lane

_NO_FORWARD = 1 << 62  # sequence numbers from here on are of nodes that no forward made: AccumulateGrad


@dataclass
class _Task:
    """A run of the autograd engine. ``node``: the sequence number of the node that runs."""

    number: int
    caller: Lane
    node: int
    used: dict[Lane, None]


class NodeStreams:
    """The current stream of one thread, in and out of backwards."""

    def __init__(self, default: Lane) -> None:
        self._current = default
        self._since = [-1]  # sequence numbers at which the current stream changed
        self._streams = [default]
        self._tasks: list[_Task] = []

    def current(self) -> Lane:
        number = torch._C._current_graph_task_id()
        if number != -1 or self._tasks:
            self._follow(number)
        return self._current

    def set(self, stream: Lane) -> None:
        self.current()
        self._switch(stream)

    def _switch(self, stream: Lane) -> None:
        """The nodes that the thread makes from now on belong to ``stream``."""
        self._current = stream
        if stream is not self._streams[-1]:
            self._since.append(torch._C._autograd._get_sequence_nr())
            self._streams.append(stream)

    def _follow(self, number: int) -> None:
        """The task ``number`` runs now; those that it is not nested in are over."""
        running = [task.number for task in self._tasks]
        if number not in running and number != -1:
            self._tasks.append(_Task(number, self._current, -1, {}))
        while self._tasks and self._tasks[-1].number != number:
            task = self._tasks.pop()
            for stream in task.used:
                task.caller.wait_for_lane(stream)
            self._switch(task.caller)
        if self._tasks:
            self._enter_node(self._tasks[-1])

    def _enter_node(self, task: _Task) -> None:
        node = torch._C._current_autograd_node()
        number = task.node if node is None else node._sequence_nr()
        if number == task.node:
            return
        task.node = number
        made = bisect_right(self._since, number) - 1
        stream = self._current if number >= _NO_FORWARD else self._streams[made]
        for source in (task.caller, *task.used):
            if source is not stream:
                stream.wait_for_lane(source)
        task.used[stream] = None
        self._switch(stream)
