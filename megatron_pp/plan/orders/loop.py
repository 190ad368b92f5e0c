"""Families on the loop placement.

GPipe, 1F1B, eager 1F1B, interleaved 1F1B and breadth-first keep backwards whole, and run them in the order of the
forwards of their chunk, so that gradients are added up in one order and are equal to the last bit from family to
family. Zero-bubble families (arXiv 2401.10241, section 2) take the weight gradients out of the backwards and put them
where the bubble was.
"""

import math
from dataclasses import replace
from functools import partial

from megatron_pp.plan.ir.dataflow import RESULT_OF, inputs_of
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, Instruction
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.orders.family import Family, Order, Repeats, Shape, b, every_group, every_microbatch, f, i, w

ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved_1f1b"
COMBINED = "combined_1f1b"
SEQ_1F1B = "seq_1f1b"
INTERLEAVED_SEQ = "interleaved_seq_1f1b"


def breadth_first(shape: Shape) -> list[Order]:
    """Every chunk runs all its microbatches before the next chunk starts, backwards likewise in reverse. Largest memory
    (V M chunks), but each chunk's parameters and gradients are touched in one stretch, which suits sharded data
    parallelism. With one chunk it is GPipe, whose paper's figure runs backwards in reverse.
    """
    chunks, mbs = range(shape.num_chunks), range(shape.num_microbatches)
    order = [f(c, m) for c in chunks for m in mbs] + [b(c, m) for c in reversed(chunks) for m in mbs]
    return [order] * shape.pipeline_size


def one_f_one_b(shape: Shape) -> list[Order]:
    """P-1-r warm-up forwards, then one forward and one backward in turn. Rank r holds at most P - r microbatches."""
    return _one_chunk(shape, [shape.pipeline_size - 1 - rank for rank in range(shape.pipeline_size)])


def eager_1f1b(shape: Shape) -> list[Order]:
    """Rank r runs 2 (P-1-r) + 1 forwards before its first backward, where 1F1B runs P - r.

    Plain 1F1B has just enough microbatches between two neighbouring ranks to keep them busy when transfers take no
    time, so that each transfer of the steady state is waited for. Nearly twice as many hide transfers of up to half a
    forward and backward; at most 2 (P-r) - 1 microbatches are in memory.
    """
    return _one_chunk(shape, [2 * (shape.pipeline_size - 1 - rank) for rank in range(shape.pipeline_size)])


def _one_chunk(shape: Shape, warmups: list[int]) -> list[Order]:
    forwards, backwards = _in_order(shape, [(m, 0) for m in range(shape.num_microbatches)])
    return [warmup_then_steady(forwards, backwards, warmup + shape.slices - 1) for warmup in warmups]


def _in_order(shape: Shape, table: list[tuple[int, int]]) -> tuple[Order, Order]:
    """Forwards and backwards of a rank whose (microbatch, chunk) take turns as in ``table``, backwards with the chunks
    reversed. Slices run forward from the first to the last, and backward from the last to the first.
    """
    last, parts = shape.num_chunks - 1, shape.parts
    forwards = [f(c, m, part) for m, c in table for part in parts]
    return forwards, [b(last - c, m, part) for m, c in table for part in reversed(parts)]


def warmup_then_steady(forwards: Order, backwards: Order, warmup: int) -> Order:
    """``warmup`` forwards, then a forward and a backward in turn until the forwards are used up, then the remaining
    backwards.
    """
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards) - warmup :]


def interleaved(shape: Shape) -> list[Order]:
    """A rank's V chunks take turns, a group of G microbatches at a time.

    Rank r warms up with 2 (P-1-r) + (V-1) G forwards, Megatron's number, then alternates. Backwards follow the same
    table with the chunks reversed. G = P is the classic order; G > P trades memory for slack between a chunk and the
    next one. Where a group is shorter than P, backwards may overtake forwards that still wait for their input.
    """
    return _in_turns(shape, extra_warmup=0)


def combined_1f1b(shape: Shape) -> list[Order]:
    """Interleaved 1F1B with one forward more in the warm-up, Megatron's order for ``overlap_moe_expert_parallel_comm``:
    no backward needs the forward right before it, so that from then on the two run as one (``overlap_pairs``).

    With one chunk a rank, as with several, a microbatch needs a pair's time on each rank on its way down and on its way
    back: 2 (P-1-r) + 1 forwards, so that no pair waits for another rank's.
    """
    return _in_turns(shape, extra_warmup=1)


