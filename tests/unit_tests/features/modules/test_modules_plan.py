"""Plans of pipelines of several modules: their edges, orders, and what ``verify_modules`` accepts and refuses."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import product
from typing import Any

import pytest

from megatron_pp import draw
from megatron_pp.errors import PlanError
from megatron_pp.features.modules.graph import Module, ModuleGraph, module_graphs
from megatron_pp.features.modules.modules_plan import (
    ModulesSpec,
    costs_of_modules,
    lowered_modules,
    modules_plan,
    modules_spec,
)
from megatron_pp.features.modules.modules_text import graphs_in
from megatron_pp.features.modules.modules_verify import verify_modules
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.instruction import BACKWARD, COMPUTE_OPS, FORWARD, SYNC_OPS, placed
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ON_NCCL, ONE_QUEUE, STATIC_BUFFERS, Plan
from megatron_pp.plan.simulate.simulator import simulate
from testkit.models.module_grids import encoders_before, module_on
from testkit.sweeps import drawn

TWO = encoders_before(module_on("llm", 1), module_on("vision"))[0]
BOTH_ON_ONE = encoders_before(module_on("llm", 1), module_on("vision"), module_on("audio"))[0]
LINES = encoders_before(module_on("llm", 4, pp=3), module_on("vision", pp=3), module_on("audio", 3))[0]
FAN_IN = encoders_before(module_on("llm", 4, pp=2), module_on("vision", pp=2, dp=2))[0]
FAN_OUT = encoders_before(module_on("llm", 1, pp=2, dp=3), module_on("vision"))[0]
TENSOR = encoders_before(module_on("llm", 4, pp=2, dp=2, tp=2), module_on("vision", pp=2, tp=2))[0]
BRANCHES = module_graphs(
    [module_on("vision"), module_on("llm", 1, pp=2), module_on("images", 3)],
    {"vision": ["llm", "images"], "llm": ["images"]},
)[0]
IN_BUBBLES = encoders_before(
    module_on("llm", pp=2)._replace(chunk=1), module_on("vision", dp=2)._replace(times=(0.5, 1.0))
)[0]
ON_ONE_STAGE = encoders_before(module_on("llm", pp=2, tp=2)._replace(chunk=1), module_on("vision", dp=2))[0]
GRAPHS = {
    "on_one_stage": ON_ONE_STAGE,
    "in_bubbles": IN_BUBBLES,
    "two": TWO,
    "both_on_one": BOTH_ON_ONE,
    "lines": LINES,
    "fan_in": FAN_IN,
    "fan_out": FAN_OUT,
    "tensor": TENSOR,
    "branches": BRANCHES,
}


@pytest.fixture
def graph(request: pytest.FixtureRequest) -> ModuleGraph:
    return GRAPHS[request.param]


CHUNKED = ["on_one_stage", "in_bubbles"]
"""Graphs whose orders are searched for. A run draws one of them."""
SMALL = ["two", "both_on_one"]
# A run changes the plans of the small graphs, and of three others with one chunk, which it draws.
small = pytest.mark.parametrize(
    "graph",
    [
        *SMALL,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in drawn([name for name in GRAPHS if name not in (*CHUNKED, *SMALL)], 3)
        ),
    ],
    indirect=True,
)


def edges_in_words(graph: ModuleGraph) -> list[str]:
    return [f"{e.module} {e.source}>{e.target} {e.part} {e.place}" for e in graph.activations if e.bridge]


def test_a_bridge_between_unequal_grids_cuts_and_joins_the_batch() -> None:
    assert edges_in_words(FAN_IN) == ["vision 1>4 (0, 1) (0, 2)", "vision 3>4 (0, 1) (1, 2)"]
    assert edges_in_words(FAN_OUT) == [f"vision 0>{1 + 2 * k} ({k}, 3) (0, 1)" for k in range(3)]
    back = [(e.source, e.target, e.part, e.place) for e in FAN_IN.gradients if e.bridge]
    assert back == [(4, 1, (0, 2), (0, 1)), (4, 3, (1, 2), (0, 1))]


def test_leaders_send_to_every_rank_of_a_tensor_parallel_group() -> None:
    assert [(e.source, e.target) for e in TENSOR.activations if e.bridge] == [(3, 4), (3, 5), (3, 8), (3, 9)]
    assert [(e.source, e.target) for e in TENSOR.gradients if e.bridge] == [(4, 2), (4, 3), (8, 2), (8, 3)]


def test_names_of_messages_are_unique_over_activations_and_gradients() -> None:
    """Where replicas are on the ranks of a tensor-parallel group, both go from one rank to the other."""
    edges = [*ON_ONE_STAGE.activations, *ON_ONE_STAGE.gradients]
    ends = Counter((edge.source, edge.target) for edge in edges if edge.bridge and edge.travels)
    assert ends[(0, 1)] == 2
    assert len({edge.name for edge in edges}) == len(edges)
    same = [edge._replace(name="same") if (edge.source, edge.target) == (0, 1) else edge for edge in edges]
    count = len(ON_ONE_STAGE.activations)
    graph = dataclasses.replace(ON_ONE_STAGE, activations=tuple(same[:count]), gradients=tuple(same[count:]))
    with pytest.raises(PlanError, match=r"vision 0>1 and vision 0>1 have the same name .*same; rename a module"):
        modules_plan(modules_spec(graph, 2))


def test_modules_on_the_same_ranks_get_one_tensor_for_both() -> None:
    modules = [module_on("vision"), module_on("a", 1), module_on("b", 1), module_on("llm", 2)]
    (graph,) = module_graphs(modules, {"vision": ["a", "b"], "a": ["llm"], "b": ["llm"]})
    assert edges_in_words(graph) == ["vision 0>1 (0, 1) (0, 1)", "a 1>2 (0, 1) (0, 1)", "b 1>2 (0, 1) (0, 1)"]


def test_replicas_that_exchange_nothing_have_graphs_of_their_own() -> None:
    graphs = encoders_before(module_on("llm", 4, pp=2, dp=2), module_on("vision", dp=4))
    assert [graph.members for graph in graphs] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [graph.stages for graph in graphs] == [3, 3]


def test_depths_are_those_of_the_longest_way() -> None:
    assert LINES.stages == 6
    assert LINES.depths == (0, 1, 2, 0, 3, 4, 5)
    assert LINES.leading == (True, False, False, True, True, False, False)
    assert BRANCHES.depths == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("modules", "topology", "why"),
    [
        ([module_on("vision"), module_on("llm", 1)], {"vision": ["lm"]}, "names a module 'lm'"),
        ([module_on("vision"), module_on("llm", 1)], {"vision": ["llm"], "llm": ["vision"]}, "in a circle"),
        ([module_on("vision", dp=2), module_on("llm", 2, dp=3)], {"vision": ["llm"]}, "2 data-parallel replicas"),
        ([module_on("vision"), module_on("llm")], {"vision": ["llm"]}, "rank 0 has the last stage of vision"),
        ([module_on("vision"), module_on("llm", 1)._replace(times=(0, 1))], {}, "finite and above 0"),
        ([module_on("a"), module_on("b", 1), module_on("a_b", pp=2)], {"a": ["b"]}, "have the same name"),
        (  # The same tensor for both, of which two gradients would come back.
            [module_on("vision"), module_on("a", 1, tp=2), module_on("b", 2, tp=2)],
            {"vision": ["a", "b"]},
            r"rank 2 would receive two tensors of module vision in one forward \(for a and for b\)",
        ),
        (  # From its own stage before, and from the other replica.
            [module_on("vision", dp=2, pp=3), Module("llm", (((4,),), ((6,),)))],
            {"vision": ["llm"]},
            r"rank 4 would receive two tensors of module vision .* \(for its next stage and for llm\)",
        ),
        ([Module("llm", (((0, 1), (2,)),))], {}, "llm needs stages of one number of tensor-parallel ranks"),
        ([Module("llm", (((0,),), ((0,),)))], {}, "rank 0 is in module llm 2 times"),
    ],
)
def test_impossible_topologies_are_refused(modules: list, topology: dict, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        module_graphs(modules, topology)


def test_modules_that_wait_for_each_other_on_shared_ranks_are_refused() -> None:
    """Both ranks have a stage of both modules, and one forward for both."""
    graph = encoders_before(module_on("llm", pp=2), module_on("vision", pp=2))[0]
    with pytest.raises(PlanError, match=r"rank 0 waits for F0.0 of rank 1, which never comes.*in a circle"):
        modules_plan(modules_spec(graph, 2))


def test_chunks_that_wait_for_each_other_are_refused() -> None:
    audio = module_on("audio")._replace(chunk=1)
    graph = encoders_before(module_on("llm", pp=2), module_on("vision", pp=2), audio)[0]
    with pytest.raises(PlanError, match="in a circle"):
        modules_plan(modules_spec(graph, 2))


@pytest.mark.parametrize(
    "text",
    [
        "vision*1/2=0+1/2+3; llm#1*4/8=0+1,2+3; vision>llm",
        "vision*1/2=0/1/2/3; llm#1*4/8=0+1,2+3; vision>llm",
        "vision*3/1=0+1; llm#1=0+1,2+3,4+5; vision>llm",
    ],
)
@pytest.mark.parametrize("microbatches", [3, 8])
def test_tensor_parallel_ranks_run_in_one_order_in_which_their_collectives_meet(text: str, microbatches: int) -> None:
    (graph,) = graphs_in(text)
    plan = modules_plan(modules_spec(graph, microbatches))
    for ranks in zip(range(0, graph.size, 2), range(1, graph.size, 2), strict=True):
        one, other = ([(at.op, at.chunk, at.mb) for at in plan.orders[rank]] for rank in ranks)
        assert one == other, ranks


def test_stages_on_ranks_that_are_tensor_parallel_in_another_module_are_refused_where_orders_differ() -> None:
    (graph,) = graphs_in("vision*5/1=0,1; llm#1*4/8=0+1,2+3; vision>llm")
    with pytest.raises(PlanError, match=r"ranks 0, 1 are tensor-parallel in llm.*put these stages on other ranks"):
        modules_plan(modules_spec(graph, 8))


def test_chunks_whose_forwards_alone_wait_for_each_other_are_refused() -> None:
    """In a tensor-parallel group the last rank sends activations, and the first rank sends gradients."""
    graph = graphs_in("a=0+1; b=2; c=3+1; d#1=4; e=4; a>b; b>c; d>c; e>c")[0]
    with pytest.raises(PlanError, match=r"chunk 0 of rank 1 waits for itself.*in a circle"):
        modules_plan(modules_spec(graph, 2))


def test_modules_that_exchange_nothing_do_not_lengthen_each_others_warm_up() -> None:
    short, long = graphs_in("a=0,1; b=2,3,4,5")
    assert (short.stages, long.stages) == (2, 4)
    assert "".join(at.op for at in modules_plan(modules_spec(short, 3)).orders[0]) == "FFBFBB"


FIELDS = [{}, {"release_after": 3}, {"forward_only": True}, {"variable_shapes": True}]
DEVICES = [(), (ONE_QUEUE,), ON_NCCL, (ONE_QUEUE, DEVICE_SYNC)]


def specs(graph: ModuleGraph) -> list[ModulesSpec]:
    choices = product(FIELDS, DEVICES, (1, 3, 7))
    return [modules_spec(graph, count, device=device, **fields) for fields, device, count in choices]


@pytest.mark.slow
@pytest.mark.parametrize(
    "graph", [*(name for name in GRAPHS if name not in CHUNKED), *drawn(CHUNKED, 1)], indirect=True
)
def test_every_plan_is_proven(graph: ModuleGraph) -> None:
    """Where orders are searched for, which takes most of the time, specs that differ in what is lowered alone share one
    search."""
    searched: dict[tuple[int, bool], Any] = {}
    for spec in specs(graph):
        key = spec.num_microbatches, spec.forward_only
        if key in searched:
            certificate = verify_modules(lowered_modules(spec, searched[key])).certificate
        else:
            plan = modules_plan(spec)
            certificate = plan.certificate
            if graph.num_chunks > 1:
                searched[key] = plan.orders
        assert certificate is not None
        assert set(spec.device) < set(certificate.rules)


def test_the_order_is_one_forward_one_backward_behind_a_warm_up_by_depth() -> None:
    plan = modules_plan(modules_spec(LINES, 8))
    for rank, order in enumerate(plan.orders):
        ahead = LINES.stages - LINES.depths[rank] - 1
        ops = "".join(at.op for at in order)
        assert ops == "F" * ahead + "FB" * (8 - ahead) + "B" * ahead


def test_the_simulator_finds_the_bubble_of_the_longest_way() -> None:
    """(stages - 1) warm-up slots of a forward and a backward, as in one pipeline of as many ranks."""
    plan = modules_plan(modules_spec(LINES, 8))
    step = simulate(plan, StageCosts.uniform(LINES.size, 1, 1, 1))
    timeline = draw.simulated_timeline(step, title="vision and audio before llm")
    assert timeline.end == (8 + LINES.stages - 1) * 3
    assert [len(lane.compute) for lane in timeline.lanes] == [16] * LINES.size
    encoder_slower = simulate(plan, StageCosts.per_stage([2] * 4 + [1] * 3, [1] * 7, [1] * 7))
    assert draw.simulated_timeline(encoder_slower).end > timeline.end


def to_be_harmed(graph: ModuleGraph, **fields: Any) -> Plan:
    """Each change of it is verified: of large graphs, with two microbatches in place of three."""
    return lowered_modules(modules_spec(graph, 3 if graph.size <= 4 else 2, **fields))


def without(plan: Plan, rank: int, k: int) -> Plan:
    program = plan.programs[rank]
    return with_program(plan, rank, (*program[:k], *program[k + 1 :]))


def with_program(plan: Plan, rank: int, program: tuple) -> Plan:
    programs = list(plan.programs)
    programs[rank] = program
    return dataclasses.replace(plan, programs=tuple(programs))


@small
@pytest.mark.parametrize("fields", [{}, {"variable_shapes": True}, {"forward_only": True}])
def test_every_instruction_is_needed_once(graph: ModuleGraph, fields: dict) -> None:
    plan = to_be_harmed(graph, **fields)
    for rank, program in enumerate(plan.programs):
        for k, at in enumerate(program):
            with pytest.raises(PlanError):
                verify_modules(without(plan, rank, k))
            if at.op not in SYNC_OPS:
                with pytest.raises(PlanError):
                    verify_modules(with_program(plan, rank, (*program[: k + 1], at, *program[k + 1 :])))


@small
def test_transfers_of_another_peer_edge_or_microbatch_are_refused(graph: ModuleGraph) -> None:
    plan = to_be_harmed(graph)
    for rank, program in enumerate(plan.programs):
        for k, at in enumerate(program):
            changes = [{"mb": at.mb + 1}, {"chunk": 1}, {"part": 0}, {"stage": at.stage + 5}]
            if at.op not in COMPUTE_OPS | SYNC_OPS:
                changes += [{"peer": at.peer + 1}, {"tensor": at.tensor + "x"}]
            for change in [] if at.op in SYNC_OPS else changes:
                changed = (*program[:k], at._replace(**change), *program[k + 1 :])
                with pytest.raises(PlanError):
                    verify_modules(with_program(plan, rank, changed))


def test_sends_that_meet_other_sends_are_a_deadlock_across_modules() -> None:
    """The language model waits for its gradient's release before it receives; the encoder sends first."""
    plan = lowered_modules(modules_spec(TWO, 2))
    program = list(plan.programs[1])
    receive = next(at for at in program if str(at).startswith("WAIT_F0.1"))
    free = next(at for at in program if str(at).startswith("FREE_B0.0"))
    post = next(at for at in program if str(at).startswith("RECV_F0.1"))
    for at in (receive, post, free):
        program.remove(at)
    sent = next(k for k, at in enumerate(program) if str(at).startswith("SEND_B0.0"))
    program[sent + 1 : sent + 1] = [free, post, receive]
    verify_modules(with_program(plan, 1, tuple(program)))
    first = list(plan.programs[0])
    released = next(at for at in first if str(at).startswith("FREE_F0.1"))
    received = next(at for at in first if str(at).startswith("RECV_B0.0"))
    for at in (released, received):
        first.remove(at)
    wait = next(k for k, at in enumerate(first) if str(at).startswith("WAIT_B0.0"))
    first[wait:wait] = [released, received]
    harmed = with_program(with_program(plan, 1, tuple(program)), 0, tuple(first))
    with pytest.raises(PlanError, match=r"deadlock under rendezvous: rank 0 waits at FREE_F0.1.*rank 1 waits"):
        verify_modules(harmed)


