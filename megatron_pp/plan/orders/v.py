"""Families on the V placement: two chunks a rank.

Some repeat a pattern (arXiv 2405.15362, sections 3 and 4) with a period of 6 slots, the work of a microbatch on a rank:
two forwards, two backwards, two weight gradients. The others are written down phase by phase.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from megatron_pp.plan.costs.stage_costs import MemoryModel, StageCosts
from megatron_pp.plan.ir.dataflow import RESULT_OF
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, instruction
from megatron_pp.plan.ir.placement import V_SHAPE, Placement
from megatron_pp.plan.orders.family import Family, Order, Repeats, Shape, every_microbatch, w
from megatron_pp.plan.orders.list_scheduler import UNKNOWN, Problem, Rules, Scheduled, schedule

DUALPIPE_V = "dualpipe_v"

PERIOD = 6
Offsets = tuple[int, int, int, int]  # slots of the first microbatch: F of chunk 0, F of 1, backward of 1, backward of 0
OffsetsOf = Callable[[int, int], Offsets]  # of (P, rank)
_Slots = dict[tuple[str, int, int], float]  # of (FORWARD or BACKWARD, chunk, microbatch)


def pattern_slots(offsets: Offsets, microbatches: int) -> _Slots:
    """The pattern of one rank, repeated for every microbatch."""
    kinds = ((FORWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, 0))
    first = dict(zip(kinds, offsets, strict=True))
    return {(*kind, mb): slot + PERIOD * mb for kind, slot in first.items() for mb in range(microbatches)}


def _squeezed(shape: Shape, offsets: OffsetsOf, split: bool) -> list[Order]:
    """The orders of the repeated pattern, without its empty slots."""
    size = shape.pipeline_size
    return [_rank_squeezed(offsets(size, rank), shape.num_microbatches, split) for rank in range(size)]


def _rank_squeezed(offsets: Offsets, microbatches: int, split: bool) -> Order:
    """Operations in the order of their slots, weight gradients in the first free slot after their backward."""
    slots = sorted((slot, *operation) for operation, slot in pattern_slots(offsets, microbatches).items())
    weights = []
    if split:
        busy = {slot % PERIOD for slot in offsets}
        last = -1.0
        for slot, op, chunk, mb in slots:
            if op == BACKWARD:
                last = max(last, slot) + 1
                while last % PERIOD in busy:
                    last += 1
                weights.append((last, WEIGHT_GRAD, chunk, mb))
    backward = INPUT_GRAD if split else BACKWARD
    return [instruction(backward if op == BACKWARD else op, c, mb) for _, op, c, mb in sorted(slots + weights)]


def _shortest(shape: Shape, offsets: OffsetsOf, chunks_in_memory: int, rules: Iterable[Rules]) -> list[Order]:
    """The shortest order that the greedy scheduler makes of the pattern under ``rules``, in unit times. It fills
    warm-up and cool-down, in which the pattern has empty slots. If every rule gets stuck, it is the pattern's own
    order.
    """
    size = shape.pipeline_size
    microbatches = shape.num_microbatches
    placement = Placement(V_SHAPE, size, 2)
    memory = MemoryModel.in_chunks(placement, chunks_in_memory)
    problem = Problem(placement, microbatches, memory, StageCosts.uniform(placement.num_stages))
    slots = [pattern_slots(offsets(size, rank), microbatches) for rank in range(size)]
    best: Scheduled | None = None
    for rule in rules:
        found = schedule(problem, slots, rule, UNKNOWN if best is None else best.makespan)
        if found is not None and (best is None or found.makespan < best.makespan):
            best = found
    return _squeezed(shape, offsets, split=True) if best is None else best.orders


def v_half_offsets(size: int, rank: int) -> Offsets:
    pause = 3 if size % 2 == 0 else 0
    return 2 * rank, 3 * size - 2 - rank, 3 * size - 1 + pause + 2 * rank, 6 * size - 2 + pause - rank


def v_half(shape: Shape) -> list[Order]:
    """Half of 1F1B's memory, half of its bubble: floor((P+2)/2) microbatches in memory.

    Chunk 0 goes down the ranks at half speed and chunk 1 comes back at full speed, forwards and backwards, so that
    ranks have slack where V-Min has none. Warm-up and cool-down are filled greedily (section 4.3's reordering), by the
    best of a few rules.
    """
    rules = [Rules(ahead=ahead, reserve=reserve) for ahead in (0, 2, 5) for reserve in (0, 1, 2)]
    return _shortest(shape, v_half_offsets, 2 * ((shape.pipeline_size + 2) // 2), rules)


def v_min_offsets(size: int, rank: int) -> Offsets:
    pause = 2 if size % 3 == 0 else 0
    return rank, 2 * size - 1 - rank, 2 * size + pause + rank, 4 * size + pause - 1 - rank


def v_min(shape: Shape) -> list[Order]:
    """A third of 1F1B's memory, two thirds of its bubble: floor((P+4)/3) microbatches in memory.

    Forwards and backwards follow each other without a pause over all 2P stages, the shortest life of a microbatch. The
    pause of two slots at the turn, where P is a multiple of 3, keeps the repeated pattern from colliding with itself.
    """
    return _squeezed(shape, v_min_offsets, split=True)


def one_f_one_b_v_offsets(size: int, rank: int) -> Offsets:
    return rank, 2 * size - 1 - rank, _backward_slot(size, rank), _backward_slot(size, 2 * size - 1 - rank)


def _backward_slot(size: int, k: int) -> int:
    """The slot of the k-th backward, counted from the last stage."""
    first = 2 * size + (3 if size % 3 == 0 else 0)
    pauses = (k + (1 - size) % 3) // 3
    return first + 2 * k + 3 * pauses


def one_f_one_b_v(shape: Shape) -> list[Order]:
    """1F1B's bubble for two thirds of its memory, backwards unsplit: floor((2P+3)/3) microbatches in memory.

    A backward takes two slots of the pattern. Forwards pass from stage to stage without a pause; backwards pause for
    three slots after every third stage, which keeps the repeated pattern from colliding with itself.
    """
    return _squeezed(shape, one_f_one_b_v_offsets, split=False)


def _in_phases(phases: Iterable[tuple[int, str]]) -> Order:
    """An order in the papers' phases of (repetitions, operations): "F0" is the forward of chunk 0's next microbatch,
    "W" the oldest weight gradient that was left.
    """
    order: Order = []
    done: Counter[tuple[str, int]] = Counter()
    weights: Order = []
    for times, operations in phases:
        for name in operations.split() * times:
            if name == WEIGHT_GRAD:
                order.append(weights.pop(0))
                continue
            op = name[0]
            chunk = int(name[1])
            mb = done[(RESULT_OF[op], chunk)]
            done[(RESULT_OF[op], chunk)] += 1
            order.append(instruction(op, chunk, mb))
            if op == INPUT_GRAD:
                weights.append(w(chunk, mb))
    return order


def zb_v(shape: Shape) -> list[Order]:
    """No bubble within a rank's own span for 1F1B's memory, if F, B and W take the same time: P microbatches in memory.
    Below M = 2P the phases leave gaps, which the greedy scheduler fills under the same memory.
    """
    size = shape.pipeline_size
    microbatches = shape.num_microbatches
    if microbatches >= 2 * size:
        return [_in_phases(_zb_v_phases(size, microbatches, rank)) for rank in range(size)]
    rules = [Rules(ahead=PERIOD * size * share / 2, reserve=reserve) for share in (1, 2) for reserve in (0, 1)]
    return _shortest(shape, v_half_offsets, 2 * size, rules)


def _zb_v_phases(size: int, microbatches: int, rank: int) -> list[tuple[int, str]]:
    return [
        (2 * (size - rank) - 1, "F0"),
        (rank, "F1 F0"),
        (size - rank, "F1 I1 W"),  # the first activation is back from the turn
        (microbatches - 2 * size + rank + 1, "F0 I0 W F1 I1 W"),
        (size - rank - 1, "I0 W F1 I1 W"),
        (rank, "I0 I1"),  # gradients first: the ranks in front wait for them
        (size - rank, "I0 W"),
        (2 * rank, "W"),
    ]


def dualpipe_v(shape: Shape) -> list[Order]:
    """DeepSeek-V3's DualPipe, folded onto the V placement ("cut-in-half", as its authors call it).

    In its fourth and fifth phases a forward is next to the full backward of another microbatch, to run the two together
    (``overlapped_forward_backward``): one's communication hides behind the other's compute. Weight gradients are split
    off only where they fill bubbles. 2P + 1 chunks are in memory. Below M = 2P ZB-V's order is used.
    """
    size = shape.pipeline_size
    microbatches = shape.num_microbatches
    if microbatches < 2 * size:
        return zb_v(shape)
    return [_in_phases(_dualpipe_phases(size, microbatches, rank)) for rank in range(size)]


def _dualpipe_phases(size: int, microbatches: int, rank: int) -> list[tuple[int, str]]:
    behind = size - 1 - rank  # ranks between this one and the turn of the V
    half, odd = divmod(rank + 1, 2)
    return [
        (2 * behind, "F0"),
        (rank + 1, "F0 F1"),
        (behind, "I1 W F1"),
        (microbatches - 2 * size + rank + 1, "F0 B1 F1 B0"),
        (behind, "B1 F1 B0"),
        *((half, "B1 B0"), (odd, "B1 I0"), (half, "I1 I0")),  # half of them split, for the waits that follow
        (behind, "W I0"),
        (rank + 1, "W"),
    ]


def _dualpipe_remark(shape: Shape) -> str:
    """A sentence if the phases do not fit; empty if they do."""
    least = 2 * shape.pipeline_size
    if shape.num_microbatches >= least:
        return ""
    return (
        f"DualPipeV needs at least 2 P = {least} microbatches and there are {shape.num_microbatches}: "
        "ZB-V's order, on the same placement, is used instead"
    )


def _from_twice_the_ranks(shape: Shape) -> Repeats:
    """The steady state from 2 P microbatches on; with fewer, other orders are used."""
    return Repeats(1, 2 * shape.pipeline_size)


_family = partial(Family, placement=V_SHAPE, chunks=2, splits_weight=True)

FAMILIES = (
    _family(
        "zb_v",
        zb_v,
        "arXiv 2401.10241, section 6",
        "no bubble within a rank's span (counts on the optimizer bypass) for 1F1B's memory; V placement",
        repeats=_from_twice_the_ranks,
    ),
    _family("v_half", v_half, "arXiv 2405.15362, section 4", "half of 1F1B's memory and bubble; V placement"),
    _family(
        "v_min",
        v_min,
        "arXiv 2405.15362, section 4",
        "a third of 1F1B's memory, two thirds of its bubble; V placement",
        repeats=every_microbatch,
    ),
    _family(
        "1f1b_v",
        one_f_one_b_v,
        "arXiv 2405.15362, appendix",
        "1F1B's bubble for two thirds of its memory, backwards unsplit; V placement",
        splits_weight=False,
        repeats=every_microbatch,
    ),
    _family(
        DUALPIPE_V,
        dualpipe_v,
        "arXiv 2412.19437, section 3.2.1",
        "forwards paired with full backwards, one's communication behind the other's compute; V placement",
        remark=_dualpipe_remark,
        repeats=_from_twice_the_ranks,
    ),
)
