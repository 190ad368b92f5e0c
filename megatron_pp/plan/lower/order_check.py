"""Checks compute orders before they are lowered, because they may come from a file."""

from collections.abc import Iterable, Sequence
from itertools import product, zip_longest

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import RESULT_OF
from megatron_pp.plan.ir.feature import hooks_of, words_of_features, words_of_parts
from megatron_pp.plan.ir.instruction import NONE, Instruction, instruction, refusal, unjoined
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan, PlanSpec

_AFTER = {
    ins.BACKWARD: ins.FORWARD,
    ins.INPUT_GRAD: ins.FORWARD,
    ins.WEIGHT_GRAD: ins.INPUT_GRAD,
    **dict(zip(ins.PASSES, (ins.FORWARD, *ins.PASSES), strict=False)),
}
_OF_EVALUATION = frozenset({ins.FORWARD, *ins.PASSES[:1]})


def check_orders(orders: Sequence[Sequence[Instruction]], placement: Placement, spec: PlanSpec) -> None:
    """Raises PlanError unless every rank runs F of each (chunk, microbatch) or part once, and behind it B, or I and
    then W. If the placement has barriers, the passes of each microbatch must be there too. If ``spec`` is forward only,
    forwards (and the first pass) are enough. Parts must be in the order that their feature requires.
    """
    if len(orders) != placement.pipeline_size:
        raise PlanError(f"there are orders of {len(orders)} ranks; the pipeline has {placement.pipeline_size}")
    trains = not spec.forward_only or any(at.op not in _OF_EVALUATION for order in orders for at in order)
    passes = "".join(ins.PASSES if trains else ins.PASSES[:1]) if placement.barriers else ""
    for rank, order in enumerate(orders):
        _check_order(rank, order, placement.num_chunks, spec, trains, passes)


def _check_order(
    rank: int, order: Sequence[Instruction], chunks: int, spec: PlanSpec, trains: bool, passes: str
) -> None:
    microbatches, parts, added = spec.num_microbatches, spec.shape.parts, hooks_of(spec.added)
    ran = dict.fromkeys(product(range(chunks), range(microbatches), parts), "")  # cell -> its ops so far, in order
    for at in unjoined(order):
        op, _, mb, _, chunk, part, _, _ = at
        if op not in ins.SINGLE_COMPUTE_OPS:
            raise refusal(rank, at, f"an order holds compute alone: F, B, I and W{words_of_features('order_words')}")
        if op in ins.PASS_OPS and (chunk or op not in passes):
            raise refusal(rank, at, words_of_features("pass_words"))
        cell = (chunk, mb, part)
        ops = ran.get(cell)
        if ops is None:
            of = words_of_parts(parts, part)
            raise refusal(rank, at, f"chunks are 0..{chunks - 1}, microbatches 0..{microbatches - 1}{of}")
        if op in ops:
            raise refusal(rank, at, "it occurs twice in the order")
        before = _AFTER.get(op)
        if before is not None and before not in ops:
            raise refusal(rank, at, f"{at._replace(op=before)} has to come before it")
        for hooks in added if part != NONE else ():
            needed = hooks.comes_behind(spec, at)
            if needed is not None and RESULT_OF[op] not in map(RESULT_OF.get, ran[(chunk, mb, needed[0].part)]):
                raise refusal(rank, at, f"{needed[0]} has to come before it: {needed[1]}")
        ran[cell] = ops + op
    complete = ("FB", "FIW") if trains else ("F",)
    for cell, ops in ran.items():
        for op in passes if not cell[0] else "":
            if op not in ops:
                raise refusal(rank, instruction(op, *cell), "the order lacks it")
        if ops not in complete and "".join(op for op in ops if op not in ins.PASS_OPS) not in complete:
            raise _incomplete(rank, ops, cell, trains)


def _incomplete(rank: int, ops: str, cell: tuple[int, int, int], trains: bool) -> PlanError:
    """The error of an order that runs only ``ops`` of ``cell`` (chunk, microbatch, part)."""
    if ins.INPUT_GRAD in ops and ins.BACKWARD in ops:
        other = instruction(ins.INPUT_GRAD, *cell)
        return refusal(rank, instruction(ins.BACKWARD, *cell), f"{other} is there too: a backward is whole or split")
    backward = (ins.INPUT_GRAD, ins.WEIGHT_GRAD) if ins.INPUT_GRAD in ops else (ins.BACKWARD,)
    missing = next(op for op in (ins.FORWARD, *(backward if trains else ())) if op not in ops)
    return refusal(rank, instruction(missing, *cell), "the order lacks it")


def check_programs(plan: Plan, programs: Iterable[Iterable[Instruction]]) -> None:
    """Raises PlanError if the compute of one of ``programs`` is not the plan's order. A plan may have no orders. The
    programs must be complete (``check_rank``); then an order with the same operations is complete too.
    """
    if not plan.orders:
        return
    spec = plan.spec
    if spec.forward_only:  # an evaluation does not run all of its order
        check_orders(plan.orders, plan.placement, spec)
    for rank, (order, program) in enumerate(zip_longest(plan.orders, programs, fillvalue=())):
        wanted, found = run_of(order, spec), _compute_of(program)
        if wanted == found:
            continue
        check_orders(plan.orders, plan.placement, spec)
        one, other = next((a, b) for a, b in zip_longest(wanted, found, fillvalue="nothing more") if a != b)
        raise PlanError(f"rank {rank}: the plan's order has {one} where its program runs {other}")


def run_of(order: Iterable[Instruction], spec: PlanSpec) -> list[Instruction]:
    """The operations of ``order`` that a plan of ``spec`` runs."""
    run = unjoined(order)
    return [at for at in run if at.op in _OF_EVALUATION] if spec.forward_only else list(run)


def _compute_of(program: Iterable[Instruction]) -> list[Instruction]:
    run = (at for at in program if at.op in ins.COMPUTE_OPS)
    return [one for at in run for one in (ins.operations(at) if at.members else (at,))]
