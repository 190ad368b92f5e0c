"""Megatron-core's own schedules, run with recording model chunks and hooks, write down the same lines as ours do.

Each rank of Megatron's schedules runs alone, on a communicator that returns zeros: other ranks do not change where
hooks fire.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from megatron_pp.testing.threads import ThreadGroup
from testkit.models.hook_log import SHAPE, HookLog, logged_config, step_arguments
from tests.functional_tests.megatron_support import in_megatrons_process, needs_megatron
from tests.unit_tests.runtime.engine.test_gradient_hooks import run_logged

pytestmark = needs_megatron


def cases() -> list[dict[str, Any]]:
    result = []
    for explicit, size in itertools.product((False, True), (1, 2, 4)):  # 1: without a pipeline
        result += [
            {"size": size, "chunks": 1, "count": count, "explicit": explicit}
            for count in {1, size - 1 or 2, size, 2 * size + 1}
        ]
    for explicit, param_sync, size, chunks in itertools.product((False, True), (False, True), (2, 4), (2, 3)):
        for group, count in [(size, size), (size, 2 * size), (size + 1, 2 * size + 2)]:
            case = {"size": size, "chunks": chunks, "count": count, "group": group}
            result.append({**case, "explicit": explicit, "param_sync": param_sync})
    return result


class ZerosCommunicator:
    """Has the methods of Megatron's P2PCommunicator; all tensors that it receives are zeros."""

    def __init__(self, rank: int, size: int, config: Any) -> None:
        self.pp_group = ThreadGroup(rank, size)
        self.config = config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self.is_pp_first_stage = rank == 0
        self.is_pp_last_stage = rank == size - 1
        self.total_stages = size
        self.current_stage = rank

    def recv_forward(self, shapes: Any, is_first_stage: bool) -> Any:
        return _like(shapes, not is_first_stage)

    def recv_backward(self, shapes: Any, is_last_stage: bool) -> Any:
        return _like(shapes, not is_last_stage)

    def send_forward(self, tensors: Any, is_last_stage: bool) -> None:
        pass

    def send_backward(self, grads: Any, is_first_stage: bool) -> None:
        pass

    def send_forward_recv_backward(self, tensors: Any, shapes: Any, is_last_stage: bool) -> Any:
        return _like(shapes, not is_last_stage)

    def send_backward_recv_forward(self, grads: Any, shapes: Any, is_first_stage: bool) -> Any:
        return _like(shapes, not is_first_stage)

    def send_forward_recv_forward(self, tensor: Any, recv_prev: bool, tensor_shape: Any) -> Any:
        return _like(tensor_shape, recv_prev)

    def send_backward_recv_backward(self, grad: Any, recv_next: bool, tensor_shape: Any) -> Any:
        return _like(tensor_shape, recv_next)

    def send_forward_backward_recv_forward_backward(
        self, tensor: Any, grad: Any, recv_prev: bool, recv_next: bool, tensor_shape: Any
    ) -> Any:
        return _like(tensor_shape, recv_prev), _like(tensor_shape, recv_next)


def _like(shapes: Any, wanted: bool) -> Any:
    if isinstance(shapes[0], (tuple, list)):
        return [_like(shape, wanted) for shape in shapes]
    return torch.zeros(SHAPE, requires_grad=True) if wanted else None


def run_megatron(schedules: Any, case: dict[str, Any], rank: int) -> list[str]:
    """Run one step of one rank under Megatron's schedule for ``case``, and return the recorded lines."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    log = HookLog()
    config = logged_config(
        log,
        case["chunks"],
        case["explicit"],
        case.get("param_sync", False),
        microbatch_group_size_per_vp_stage=case.get("group"),
    )
    one = ThreadGroup(0, 1)
    communicator = ZerosCommunicator(rank, case["size"], config)
    groups = ProcessGroupCollection()
    vars(groups).update(tp=one, cp=one, embd=None, pos_embd=None, pp=communicator.pp_group, dp_cp=one)
    step = schedules.get_forward_backward_func(case["size"], config.virtual_pipeline_model_parallel_size)
    step(
        **step_arguments(log.make_stages(config, case["chunks"]), case["count"]),
        p2p_communicator=communicator,
        pg_collection=groups,
    )
    return log.every


def megatrons_lines(case: Any) -> list[list[list[str]]]:
    """Return the lines of each rank of each case."""
    from megatron.core.pipeline_parallel import schedules

    return [[run_megatron(schedules, case, rank) for rank in range(case["size"])] for case in cases()]


def test_hooks_fire_where_megatrons_schedules_fire_them() -> None:
    theirs = in_megatrons_process(megatrons_lines)
    differing = []
    for case, expected in zip(cases(), theirs, strict=True):
        logs = run_logged(
            *(case["size"], case["chunks"], case["count"]),
            explicit=case["explicit"],
            param_sync=case.get("param_sync", False),
            microbatch_group_size_per_vp_stage=case.get("group"),
        )
        if [log.every for log in logs] != expected:
            differing.append((case, [log.every for log in logs], expected))
    assert differing == []
