"""no_sync, grad_sync_func, param_sync_func and finalize_model_grads_func fire where Megatron-core fires them.

The expected lines are written by hand; ``functional_tests/test_hooks_of_megatron.py`` compares with the lines of
Megatron-core's own schedules, for more sizes.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.gradient_hooks import SyncHooks, finalize_gradients
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from tests.harness.hook_log import SHAPE, HookLog, logged_config, logged_forward_step, step_arguments

# -- ours -------------------------------------------------------------------------------------------------------------


def settings_of(**fields: Any) -> StepSettings:
    return StepSettings.from_config(SimpleNamespace(**fields))


def run_logged(
    size: int, chunks: int, num_microbatches: int, forward_only: bool = False, **fields: Any
) -> list[HookLog]:
    """One step; what each rank wrote down."""
    network = MemoryNetwork(size)

    def rank_main(rank: int) -> HookLog:
        log = HookLog()
        config = logged_config(log, chunks, **fields)
        communicator = P2PCommunicator(ThreadGroup(rank, size), config, network.transport(rank))
        before = dict(vars(config))
        get_forward_backward_func(size, chunks if chunks > 1 else None)(
            **step_arguments(log.make_stages(config, chunks), num_microbatches),
            forward_only=forward_only,
            p2p_communicator=communicator,
        )
        assert log.inside == 0, "no_sync was left open"
        assert vars(config) == before, "Megatron replaces a single function by a list of them in the user's config"
        return log

    return run_ranks(size, rank_main, network.abort)


# -- by hand ----------------------------------------------------------------------------------------------------------

BY_HAND: dict[str, tuple[tuple[int, int, int], dict[str, Any], list[str]]] = {
    "1f1b: the last backward of each rank synchronises as it goes": (
        (3, 1, 3),
        {},
        [
            "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2+",
            "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2+",
            "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2+",
        ],
    ),
    "explicit 1f1b: the first rank has no bubble to hide it in, the others call it after their last backward": (
        (3, 1, 3),
        {"explicit": True},
        [
            "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2+",
            "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 GRAD_SYNC0+",
            "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 GRAD_SYNC0+",
        ],
    ),
    "interleaved, G=2: the last backward of each chunk": (
        (2, 2, 2),
        {"overlap_p2p_comm": True},
        [
            "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1+ B0.0 B0.1+",
            "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1+ B0.0 B0.1+",
        ],
    ),
    "explicit interleaved: rank r synchronises a chunk r backwards after its last one, or at the end": (
        (3, 2, 3),
        {"explicit": True},
        [
            "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 GRAD_SYNC1+ B0.0 B0.1 B0.2 GRAD_SYNC0+",
            "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 B0.0 GRAD_SYNC1+ B0.1 B0.2 GRAD_SYNC0+",
            "F0.0 F0.1 F0.2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 B0.0 B0.1 GRAD_SYNC1+ B0.2 GRAD_SYNC0+",
        ],
    ),
    # Chunks 0 and 1 up front, chunk 2 when chunk 1 starts on rank 0, which on rank 1 is one forward before.
    "parameters are gathered ahead": (
        (2, 3, 2),
        {"param_sync": True},
        [
            "PARAM_SYNC0 PARAM_SYNC1 F0.0 F0.1 PARAM_SYNC2 F1.0 F1.1 F2.0 F2.1 B2.0 B2.1+ B1.0 B1.1+ B0.0 B0.1+",
            "PARAM_SYNC0 PARAM_SYNC1 F0.0 PARAM_SYNC2 F0.1 F1.0 F1.1 F2.0 B2.0 F2.1 B2.1+ B1.0 B1.1+ B0.0 B0.1+",
        ],
    ),
    "without a pipeline": ((1, 1, 3), {}, ["F0.0 B0.0 F0.1 B0.1 F0.2 B0.2+"]),
}


@pytest.mark.parametrize(("sizes", "fields", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(sizes: tuple[int, int, int], fields: dict[str, Any], expected: list[str]) -> None:
    assert [" ".join(log.lines) for log in run_logged(*sizes, **fields)] == expected


def test_without_a_pipeline_the_last_forward_is_outside_no_sync() -> None:
    """Wrappers such as torch's DistributedDataParallel prepare the reduction in the forward."""
    inside = []
    log = HookLog()
    config = logged_config(log, 1)
    stages = log.make_stages(config, 1)
    stages[0].inner.linear.register_forward_hook(lambda *_: inside.append(log.inside))
    get_forward_backward_func(1)(**step_arguments(stages, 3))
    assert inside == [1, 1, 0]