def test_memory_counts_the_messages_of_every_edge() -> None:
    verdict = verify_modules(modules_plan(modules_spec(BOTH_ON_ONE, 4)))
    alone = verify_modules(modules_plan(modules_spec(TWO, 4)))
    assert verdict.ranks[0].each.outputs == 2 * alone.ranks[0].each.outputs
    assert verdict.ranks[1].each.inputs == 2 * alone.ranks[1].each.inputs
    ends = Counter(at.op for program in modules_plan(modules_spec(TWO, 4)).programs for at in program)
    assert ends[FORWARD] == ends[BACKWARD] == 8


def encoders_first(graph: ModuleGraph, microbatches: int) -> list:
    """All forwards of chunk 0, 1F1B of chunk 1 on a line of all ranks, all backwards of chunk 0."""
    size, every = graph.size, range(microbatches)
    rows = []
    for rank in range(size):
        ahead = min(size - rank - 1, microbatches)
        line = [(FORWARD, mb, 1) for mb in range(ahead)]
        line += [one for mb in every[ahead:] for one in ((FORWARD, mb, 1), (BACKWARD, mb - ahead, 1))]
        line += [(BACKWARD, mb, 1) for mb in every[microbatches - ahead :]]
        row = [*((FORWARD, mb, 0) for mb in every), *line, *((BACKWARD, mb, 0) for mb in every)]
        rows.append(tuple(placed(op, k * size + rank, mb, -1, k) for op, mb, k in row))
    return rows