def _in_turns(shape: Shape, extra_warmup: int) -> list[Order]:
    table = schedule_table(shape.num_microbatches, shape.num_chunks, shape.group_size)
    forwards, backwards = _in_order(shape, table)
    ranks = range(shape.pipeline_size)
    strict = [warmup_then_steady(forwards, backwards, warmup_forwards(shape, r) + extra_warmup) for r in ranks]
    if not has_short_group(shape):
        return strict
    return let_backwards_overtake(strict, Placement(LOOP, shape.pipeline_size, shape.num_chunks))


def gis(shape: Shape) -> list[Order]:
    """Interleaved 1F1B that begins backwards as early as they can be had, in groups of G <= P microbatches.

    Rank r runs (V-1) G + P - r forwards before its first backward, P-1-r fewer than interleaved 1F1B, and waits for
    that backward instead: the bubble is the same, the peak (V-1) G + P - r chunks. A group smaller than P waits P - G
    slots before each further chunk.
    """
    size, chunks, group = shape.pipeline_size, shape.num_chunks, _group_of_gis(shape)
    forwards, backwards = _in_order(shape, schedule_table(shape.num_microbatches, chunks, group))
    orders = [warmup_then_steady(forwards, backwards, (chunks - 1) * group + size - 1 - r) for r in range(size)]
    return let_backwards_overtake(orders, Placement(LOOP, size, chunks))


def _group_of_gis(shape: Shape) -> int:
    return min(shape.group_size, shape.pipeline_size)


def gis_h(shape: Shape) -> list[Order]:
    """`gis` in groups of at most half the ranks."""
    return gis(replace(shape, group_size=group_of_gis_h(shape)))


