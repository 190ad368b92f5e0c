"""no_sync, grad_sync_func, param_sync_func and finalize_model_grads_func fire where Megatron-core fires them.

The expected lines are written by hand; ``functional_tests/test_hooks_of_megatron.py`` compares with the lines of
Megatron-core's own schedules, for more sizes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.engine.gradient_hooks import SyncHooks
from megatron_pp.runtime.model_checks.unsynchronised import unsynchronised
from megatron_pp.runtime.own_host import finalize_gradients
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from megatron_pp.testing.toy import ToyBlock, toy_config
from testkit.models.hook_log import SHAPE, HookLog, logged_config, logged_forward_step, step_arguments

# -- ours -------------------------------------------------------------------------------------------------------------


def settings_of(**fields: Any) -> StepSettings:
    return StepSettings.from_config(SimpleNamespace(**fields))


def run_logged(
    size: int,
    chunks: int,
    num_microbatches: int,
    fields_of: Callable[[int, HookLog], dict[str, Any]] = lambda rank, log: {},
    arguments: dict[str, Any] | None = None,
    **fields: Any,
) -> list[HookLog]:
    """One step with further ``arguments``; what each rank wrote down. ``fields_of(rank, log)`` are more of a config."""
    network, arguments = MemoryNetwork(size), arguments or {}

    def rank_main(rank: int) -> HookLog:
        log = HookLog()
        config = logged_config(log, chunks, **fields, **fields_of(rank, log))
        communicator = P2PCommunicator(ThreadGroup(rank, size), config, network.transport(rank))
        before, stages = dict(vars(config)), log.make_stages(config, chunks)
        function = get_forward_backward_func(size, chunks if chunks > 1 else None)
        function(**{**step_arguments(stages, num_microbatches), "p2p_communicator": communicator, **arguments})
        assert log.inside == 0, "no_sync was left open"
        assert vars(config) == before, "Megatron replaces a single function by a list of them in the user's config"
        return log

    return run_ranks(size, rank_main, network.abort)


# -- by hand ----------------------------------------------------------------------------------------------------------

BY_HAND: dict[str, tuple[tuple[int, int, int], dict[str, Any], list[str]]] = {
    "1f1b: the last backward of each rank synchronises as it goes": (
        (3, 1, 3),
        {},
        ["F0.0 F0.1 F0.2 B0.0 B0.1 B0.2+", "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2+", "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2+"],
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
        ["F0.0 F0.1 F1.0 F1.1 B1.0 B1.1+ B0.0 B0.1+", "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1+ B0.0 B0.1+"],
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
def test_hooks_fire_in_the_order_written_by_hand(
    sizes: tuple[int, int, int], fields: dict[str, Any], expected: list[str]
) -> None:
    assert [" ".join(log.lines) for log in run_logged(*sizes, **fields)] == expected


def test_without_a_pipeline_the_last_forward_is_outside_no_sync() -> None:
    """Wrappers such as torch's DistributedDataParallel prepare the reduction in the forward."""
    inside = []

    def looking(data_iterator: Any, model: Any) -> Any:
        inside.append(model.inner.log.inside)
        return logged_forward_step(data_iterator, model)

    run_logged(1, 1, 3, arguments={"forward_step_func": looking})
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


@pytest.mark.parametrize("chunks", [1, 2])
def test_evaluation_fires_nothing(chunks: int) -> None:
    finalized: list[Any] = []
    hooks = {"explicit": True, "param_sync": True, "finalize_model_grads_func": lambda *of: finalized.append(of)}
    for log in run_logged(2, chunks, 3, arguments={"forward_only": True}, **hooks):
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

    def fields_of(rank: int, log: HookLog) -> dict[str, Any]:
        def timers(name: str, log_level: int | None = None) -> Any:
            write = log.write if name == "forward-backward" else lambda text: None
            return SimpleNamespace(start=lambda **_: write("start"), stop=lambda: write("stop"))

        def finalize(model: Any, num_tokens: Any, pg_collection: Any = None, force_all_reduce: bool = False) -> None:
            assert model == log.stages
            assert isinstance(model, list)
            assert pg_collection is groups
            assert log.inside == 0
            log.write(f"finalize {num_tokens} {force_all_reduce}")

        return {"timers": timers, "finalize_model_grads_func": finalize}

    for log in run_logged(2, 2, 2, fields_of, {"pg_collection": groups, "force_all_reduce": True}):
        assert log.lines[0] == "start"
        assert log.lines[-3:] == ["B0.1+", "finalize None True", "stop"]
        assert len(log.lines) == 2 * 2 * 2 + 3


