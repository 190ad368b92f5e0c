"""1F1B with the output layer and its loss split over all ranks (Vocabulary Parallelism, arXiv 2411.05288).

Every rank holds its share of the output layer's rows and runs, of each microbatch, a pass S and a pass T. The last
stage's backward waits for what all ranks compute: behind S with one communication barrier (the paper's Algorithm 2),
behind S and T with two (Algorithm 1). To hide each barrier the last stage runs a forward before it goes on, so that
rank r holds P - r + 1 or P - r + 2 microbatches, where 1F1B holds P - r.

The orders are those of a pipeline in nominal times: a backward takes two forwards, a pass S or T a quarter, a
collective half a forward. A free rank first runs what others wait for: T, S, a forward for which it has memory, a
backward. In the simulator, with an output layer that costs 0.05 to 1 of a forward and backward and P of 1 to 8, the
step is that of balanced stages, to within 1% if a collective takes a fifth of a forward.
"""

from functools import partial

from megatron_pp.features.output_layer.output_instructions import OUTPUT_S, OUTPUT_T, collected_inputs
from megatron_pp.plan.ir.dataflow import inputs_of
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, NONE, Instruction, instruction
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.orders.family import Family, Order, Shape, every_microbatch
from megatron_pp.plan.orders.free_ranks import FreeRanks

VOCAB_1F1B = "vocab_1f1b"
VOCAB_1F1B_ALG1 = "vocab_1f1b_alg1"
_TIMES = {OUTPUT_T: 1, OUTPUT_S: 1, FORWARD: 4, BACKWARD: 8}  # in the order in which a free rank prefers them
_COLLECTIVE = 2


def vocab_1f1b(shape: Shape, barriers: int) -> list[Order]:
    """1F1B with S and T, and ``barriers`` between S and the last stage's backward."""
    return _Ranks(Placement(LOOP, shape.pipeline_size, 1, barriers), shape.num_microbatches).run()


class _Ranks(FreeRanks):
    def __init__(self, placement: Placement, microbatches: int) -> None:
        super().__init__(placement, _TIMES, _COLLECTIVE)
        self.microbatches = microbatches
        ranks = range(placement.pipeline_size)
        self.needs = [
            {op: inputs_of(op, r, len(ranks)) + collected_inputs(op, r, placement) for op in _TIMES} for r in ranks
        ]
        self.next = [dict.fromkeys(_TIMES, 0) for _ in ranks]

    def choose(self, rank: int, now: int) -> Instruction | None:
        for op in _TIMES:
            if self._is_ready(rank, op, now):
                mb = self.next[rank][op]
                self.next[rank][op] += 1
                return instruction(op, 0, mb)
        return None

    def _is_ready(self, rank: int, op: str, now: int) -> bool:
        mb = self.next[rank][op]
        last = self.placement.pipeline_size - 1
        in_flight = mb - self.next[rank][BACKWARD]
        if mb == self.microbatches or (op == FORWARD and in_flight > last - rank + self.placement.barriers):
            return False
        since = now - _COLLECTIVE if op == OUTPUT_T or (op == BACKWARD and rank == last) else now
        return self.are_there(self.needs[rank][op], mb, NONE, since)


FAMILIES = (
    Family(
        VOCAB_1F1B,
        partial(vocab_1f1b, barriers=1),
        "arXiv 2411.05288, Algorithm 2",
        "1F1B, the output layer split over all ranks, one communication barrier; P-r+1 microbatches in memory",
        chunks=1,
        repeats=every_microbatch,
        barriers=1,
    ),
    Family(
        VOCAB_1F1B_ALG1,
        partial(vocab_1f1b, barriers=2),
        "arXiv 2411.05288, Algorithm 1",
        "the same with two barriers, for less compute in the pass S; P-r+2 microbatches in memory",
        chunks=1,
        repeats=every_microbatch,
        barriers=2,
    ),
)