# -- other schedules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "eager_1f1b", "zb_h1", "zb_h2"])
def test_every_chunk_is_synchronised_in_its_last_backward_whatever_the_schedule(schedule: str) -> None:
    for log in run_logged(3, 1, 5, pipeline_schedule=schedule):
        backwards = [line for line in log.lines if line.startswith("B")]
        assert backwards == ["B0.0", "B0.1", "B0.2", "B0.3", "B0.4+"]


def test_with_split_backwards_the_sync_opens_for_the_last_backward_and_for_the_last_weight_gradient() -> None:
    """Layers that do not split have their last gradient in the one, the others in the other."""
    for program in build_plan(PlanSpec("zb_h1", 4, 1, 8)).programs:
        opened = [i for i, at in enumerate(program) if str(at) == "ENABLE_GRAD_SYNC0"]
        covered = [next(at for at in program[i:] if at.op in ("B", "I", "W")) for i in opened]
        assert [str(at) for at in covered] == ["I0.7", "W0.7"]


# -- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2])
def test_evaluation_fires_nothing(chunks: int) -> None:
    finalized: list[Any] = []
    hooks = {"explicit": True, "param_sync": True, "finalize_model_grads_func": lambda *of: finalized.append(of)}
    for log in run_logged(2, chunks, 3, forward_only=True, **hooks):
        assert all(line.startswith("F") for line in log.lines)
        assert log.entered == 0
    assert not finalized


# -- forms in which the hooks may come --------------------------------------------------------------------------------


def test_one_function_per_chunk_or_one_for_all() -> None:
    chunks = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    called: list[tuple[str, int]] = []

    def function(name: str) -> Any:
        return lambda parameters: called.append((name, [list(c.parameters()) for c in chunks].index(list(parameters))))

    one = SyncHooks(settings_of(grad_sync_func=function("all"), param_sync_func=function("all")), chunks)
    one.grad_sync(1)
    one.param_sync(0)
    each = SyncHooks(settings_of(grad_sync_func=[function("first"), function("second")]), chunks)
    each.grad_sync(1)
    each.param_sync(0)  # there is none: nothing happens
    assert called == [("all", 1), ("all", 0), ("second", 1)]


def test_a_list_of_no_sync_functions_is_entered_as_one() -> None:
    logs = [HookLog(), HookLog()]
    hooks = SyncHooks(settings_of(no_sync_func=[log.no_sync for log in logs]), [])
    hooks.disable_grad_sync()
    hooks.disable_grad_sync()  # inside already
    assert [log.inside for log in logs] == [1, 1]
    hooks.enable_grad_sync()
    hooks.enable_grad_sync()
    assert [(log.inside, log.entered) for log in logs] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("given", [None, nullcontext, [nullcontext]])
def test_without_no_sync_nothing_is_entered(given: Any) -> None:
    hooks = SyncHooks(settings_of(no_sync_func=given), [torch.nn.Linear(1, 1)])
    hooks.disable_grad_sync()
    assert hooks._closed is None
    hooks.enable_grad_sync()


def test_a_step_that_fails_leaves_no_sync() -> None:
    """Otherwise the gradients of every later step would stay local, without a word."""
    log = HookLog()
    config = logged_config(log, 1)
    stages = log.make_stages(config, 1)

    def fails_late(data_iterator: Any, model: Any) -> Any:
        if stages[0].inner.forwards == 2:
            raise ArithmeticError("a bad batch")
        return logged_forward_step(data_iterator, model)

    with pytest.raises(ArithmeticError):
        get_forward_backward_func(1)(**{**step_arguments(stages, 4), "forward_step_func": fails_late})
    assert log.entered == 1
    assert log.inside == 0


# -- finalisation -----------------------------------------------------------------------------------------------------