@pytest.mark.parametrize("per_token", [False, True])
def test_finalisation_gets_the_tokens_of_the_step(per_token: bool) -> None:
    """An int tensor on every rank: the sum over microbatches on the last stage, 0 elsewhere; None unless asked for."""
    counts: dict[int, Any] = {}

    def forward_step(data_iterator: Any, model: Any) -> Any:
        return model(torch.ones(SHAPE)), lambda output: (output.sum(), torch.tensor(5), {})

    def fields_of(rank: int, log: HookLog) -> dict[str, Any]:
        return {"finalize_model_grads_func": lambda model, num_tokens: counts.update({rank: num_tokens})}

    run_logged(2, 1, 3, fields_of, {"forward_step_func": forward_step}, calculate_per_token_loss=per_token)
    if not per_token:
        assert counts == {0: None, 1: None}
        return
    assert {rank: int(tokens) for rank, tokens in counts.items()} == {0: 0, 1: 15}
    assert all(tokens.dtype == torch.int32 and tokens.dim() == 0 for tokens in counts.values())


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


@dataclass
class _Finalize:
    """A callable object that Python cannot hash."""

    model: torch.nn.Module

    def __call__(self, model: Any, num_tokens: Any, force_all_reduce: bool) -> None:
        assert force_all_reduce


def test_the_function_may_be_any_object_and_is_not_kept() -> None:
    model = torch.nn.Linear(1, 1)
    settings = settings_of(finalize_model_grads_func=_Finalize(model))
    finalize_gradients(settings, [model], 0, torch.device("cpu"), None, True)
    settings = settings_of(finalize_model_grads_func=partial(_Finalize(model)))
    finalize_gradients(settings, [model], 0, torch.device("cpu"), None, True)
    kept = weakref.ref(model)
    del model, settings
    gc.collect()
    assert kept() is None


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
    with pytest.raises(ScheduleInputError, match="no model chunk of the last stage has finish_embedding_wgrad_compute"):
        finalize_gradients(settings, [Plain(torch.nn.Linear(1, 1), settings)], 0, torch.device("cpu"), None, False)


# -- replicas and tied embeddings that nothing synchronises, where that can be seen ------------------------------------


class _Wrapper(torch.nn.Module):
    """Holds a module as DistributedDataParallel does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def no_sync(self) -> None: ...


def _hook(*given: Any) -> None: ...


def _stage() -> PipelineStage:
    return PipelineStage(ToyBlock(0), toy_config())


def _tied_by_parameter() -> PipelineStage:
    stage = _stage()
    stage.inner.linear.weight.shared_embedding = True
    return stage


def _tied_by_module() -> PipelineStage:
    stage = _stage()
    stage.inner.share_embeddings_and_output_weights = True
    return stage


def _sentences(
    chunk: torch.nn.Module, replicas: int = 1, pipeline_size: int = 2, kind: str = LOOP, **fields: Any
) -> list[str]:
    chunks = [chunk] if kind == LOOP else [chunk, _stage()]
    groups = SimpleNamespace(dp=ThreadGroup(0, replicas))
    settings = StepSettings.from_config(toy_config(**fields))
    placement = Placement(kind, pipeline_size, len(chunks))
    return list(unsynchronised(settings, chunks, placement, ThreadGroup(0, pipeline_size), groups))


def test_replicas_that_nothing_averages() -> None:
    [sentence] = _sentences(_stage(), replicas=4)
    assert "the 4 data-parallel replicas" in sentence
    assert "finalize_model_grads_func" in sentence


@pytest.mark.parametrize("tied", [_tied_by_parameter, _tied_by_module])
def test_tied_embeddings_that_nothing_sums(tied: Callable[[], PipelineStage]) -> None:
    [sentence] = _sentences(tied(), pipeline_size=3, grad_sync_func=_hook)
    assert "pipeline ranks 0 and 2 share" in sentence


def test_each_model_is_checked_only_once() -> None:
    stage = _stage()
    assert len(_sentences(stage, replicas=2)) == 1
    assert _sentences(stage, replicas=2) == []


def _wrapped_inside() -> PipelineStage:
    return PipelineStage(_Wrapper(ToyBlock(0)), toy_config())


@pytest.mark.parametrize(
    ("chunk", "case"),
    [
        (_stage, {}),
        (lambda: _Wrapper(_stage()), {"replicas": 2}),
        (_wrapped_inside, {"replicas": 2}),
        (_stage, {"replicas": 2, "grad_sync_func": _hook}),
        (_tied_by_module, {"replicas": 2, "finalize_model_grads_func": _hook}),
        (_tied_by_module, {"pipeline_size": 1}),
        (_tied_by_module, {"kind": V_SHAPE}),
    ],
    ids=["one_replica", "wrapped", "wrapped_inside", "grad_sync", "finalize", "one_rank", "both_ends_on_one_rank"],
)
def test_synchronised_gradients_cause_no_warning(chunk: Callable[[], torch.nn.Module], case: dict[str, Any]) -> None:
    assert _sentences(chunk(), **case) == []