@pytest.mark.parametrize(("size", "microbatches", "time"), [(2, 4, 0.5), (4, 8, 0.5), (4, 8, 0.25), (4, 16, 0.25)])
def test_encoders_run_in_the_bubbles_of_the_language_model(size: int, microbatches: int, time: float) -> None:
    vision = module_on("vision", dp=size)._replace(times=(time, 2 * time))
    graph = encoders_before(module_on("llm", pp=size)._replace(chunk=1), vision)[0]
    spec, costs = modules_spec(graph, microbatches), costs_of_modules(graph)
    first = lowered_modules(spec, encoders_first(graph, microbatches))
    verify_modules(first)
    alone = 3 * (microbatches + size - 1)
    assert simulate(first, costs).makespan == alone + 3 * time * microbatches
    found = simulate(modules_plan(spec), costs)
    # With the first forward and the last backward of the encoder, or without a bubble.
    least = max(alone + 3 * time, 3 * microbatches * (1 + time))
    half = (least + simulate(first, costs).makespan) / 2
    assert least <= found.makespan <= half, "of what can be hidden, half is or more"
    assert len(draw.simulated_timeline(found).lanes[0].compute) == 4 * microbatches


def test_a_rank_with_fewer_chunks_runs_only_its_own_chunks() -> None:
    graph = encoders_before(module_on("llm", pp=2)._replace(chunk=7), module_on("vision"))[0]
    assert [[chunk.modules for chunk in chunks] for chunks in graph.chunks] == [[("vision",), ("llm",)], [("llm",)]]
    for forward_only in (False, True):
        plan = modules_plan(modules_spec(graph, 4, forward_only=forward_only))
        assert {at.chunk for at in plan.programs[1]} == {0}


