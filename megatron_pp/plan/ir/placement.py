"""Which rank and model chunk holds which stage.

A pipeline of P ranks with V chunks each has S = P * V stages; activations go from stage s to s + 1.

``loop``  chunk c on rank r is stage c * P + r (Megatron's interleaving; arXiv 2104.04473, section 2.2).
``v``     chunk c runs forward over the ranks when c is even, backward when odd: with two chunks, chunk 0 is stage r
          and chunk 1 stage 2P - 1 - r (arXiv 2405.15362, section 3), so the first and last stage share rank 0 and the
          turn stays on rank P - 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from megatron_pp.common.names import unknown
from megatron_pp.plan.ir.dataflow import Result, neighbour_of
from megatron_pp.plan.ir.feature import hooks_of, words_of_features
from megatron_pp.plan.ir.instruction import NONE, TRANSFER_OPS, Instruction

LOOP = "loop"
V_SHAPE = "v"
PLACEMENTS = (LOOP, V_SHAPE)


@dataclass(frozen=True)
class Placement:
    """Maps stages to (rank, chunk) and back, for P ranks with V chunks each.

    ``barriers``: with 0, the last stage's backward follows its forward. With 1 or 2, all ranks (of one chunk each) run
    shares of a layer between the two, connected by this number of collectives of all ranks.

    Raises ValueError for a kind that is not in PLACEMENTS or sizes below 1.
    """

    kind: str
    pipeline_size: int
    num_chunks: int
    barriers: int = 0

    def __post_init__(self) -> None:
        if self.barriers not in (0, 1, 2) or (self.barriers and self.num_chunks > 1):
            raise ValueError(
                f"{self.barriers} barriers with {self.num_chunks} chunks a rank: {words_of_features('barrier_words')}"
            )
        if self.kind not in PLACEMENTS:
            raise ValueError(unknown("placement", self.kind, PLACEMENTS))
        if self.pipeline_size < 1 or self.num_chunks < 1:
            raise ValueError(f"pipeline size {self.pipeline_size} and chunks {self.num_chunks} must be at least 1")

    @cached_property
    def num_stages(self) -> int:
        return self.pipeline_size * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that ``chunk`` on ``rank`` holds."""
        backward_leg = self.kind == V_SHAPE and chunk % 2 == 1
        return chunk * self.pipeline_size + (self.pipeline_size - 1 - rank if backward_leg else rank)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """``stages[rank][chunk]``."""
        return tuple(tuple(self.stage(r, c) for c in range(self.num_chunks)) for r in range(self.pipeline_size))

    @cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """``homes[stage]`` is its (rank, chunk)."""
        where = {s: (r, c) for r, row in enumerate(self.stages) for c, s in enumerate(row)}
        return tuple(where[s] for s in range(self.num_stages))

    def is_first_stage(self, rank: int, chunk: int) -> bool:
        return self.stage(rank, chunk) == 0

    def is_last_stage(self, rank: int, chunk: int) -> bool:
        return self.stage(rank, chunk) == self.num_stages - 1

    def crosses_ranks(self, stage: int) -> bool:
        """Whether ``stage`` sends its output to another rank. The last stage sends nothing."""
        return stage + 1 < len(self.homes) and self.homes[stage][0] != self.homes[stage + 1][0]

    @cached_property
    def rank_edges(self) -> tuple[tuple[int, int], ...]:
        """The (source, destination) ranks of activations, sorted. Gradients go the other way."""
        edges = {(self.homes[s][0], self.homes[s + 1][0]) for s in range(self.num_stages - 1) if self.crosses_ranks(s)}
        return tuple(sorted(edges))

    def collected_inputs(self, op: str, stage: int) -> tuple[Result, ...]:
        """The results that collectives bring to an operation if there are barriers."""
        if not self.barriers:
            return ()
        return tuple(one for hooks in hooks_of((), self.barriers) for one in hooks.inputs(op, stage, self))

    def place(self, rank: int, program: Iterable[Instruction]) -> tuple[Instruction, ...]:
        """``program`` of ``rank`` with stages and peers. They are NONE if there is no such chunk or neighbour, and
        ``verify`` then refuses the plan.
        """
        sites: dict[tuple[str, int], tuple[int, int]] = {}  # (op, chunk) -> (stage, peer)
        result = []
        for at in program:
            op, _, mb, _, chunk, part, tensor, members = at
            if members:
                result.append(at._replace(members=self.place(rank, members)))
                continue
            stage, peer = sites.get((op, chunk)) or sites.setdefault((op, chunk), self.site(rank, op, chunk))
            # This takes a third of the time of Instruction(...).
            result.append(tuple.__new__(Instruction, (op, stage, mb, peer, chunk, part, tensor, ())))
        return tuple(result)

    def site(self, rank: int, op: str, chunk: int) -> tuple[int, int]:
        """The (stage, peer) of an instruction; NONE if there is none."""
        if not 0 <= chunk < self.num_chunks:
            return NONE, NONE
        stage = self.stages[rank][chunk]
        return stage, self._peer(op, stage) if op in TRANSFER_OPS else NONE

    def _peer(self, op: str, stage: int) -> int:
        neighbour = neighbour_of(op, stage)
        return self.homes[neighbour][0] if 0 <= neighbour < self.num_stages else NONE
