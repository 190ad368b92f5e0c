"""Steps on virtual devices, which tests of ``testkit.streams`` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import ON_NCCL, ONE_WAY, PlanSpec
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.runtime.run_step import ranges_if_profiling
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import TOY_SCHEDULES, ToyData, ToyResult, reference_run
from testkit.streams import DeviceRules, StreamNetwork, StreamReport, check_streams, virtual_cuda
from testkit.streams.network import NO_MORE_RULES
from testkit.thread_runs.race_support import exact_data, run_plan

POLICIES: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_p2p_comm": True},
    "batched": {"batch_p2p_comm": True, "batch_p2p_sync": False},
    "plain": {},
}


def toy_step_on_streams(
    schedule: str,
    size: int,
    data: ToyData,
    *,
    forward_only: bool = False,
    seed: int = 0,
    rules: DeviceRules = NO_MORE_RULES,
    **more: Any,
) -> tuple[StreamReport, float]:
    """Run a step of the toy model. Returns its report, and the largest difference between losses and gradients and
    those of one process."""
    known = TOY_SCHEDULES.get(schedule)
    chunks = (known and known.chunks) or (1 if schedule in ("1f1b", "gpipe") else 2)
    network = StreamNetwork(size, more.get("p2p_channels", ONE_WAY) == ONE_WAY, seed=seed, rules=rules)
    with virtual_cuda():
        result: ToyResult = run_in_threads(
            size, chunks, data, forward_only=forward_only, network=network, pipeline_schedule=schedule, **more
        )
    return StreamReport.of(network, [result]), result.difference(reference_run(size * chunks, data, forward_only))


def for_nccl(spec: PlanSpec) -> PlanSpec:
    """``spec`` with the default device rules of NCCL, unless it names others."""
    return spec if spec.device else replace(spec, device=ON_NCCL)


def plan_on_streams(
    spec: PlanSpec,
    executor: Callable[..., PlanExecutor] = PlanExecutor,
    core: type[P2PCore] = P2PCore,
    kind: type[StreamNetwork] = StreamNetwork,
    block: Callable[[int], torch.nn.Module] | None = None,
    rules: DeviceRules = NO_MORE_RULES,
    **more: Any,
) -> StreamReport:
    """Run a step of ``spec``'s plan by ``executor``, on the model of ``race_support`` or of ``block``. The network is
    of ``kind``, with ``rules`` and ``more``. If kernels are launched for the first time, the plan allows for that."""
    if rules.first_launches:
        spec = for_nccl(spec)
    network = kind(spec.pipeline_size, spec.channels == ONE_WAY, rules=rules, **more)

    def observed(*args: Any, **more: Any) -> PlanExecutor:  # each rank has its own ranges
        return executor(*args, observer=ranges_if_profiling(), **more)

    data = exact_data(spec.num_microbatches, spec.variable_shapes)
    with virtual_cuda():
        run_plan(build_plan(spec), data, network, executor=observed, core=core, block=block)
    return StreamReport.of(network, [])


def on_one_device(program: Callable[[], Any], **more: Any) -> StreamReport:
    """Run ``program`` on one virtual device."""
    network = StreamNetwork(1, **more)

    def main(rank: int) -> Any:
        with network.running(rank):
            return program()

    with virtual_cuda():
        results = run_ranks(1, main, network.abort)
    return StreamReport.of(network, results)


__all__ = ["POLICIES", "check_streams", "on_one_device", "plan_on_streams", "toy_step_on_streams"]