def test_finalisation_comes_once_after_the_last_backward_and_before_the_timer_stops() -> None:
    groups = SimpleNamespace(tp=ThreadGroup(0, 1), cp=ThreadGroup(0, 1))
    network = MemoryNetwork(2)

    def rank_main(rank: int) -> list[str]:
        log = HookLog()

        def timers(name: str, log_level: int | None = None) -> Any:
            ignored = SimpleNamespace(start=lambda **_: None, stop=lambda: None)
            watched = SimpleNamespace(start=lambda **_: log.write("start"), stop=lambda: log.write("stop"))
            return watched if name == "forward-backward" else ignored

        def finalize(model: Any, num_tokens: Any, pg_collection: Any = None, force_all_reduce: bool = False) -> None:
            assert model == log.stages
            assert isinstance(model, list)
            assert pg_collection is groups
            assert log.inside == 0
            log.write(f"finalize {num_tokens} {force_all_reduce}")

        config = logged_config(log, 2, timers=timers, finalize_model_grads_func=finalize)
        get_forward_backward_func(2, 2)(
            **step_arguments(log.make_stages(config, 2), 2),
            p2p_communicator=P2PCommunicator(ThreadGroup(rank, 2), config, network.transport(rank)),
            pg_collection=groups,
            force_all_reduce=True,
        )
        return log.lines

    for log_lines in run_ranks(2, rank_main, network.abort):
        assert log_lines[0] == "start"
        assert log_lines[-3:] == ["B0.1+", "finalize None True", "stop"]
        assert len(log_lines) == 2 * 2 * 2 + 3


@pytest.mark.parametrize("per_token", [False, True])
def test_finalisation_gets_the_tokens_of_the_step(per_token: bool) -> None:
    """An int tensor on every rank: the sum over microbatches on the last stage, 0 elsewhere; None unless asked for."""
    counts: list[Any] = [None, None]
    network = MemoryNetwork(2)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        return model(torch.ones(SHAPE)), lambda output: (output.sum(), torch.tensor(5), {})

    def rank_main(rank: int) -> None:
        log = HookLog()

        def finalize(model: Any, num_tokens: Any) -> None:
            counts[rank] = num_tokens

        config = logged_config(log, 1, calculate_per_token_loss=per_token, finalize_model_grads_func=finalize)
        arguments = {**step_arguments(log.make_stages(config, 1), 3), "forward_step_func": forward_step}
        communicator = P2PCommunicator(ThreadGroup(rank, 2), config, network.transport(rank))
        get_forward_backward_func(2)(**arguments, p2p_communicator=communicator)

    run_ranks(2, rank_main, network.abort)
    if not per_token:
        assert counts == [None, None]
        return
    assert [int(tokens) for tokens in counts] == [0, 15]
    assert all(tokens.dtype == torch.int32 and tokens.dim() == 0 for tokens in counts)


def test_finalisation_is_called_as_its_signature_allows() -> None:
    calls: list[Any] = []

    def two(model: Any, num_tokens: Any) -> None:
        calls.append(("two",))

    def newest(model: Any, num_tokens: Any, **more: Any) -> None:
        calls.append(("newest", more))

    def older(model: Any, num_tokens: Any = None, pg_collection: Any = None) -> None:
        calls.append(("older", pg_collection))

    for function in (two, newest, older):
        settings = settings_of(finalize_model_grads_func=function)
        finalize_gradients(settings, [], 0, torch.device("cpu"), "groups", True)
    assert calls == [("two",), ("newest", {"pg_collection": "groups", "force_all_reduce": True}), ("older", "groups")]


class _Output(PipelineStage):
    """A last stage whose output layer leaves its weight gradient for the end."""

    post_process = True

    def __init__(self, log: list[str]) -> None:
        super().__init__(torch.nn.Linear(1, 1), SimpleNamespace())
        self.log = log

    def finish_embedding_wgrad_compute(self) -> None:
        self.log.append("embedding")


def test_deferred_embedding_gradients_are_finished_first() -> None:
    """Deferred weight gradients, then the reduction over data-parallel ranks (Megatron-LM#1012)."""
    log: list[str] = []
    settings = settings_of(
        defer_embedding_wgrad_compute=True, finalize_model_grads_func=lambda *_: log.append("finalize")
    )
    finalize_gradients(settings, [torch.nn.Linear(1, 1), _Output(log)], 0, torch.device("cpu"), None, False)
    assert log == ["embedding", "finalize"]


def test_deferral_without_anything_to_finish_is_refused() -> None:
    class Plain(PipelineStage):
        post_process = True

    settings = settings_of(defer_embedding_wgrad_compute=True)
    with pytest.raises(
        ScheduleInputError, match=r"no model chunk of the last stage has finish_embedding_wgrad_compute"
    ):
        finalize_gradients(settings, [Plain(torch.nn.Linear(1, 1), settings)], 0, torch.device("cpu"), None, False)