def group_of_gis_h(shape: Shape) -> int:
    return min(shape.group_size, (shape.pipeline_size + 1) // 2)


def pipe_offload(shape: Shape) -> list[Order]:
    """`gis_h` with the chunks of a group in turn, not one after the other: of V forwards in a row each is of another
    chunk, so that copies of offloaded chunks are spread evenly, and as many of them are on their way at any time.

    A microbatch comes to its next chunk G turns later, or as few more as make V chunks take turns; a turn is a forward
    and a backward. While the first and the last microbatches fill some turns in part, the others move up.
    """
    size, chunks, mbs = shape.pipeline_size, shape.num_chunks, range(shape.num_microbatches)
    group = group_of_gis_h(shape)
    together = chunks // math.gcd(chunks, group)
    after = [group * c + c // together for c in range(chunks)]  # turns, each at another place among ``chunks`` of them
    forwards = [((chunks * m + after[c], 0), f(c, m)) for m in mbs for c in range(chunks)]
    backwards = [((chunks * m + after[c], 1), b(chunks - 1 - c, m)) for m in mbs for c in range(chunks)]
    orders = []
    for rank in range(size):
        first = after[-1] + size - 1 - rank  # the turn of the first backward
        late = [((turn + first, half), at) for (turn, half), at in backwards]
        orders.append([at for _, at in sorted(forwards + late)])
    return let_backwards_overtake(orders, Placement(LOOP, size, chunks))


def let_backwards_overtake(orders: list[Order], placement: Placement) -> list[Order]:
    """Run ``orders`` slot by slot; where a rank's next operation is a forward without its input and its next backward
    could run, run that. It never costs memory, and the order among backwards stays as it was.

    With a last group shorter than P, a strict alternation can wait in a circle: a rank holds back its next backward for
    a forward whose input is behind that very backward on another rank.
    """
    return _SlotBySlot(orders, placement).run()


class _SlotBySlot:
    def __init__(self, orders: list[Order], placement: Placement) -> None:
        self.stages = placement.stages
        self.num_stages = placement.num_stages
        self.todo = [list(reversed(order)) for order in orders]  # next operation last
        self.done: set[tuple[str, int, int, int]] = set()  # FORWARD or BACKWARD, stage, microbatch, slice
        self.result: list[Order] = [[] for _ in orders]

    def run(self) -> list[Order]:
        while any(self.todo):
            chosen = {rank: self._choose(rank) for rank in range(len(self.todo))}
            ran = [(rank, self.todo[rank].pop(at)) for rank, at in chosen.items() if at is not None]
            if not ran:  # the circle is not of this kind: hand on what is left; the clock names what is wrong
                return [done + todo[::-1] for done, todo in zip(self.result, self.todo, strict=True)]
            for rank, at in ran:
                self.result[rank].append(at)
                self.done.add((RESULT_OF[at.op], self.stages[rank][at.chunk], at.mb, at.slice))
        return self.result

    def _choose(self, rank: int) -> int | None:
        """Where in ``todo[rank]`` the operation of this slot stands; None where the rank has to idle."""
        todo = self.todo[rank]
        if not todo:
            return None
        if self._ready(rank, todo[-1]):
            return -1
        if todo[-1].op != FORWARD:
            return None
        backward = next((i for i in range(-1, -len(todo) - 1, -1) if todo[i].op == BACKWARD), None)
        return backward if backward is not None and self._ready(rank, todo[backward]) else None

    def _ready(self, rank: int, at: Instruction) -> bool:
        op, _, mb, _, chunk, part, _, _ = at
        for kind, stage in inputs_of(op, self.stages[rank][chunk], self.num_stages):
            if (kind, stage, mb, part) not in self.done:
                return False
        return True


def schedule_table(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) for each virtual microbatch: group by group, within a group chunk by chunk. The last group
    may be short.

    P=2, G=3, M=5, V=2 gives microbatches 0 1 2 0 1 2 3 4 3 4 on chunks 0 0 0 1 1 1 0 0 1 1.
    """
    return [
        (mb, chunk)
        for start in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for mb in range(start, min(start + group_size, num_microbatches))
    ]


def warmup_forwards(shape: Shape, rank: int) -> int:
    """Forwards that rank ``rank`` runs before its first alternation, never more than there are."""
    warmup = 2 * (shape.pipeline_size - 1 - rank) + (shape.num_chunks - 1) * shape.group_size * shape.slices
    return min(warmup + shape.slices - 1, shape.num_chunks * shape.num_microbatches * shape.slices)


def has_short_group(shape: Shape) -> bool:
    """Whether a group has fewer microbatches than there are ranks: legal here, with a bubble (Megatron refuses it)."""
    last = shape.num_microbatches % shape.group_size or shape.group_size
    return shape.num_chunks > 1 and last * shape.slices < shape.pipeline_size


def is_in_step(shape: Shape) -> bool:
    """Whether all ranks of an interleaved order run forwards and backwards in turn together, for most of the step:
    with a short group some wait for others, and with one microbatch a rank hardly any take turns."""
    several = shape.num_microbatches * shape.slices > shape.pipeline_size
    return shape.num_chunks > 1 and several and not has_short_group(shape)


def zb_h1(shape: Shape) -> list[Order]:
    """1F1B with the weight gradients split off: rank r runs that of microbatch k - r right after the backward of k, and
    the last r at the end, where 1F1B has its bubble.

    Backwards reach the next rank earlier by one W: the bubble is (P-1)(F+B-W). Every rank holds P microbatches, what
    1F1B's first rank holds.
    """
    return [delay_weights(order, delay=rank) for rank, order in enumerate(one_f_one_b(shape))]


def interleaved_zb(shape: Shape) -> list[Order]:
    """ZB-H1's idea on the interleaved order: rank r runs each weight gradient r backwards late, on virtual
    microbatches. Bubble (P-1)(f+b-w) of one chunk's times, for interleaved 1F1B's memory.
    """
    return [delay_weights(order, delay=rank) for rank, order in enumerate(interleaved(shape))]


def delay_weights(order: Order, delay: int) -> Order:
    """Split every backward of ``order``: each weight gradient runs right after the backward ``delay`` places later,
    the last ones at the end.
    """
    result: Order = []
    waiting: Order = []
    for at in order:
        if at.op != BACKWARD:
            result.append(at)
            continue
        result.append(i(at.chunk, at.mb, at.slice))
        waiting.append(w(at.chunk, at.mb, at.slice))
        if len(waiting) > delay:
            result.append(waiting.pop(0))
    return result + waiting


def zb_h2(shape: Shape) -> list[Order]:
    """No bubble within a rank's own span, for about twice the memory of 1F1B.

    Rank r warms up with 2 (P-r) - 1 forwards, as in eager 1F1B, so that it has work until the first gradient comes
    back, and keeps 2 r weight gradients for the end, so that it has work until the last rank is done. At most 2 P - 1
    microbatches in memory, on every rank; the first P-1 forwards' delay remains in the makespan.
    """
    return [delay_weights(order, delay=2 * rank) for rank, order in enumerate(eager_1f1b(shape))]


_one_chunk_family = partial(Family, chunks=1, repeats=every_microbatch)
_grouped = partial(Family, grouped=True, repeats=every_group)
_in_step = partial(_grouped, joint=is_in_step)

FAMILIES = (
    Family(
        "gpipe",
        breadth_first,
        "arXiv 1811.06965, section 2.3",
        "all forwards, then all backwards; M microbatches in memory",
        chunks=1,
    ),
    _one_chunk_family(
        ONE_F_ONE_B,
        one_f_one_b,
        "arXiv 2104.04473, section 2.2.1",
        "P-1-r warm-up forwards, then one forward, one backward; P-r microbatches in memory",
    ),
    _one_chunk_family(
        "eager_1f1b",
        eager_1f1b,
        "arXiv 2211.05322, section 5",
        "1F1B with twice the warm-up: hides transfers that 1F1B waits for; 2 (P-r) - 1 microbatches in memory",
    ),
    _in_step(
        INTERLEAVED,
        interleaved,
        "arXiv 2104.04473, section 2.2.2",
        "V chunks a rank take turns; bubble 1/V of 1F1B's for V times its transfers",
    ),
    _grouped(
        "gis",
        gis,
        "arXiv 2503.01328, section 3.2",
        "interleaved 1F1B's bubble in V P chunks of memory; in groups of G < P less memory, more bubble",
        small_groups=True,
        repeats=lambda shape: Repeats(_group_of_gis(shape)),
    ),
    _grouped(
        "gis_h",
        gis_h,
        "arXiv 2503.01328, section 3.2",
        "gis in groups of at most P/2: about half of interleaved 1F1B's memory for more bubble",
        small_groups=True,
        repeats=lambda shape: Repeats(group_of_gis_h(shape)),
    ),
    _in_step(
        COMBINED,
        combined_1f1b,
        "Megatron-core, overlap_moe_expert_parallel_comm; arXiv 2412.19437, section 3.2.1, for the pairs",
        "interleaved 1F1B whose forwards and backwards run in pairs, for one chunk more in memory",
        repeats=lambda shape: every_group(shape) if shape.num_chunks > 1 else every_microbatch(shape),
    ),
    Family(
        "breadth_first",
        breadth_first,
        "arXiv 2211.05953, section 4",
        "every chunk runs all its microbatches in one stretch; V M chunks in memory",
    ),
    _one_chunk_family(
        "zb_h1",
        zb_h1,
        "arXiv 2401.10241, section 2.1",
        "1F1B with weight gradients in its bubble: (P-1)(F+B-W) is left; P microbatches in memory",
        splits_weight=True,
    ),
    _one_chunk_family(
        "zb_h2",
        zb_h2,
        "arXiv 2401.10241, section 2.2",
        "no bubble within a rank's span (counts on the optimizer bypass); 2P-1 microbatches in memory",
        splits_weight=True,
    ),
    _in_step(
        "interleaved_zb",
        interleaved_zb,
        "arXiv 2104.04473, section 2.2.2, with the split of arXiv 2401.10241",
        "interleaved 1F1B with weight gradients in its bubble, at the same memory",
        splits_weight=True,
    ),
    Family(
        "pipe_offload",
        pipe_offload,
        "arXiv 2503.01328, section 3",
        "gis_h with half of the chunks offloaded, those kept longest: about (V+2)/(8V) of all activations stay",
        grouped=True,
        small_groups=True,
        repeats=lambda shape: Repeats(1),
        offloads=lambda shape: (shape.num_chunks + 1) // 2,
    ),
)


# Sequences cut into slices (Seq1F1B, arXiv 2406.03488): the same orders with slices in place of microbatches, but for
# one thing: forwards of a microbatch run from its first slice to its last, backwards from the last to the first
# (``dataflow.slice_before``). So a rank's first backward waits for the forwards of a whole microbatch, and its warm-up
# is n-1 forwards longer. With n slices of equal cost, which is what ``slice_costs.py`` cuts for causal
# attention, the bubble of ``seq_1f1b`` is (P-1) / (n M + P-1), and rank r holds at most (n + P-1-r) / n microbatches,
# where 1F1B holds P-r.
_WHOLE = {family.name: family for family in FAMILIES}
_SOURCE = "arXiv 2406.03488"
_SPLIT = f"{_SOURCE}, with the split of arXiv 2401.10241"


def _sliced(whole: str, name: str, source: str, summary: str) -> Family:
    return replace(_WHOLE[whole], name=name, source=source, summary=summary, sliced=True)


SLICED = (
    _sliced(
        ONE_F_ONE_B,
        SEQ_1F1B,
        _SOURCE,
        "1F1B on n slices of every sequence: bubble (P-1)/(nM+P-1); (n+P-1-r)/n microbatches in memory",
    ),
    _sliced(
        INTERLEAVED,
        INTERLEAVED_SEQ,
        _SOURCE,
        "interleaved 1F1B on slices of every sequence; V chunks a rank take turns after P slices",
    ),
    _sliced("zb_h1", "seq_zb", _SPLIT, "Seq1F1B with weight gradients in its bubble"),
    _sliced("interleaved_zb", "interleaved_seq_zb", _SPLIT, "interleaved Seq1F1B with weight gradients in its bubble"),
)
