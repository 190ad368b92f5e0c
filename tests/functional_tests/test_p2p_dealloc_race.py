"""The deallocation race with real processes: reproduced with plain torch.distributed, impossible with ours.

Each case runs a few times; ``MEGATRON_PP_RACE_REPEATS=20`` runs each 20 times per dtype.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import KIND_OF, MOVES
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.runtime.engine.executor import PlanExecutor, Shapes
from megatron_pp.runtime.engine.gradient_hooks import SyncHooks
from megatron_pp.runtime.engine.model_steps import ModelSteps, StepOptions
from megatron_pp.testing.toy import HIDDEN, toy_forward_step
from testkit.process_ranks import pipeline
from testkit.processes import RankFailedError, run_processes
from testkit.race_cases import (
    KEEP_FREED_MEMORY_MAPPED,
    ONE_GPU_ENVIRONMENT,
    build_reusing_allocator,
    run_cases,
    run_cases_on_one_gpu,
)
from testkit.thread_runs.step_runs import Rank

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


OWN_ALLOCATOR = "one GPU, an allocator without record_stream"
HIDES_EARLY_FREES = ("two GPUs", "one GPU")


@pytest.fixture(scope="module", params=["gloo", *HIDES_EARLY_FREES, OWN_ALLOCATOR])
def transport(request: pytest.FixtureRequest) -> str:
    gpus = torch.cuda.device_count()
    if request.param == "two GPUs" and gpus < 2:
        pytest.skip(f"needs two GPUs; this machine has {gpus}")
    if request.param in ("one GPU", OWN_ALLOCATOR) and gpus == 0:
        pytest.skip("needs a GPU for two NCCL ranks to share; this machine has none")
    if request.param == OWN_ALLOCATOR and shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc) to build the allocator; there is none")
    return str(request.param)


@pytest.fixture(scope="module")
def shares(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Shares:
    """Return the larger share of both ranks; the sender reports 0."""
    options: dict[str, Any] = {"timeout": DEADLINE}
    with pytest.MonkeyPatch.context() as patch:
        if transport == "gloo":
            for name, value in KEEP_FREED_MEMORY_MAPPED.items():
                patch.setenv(name, value)
            results = run_processes(run_cases, 2, (DTYPES, ("cpu", "cpu")), **options)
        elif transport == "two GPUs":
            results = run_processes(run_cases, 2, (DTYPES, ("cuda:0", "cuda:1")), backend="nccl", **options)
        else:
            folder = tmp_path_factory.mktemp("race")
            allocator = build_reusing_allocator(folder) if transport == OWN_ALLOCATOR else None
            options |= {"backend": None, "environment": ONE_GPU_ENVIRONMENT}
            results = run_processes(run_cases_on_one_gpu, 2, (DTYPES, str(folder / "store"), allocator), **options)
    one, other = results
    return {key: list(map(max, one[key], other[key])) for key in one}


EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def assert_all_corrupted(shares: list[float], transport: str) -> None:
    corrupted = sum(share > 0 for share in shares)
    wrong = [f"{100 * share:.4g}%" for share in shares]
    summary = f"{corrupted} of {len(shares)} transfers were corrupted, wrong elements: {wrong}"
    print(summary)
    if corrupted == 0 and transport == "gloo":
        pytest.skip(f"gloo copies eagerly here, so that the race cannot show: {summary}")
    assert corrupted == len(shares), summary


@EACH_DTYPE
def test_a_an_early_free_corrupts_data_unless_the_allocator_waits(transport: str, dtype: str, shares: Shares) -> None:
    """On NCCL torch calls ``record_stream``, so that its allocator waits, which hides an early free."""
    found = shares[f"a {dtype}"]
    if transport in HIDES_EARLY_FREES:
        assert found == [0.0] * len(found)
    else:
        assert_all_corrupted(found, transport)


@EACH_DTYPE
def test_h_a_write_after_the_send_corrupts_data_on_every_backend(transport: str, dtype: str, shares: Shares) -> None:
    """The control, which shows that the program detects a fault between send and receive."""
    assert_all_corrupted(shares[f"h {dtype}"], transport)


@EACH_DTYPE
@pytest.mark.parametrize("case", SAFE_CASES, ids=SAFE_CASES.values())
def test_the_engine_delivers_the_bytes_that_were_posted(dtype: str, case: str, shares: Shares) -> None:
    assert shares[f"{case} {dtype}"] == [0.0] * DTYPES[dtype]


# -- g: blocking sends in 1F1B ---------------------------------------------------------------------

_MICROBATCHES = 6


def blocking_sends(plan: Plan, ranks: tuple[int, ...]) -> Plan:
    """Return ``plan`` in which ``ranks`` wait for each send where they post it, and post each receive where they wait
    for it.
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


def run_forced(one: Rank) -> None:
    settings, chunks = StepSettings.from_config(one.config), one.model()
    options = StepOptions(_MICROBATCHES, [one.rank == one.communicator.size - 1])
    steps = ModelSteps(toy_forward_step, [one.data.iterator()], chunks, settings, options)
    shape = one.data.seq_length, one.data.micro_batch_size, HIDDEN
    PlanExecutor(forced_plan(), one.communicator, steps, SyncHooks(settings, chunks), [Shapes(shape, shape)]).run()


def test_g_verify_refuses_blocking_sends_in_1f1b_and_names_the_cycle() -> None:
    with pytest.raises(PlanError) as refused:
        verify(forced_plan())
    text = str(refused.value)
    assert "deadlock under rendezvous" in text
    assert "rank 2 waits at FREE_F0." in text
    assert "rank 3 waits at FREE_B0." in text


def test_g_a_forced_1f1b_with_blocking_sends_ends_in_a_named_error() -> None:
    with pytest.raises(RankFailedError) as failed:
        pipeline(4, 1, _MICROBATCHES, run_forced, p2p_timeout=2.0)
    kinds = {kind for kind, _ in failed.value.errors.values()}
    expected = {"P2PTimeoutError", "P2PTransferError", "PipelinePeerError", "PipelineStallError"}
    assert kinds <= expected, failed.value.errors
    timed_out = [rank for rank, (kind, _) in failed.value.errors.items() if kind == "P2PTimeoutError"]
    assert set(timed_out) & {2, 3}, failed.value.errors
