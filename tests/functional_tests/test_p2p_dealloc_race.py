"""The deallocation race with real processes: reproduced with plain torch.distributed, impossible with ours.

Each case runs a few times; ``MEGATRON_PP_RACE_REPEATS=20`` runs each 20 times per dtype.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_pp.errors import PlanError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import KIND_OF, MOVES
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.runtime.executor import PlanExecutor, Shapes
from tests.functional_tests.race_cases import (
    KEEP_FREED_MEMORY_MAPPED,
    ONE_GPU_ENVIRONMENT,
    run_cases,
    run_cases_on_one_gpu,
)
from tests.harness.processes import RankFailedError, run_processes

REPEATS = int(os.environ.get("MEGATRON_PP_RACE_REPEATS", "2"))
DTYPES = {"float32": REPEATS, "bfloat16": max(1, REPEATS // 2) if REPEATS < 20 else REPEATS}
DEADLINE = 120.0 + 12.0 * REPEATS
SAFE_CASES = {
    "b": "deallocated without waiting",
    "c": "waited, then deallocated",
    "d": "not deallocated",
    "e": "handle dropped",
    "f": "gradient dropped",
}

Shares = dict[str, list[float]]


def worst_of(results: list[Shares]) -> Shares:
    """Of both ranks: the sender reports 0."""
    return {key: [max(pair) for pair in zip(results[0][key], results[1][key], strict=True)] for key in results[0]}


@pytest.fixture(scope="module")
def gloo() -> Shares:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEEP_FREED_MEMORY_MAPPED.items():
            patch.setenv(name, value)
        return worst_of(run_processes(run_cases, 2, (DTYPES, ("cpu", "cpu")), timeout=DEADLINE))


@pytest.fixture(scope="module")
def two_gpus() -> Shares:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; this machine has {torch.cuda.device_count()}")
    return worst_of(run_processes(run_cases, 2, (DTYPES, ("cuda:0", "cuda:1")), backend="nccl", timeout=DEADLINE))


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> Shares:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU for two NCCL ranks to share; this machine has none")
    store: Path = tmp_path_factory.mktemp("race") / "store"
    return worst_of(
        run_processes(
            run_cases_on_one_gpu,
            2,
            (DTYPES, str(store)),
            backend=None,
            timeout=DEADLINE,
            environment=ONE_GPU_ENVIRONMENT,
        )
    )


TRANSPORTS = pytest.mark.parametrize("transport", ["gloo", "two_gpus", "one_gpu"])
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def assert_all_corrupted(shares: list[float], transport: str) -> None:
    corrupted = sum(share > 0 for share in shares)
    summary = (
        f"{corrupted} of {len(shares)} transfers were corrupted, wrong elements: {[f'{100 * s:.4g}%' for s in shares]}"
    )
    print(summary)
    if corrupted == 0 and transport == "gloo":
        pytest.skip(f"gloo copies eagerly here, so that the race cannot show: {summary}")
    assert corrupted == len(shares), summary


@EACH_DTYPE
def test_a_early_free_corrupts_on_gloo(dtype: str, gloo: Shares) -> None:
    assert_all_corrupted(gloo[f"a {dtype}"], "gloo")


@pytest.mark.parametrize("transport", ["two_gpus", "one_gpu"])
@EACH_DTYPE
def test_a_early_free_is_hidden_on_nccl(transport: str, dtype: str, request: pytest.FixtureRequest) -> None:
    """torch calls ``record_stream`` there: this says nothing about who frees early (``docs/race.md``)."""
    shares = request.getfixturevalue(transport)[f"a {dtype}"]
    assert shares == [0.0] * len(shares)


@TRANSPORTS
@EACH_DTYPE
def test_h_writing_after_the_send_corrupts_everywhere(
    transport: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    """The control: what shows that a fault between send and receive is seen at all."""
    assert_all_corrupted(request.getfixturevalue(transport)[f"h {dtype}"], transport)


@TRANSPORTS
@EACH_DTYPE
@pytest.mark.parametrize("case", SAFE_CASES, ids=SAFE_CASES.values())
def test_ours_delivers_what_was_posted(transport: str, dtype: str, case: str, request: pytest.FixtureRequest) -> None:
    shares = request.getfixturevalue(transport)[f"{case} {dtype}"]
    assert len(shares) == DTYPES[dtype]
    assert shares == [0.0] * len(shares)


# -- g: blocking sends in 1F1B ---------------------------------------------------------------------

_MICROBATCHES = 6
_SHAPE = (4, 1, 8)


def blocking_sends(plan: Plan, ranks: tuple[int, ...]) -> Plan:
    """``plan`` with every send of ``ranks`` waited for where it is posted, and every receive posted where it is waited
    for.
    """
    programs = [_blocking(p) if r in ranks else p for r, p in enumerate(plan.programs)]
    return Plan(plan.spec, plan.placement, tuple(programs), plan.orders)


def _blocking(program: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    out: list[Instruction] = []
    for at in program:
        if at.op in ins.FREE_OPS or at.op in ins.RECV_OPS:
            continue
        if at.op in ins.WAIT_OPS:
            out.append(at._replace(op=ins.POST_OF[at.op]))
        out.append(at)
        if at.op in ins.SEND_OPS:
            out.append(at._replace(op=MOVES[KIND_OF[at.op]].free))
    return tuple(out)


def forced_plan() -> Plan:
    return blocking_sends(build_plan(PlanSpec("1f1b", 4, 1, _MICROBATCHES)), (2, 3))


def run_forced(rank: int, size: int, timeout: float) -> None:
    import torch.distributed as dist

    from megatron_pp.config.settings import StepSettings
    from megatron_pp.runtime.compute import ModelSteps, StepOptions
    from megatron_pp.runtime.gradient_hooks import SyncHooks
    from megatron_pp.testing.toy import ToyData, toy_chunks, toy_config, toy_forward_step

    plan, config = forced_plan(), toy_config(p2p_timeout=timeout)
    settings = StepSettings.from_config(config)
    data = ToyData(_MICROBATCHES, _SHAPE[0], _SHAPE[1], hidden=_SHAPE[2])
    communicator = P2PCommunicator(dist.group.WORLD, config)
    chunks = toy_chunks(plan.placement, rank, config, lambda stage: torch.nn.Linear(_SHAPE[2], _SHAPE[2]))
    steps = ModelSteps(
        toy_forward_step, [data.iterator()], chunks, settings, StepOptions(_MICROBATCHES, [rank == size - 1])
    )
    PlanExecutor(plan, communicator, steps, SyncHooks(settings, chunks), [Shapes(_SHAPE, _SHAPE)]).run()


def test_g_verify_refuses_blocking_sends_in_1f1b_and_names_the_cycle() -> None:
    with pytest.raises(PlanError) as refused:
        verify(forced_plan())
    text = str(refused.value)
    assert "deadlock under rendezvous" in text
    assert "rank 2 waits at FREE_F0." in text
    assert "rank 3 waits at FREE_B0." in text


def test_g_forced_to_run_it_ends_in_a_named_error() -> None:
    with pytest.raises(RankFailedError) as failed:
        run_processes(run_forced, 4, (2.0,), timeout=60.0, start_method="forkserver")
    kinds = {kind for kind, _ in failed.value.errors.values()}
    expected = {"P2PTimeoutError", "P2PTransferError", "PipelinePeerError", "PipelineStallError"}
    assert kinds <= expected, failed.value.errors
    timed_out = [rank for rank, (kind, _) in failed.value.errors.items() if kind == "P2PTimeoutError"]
    assert set(timed_out) & {2, 3}, failed.value.errors