def test_orders_of_slow_encoders_are_lowered_for_devices_too() -> None:
    """Where operations are of unequal length, ranks come to their boundaries at different times."""
    vision = module_on("vision", dp=2)._replace(times=(0.25, 1.0))
    graph = encoders_before(module_on("llm", pp=2)._replace(chunk=1, times=(0.1, 1.0)), vision)[0]
    for device in DEVICES:
        modules_plan(modules_spec(graph, 7, device=device, variable_shapes=True))


def test_a_program_that_is_not_the_plans_order_is_refused() -> None:
    plan = lowered_modules(modules_spec(TWO, 3))
    with pytest.raises(PlanError, match="rank 0: its program does not run the plan's order"):
        verify_modules(dataclasses.replace(plan, orders=plan.orders[::-1]))


def test_a_backward_before_that_of_the_next_chunk_is_refused() -> None:
    plan = lowered_modules(modules_spec(IN_BUBBLES, 2))
    program = list(plan.programs[0])
    for op, chunk in ((BACKWARD, 0), (FORWARD, 1)):
        at = next(at for at in program if (at.op, at.chunk) == (op, chunk))
        before = next(one for one in program if (one.op, one.chunk) == (op, 1 - chunk))
        changed = [one for one in program if one != at]
        changed.insert(changed.index(before), at)
        with pytest.raises(PlanError, match=f"it comes before that of chunk {1 - chunk}"):
            verify_modules(with_program(plan, 0, tuple(changed)))


def test_a_forward_or_backward_before_its_message_is_there_is_refused() -> None:
    plan = lowered_modules(modules_spec(TWO, 2))
    for rank, op, wait in ((1, FORWARD, "WAIT_F0.0"), (0, BACKWARD, "WAIT_B0.0")):
        program = list(plan.programs[rank])
        at = next(at for at in program if (at.op, at.mb) == (op, 0))
        program.remove(at)
        program.insert(next(k for k, one in enumerate(program) if str(one).startswith(wait)), at)
        with pytest.raises(PlanError, match=r"it comes before its .* is there \(message"):
            verify_modules(with_program(plan, rank, tuple(program)))


def test_static_buffers_are_not_claimed() -> None:
    with pytest.raises(PlanError, match="static_buffers is not checked"):
        modules_plan(modules_spec(TWO, 4, device=(STATIC_BUFFERS,)))
