"""The question to the advisor."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_pp.common.names import unknown
from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.communicators import Outside
from megatron_pp.plan.costs.stage_costs import Link, Network
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import BATCHED, OVERLAP, checked_device
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.tools.advise.layers.gpus import GB
from megatron_pp.tools.advise.model import Model

_LIKE_OTHERS = ("combined_1f1b",)  # interleaved_1f1b with Megatron's all-to-all overlap, which the costs do not have
_MOST_CHUNKS = 1000  # chunks of a rank; no model has as many layers
_MOST_RANKS = 2000  # no model has as many layers, and the time for communicators grows with the square


@dataclass(frozen=True)
class Question:
    """The question. Times are in milliseconds, memory is in GB.

    pipeline_size     P
    global_batch      sequences of a step, of all replicas
    memory            GB of a device
    models            (sequences in a microbatch, the model's costs for such microbatches)
    latency           latency of a transfer
    bandwidth         bandwidth of each directed link, GB per millisecond
    host_bandwidth    GB per millisecond of a copy between device and host memory; None: nothing is offloaded
    links             directed links with other latency or bandwidth, as ((source, target), Link)
    data_parallel     replicas
    max_chunks        largest V that is tried
    slices            numbers of slices of a sequence that are tried, 1 for whole sequences
    recompute         whether layers may be recomputed
    schedules         names of families that are tried; empty for all
    policies          lowering policies that are tried, the first for all, the others for the best plan
    device            rules of the device, under which every plan is verified
    splits_backward   whether the model can run weight gradients later than input gradients
    gloo              transfers are on gloo (``Network``)
    microbatch_costs  cost of each microbatch of a step relative to the times, in the given order; empty: all equal
    seq_length        tokens of a sequence; None if not known
    peak_flops        operations of a device per second; None if not known
    outside           memory of a device for communicators and a CUDA context; None if they are not counted
    keep_outputs      whether outputs stay until their backwards
    """

    pipeline_size: int
    global_batch: int
    memory: float
    models: tuple[tuple[int, Model], ...]
    latency: float = 0.0
    bandwidth: float = math.inf
    links: tuple[tuple[tuple[int, int], Link], ...] = ()
    host_bandwidth: float | None = None
    data_parallel: int = 1
    max_chunks: int = 4
    slices: tuple[int, ...] = (1,)
    recompute: bool = True
    schedules: tuple[str, ...] = ()
    policies: tuple[str, ...] = (OVERLAP, BATCHED)
    device: tuple[str, ...] = ()
    splits_backward: bool = True
    gloo: bool = False
    microbatch_costs: tuple[float, ...] = ()
    seq_length: int | None = None
    peak_flops: float | None = None
    outside: Outside | None = None
    keep_outputs: bool = False

    def __post_init__(self) -> None:
        for name in ("pipeline_size", "global_batch", "data_parallel", "max_chunks"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.pipeline_size > _MOST_RANKS:
            raise PlanError(f"pipeline_size is {self.pipeline_size}; at most {_MOST_RANKS} ranks are tried")
        if self.max_chunks > _MOST_CHUNKS:
            raise PlanError(f"max_chunks is {self.max_chunks}; at most {_MOST_CHUNKS} chunks a rank are tried")
        if min(self.slices, default=0) < 1:
            raise PlanError(
                f"slices of a sequence are {min(self.slices, default=0)}; at least 1 (not sliced) is needed"
            )
        if not (math.isfinite(self.memory) and self.memory > 0):
            raise PlanError(f"the memory of a device is {self.memory:g} GB; it must be above 0")
        for name in self.schedules:
            if name not in SCHEDULES:
                raise PlanError(unknown("schedule", name, SCHEDULES))
            if SCHEDULES[name].barriers and not self._can_split_output:
                raise PlanError(
                    f"schedule {name} splits the output layer with its loss, so the model needs an output layer "
                    "(--loss-ms, or --gpu with --vocab-size) and no layers for multi-token prediction"
                )
        object.__setattr__(self, "device", checked_device(self.device))
        counts = [count for _, count in self.microbatches()]
        if self.microbatch_costs and counts and len(self.microbatch_costs) not in counts:
            of_step = " or ".join(map(str, counts))
            raise PlanError(f"costs of {len(self.microbatch_costs)} microbatches are given, but a step has {of_step}")
        if not list(self.microbatches()):
            raise PlanError(self._no_microbatches())

    def microbatches(self) -> Iterator[tuple[int, int]]:
        """(sequences in a microbatch, microbatches of a step) that make up the global batch."""
        for size, _ in self.models:
            if size > 0 and self.global_batch % (size * self.data_parallel) == 0:
                yield size, self.global_batch // (size * self.data_parallel)

    def _no_microbatches(self) -> str:
        sizes = ", ".join(str(size) for size, _ in self.models)
        least = self.models[0][0] * self.data_parallel
        near = max(1, self.global_batch // least) * least
        return (
            f"a global batch of {self.global_batch} cannot be made of microbatches of {sizes} on {self.data_parallel} "
            f"replica(s); the nearest possible global batch is {near}"
        )

    def model(self, micro_batch: int) -> Model:
        return dict(self.models)[micro_batch]

    def network(self, model: Model) -> Network:
        """The network, with messages in GB."""
        return Network(model.message, link=Link(self.latency, self.bandwidth), links=dict(self.links), gloo=self.gloo)

    def taken(self, placement: Placement, policy: str) -> tuple[float, ...]:
        """GB of each rank's device for communicators and the CUDA context."""
        if self.outside is None:
            return (0.0,) * self.pipeline_size
        return tuple(nbytes / GB for nbytes in self.outside.nbytes(placement, policy))

    def offload_slots(self, model: Model) -> int:
        """The number of compute operations that hide one copy of a stage's activations."""
        if self.host_bandwidth is None:
            return 1
        copy = sum(one.activation for one in model.layers) / self.host_bandwidth
        return max(1, math.ceil(3 * copy / sum(one.work for one in model.layers)))

    def transfer(self, model: Model) -> float:
        """Milliseconds of one message on the slowest link."""
        links = [Link(self.latency, self.bandwidth), *(link for _, link in self.links)]
        return max(link.latency + link.wire_time(model.message) for link in links)

    @property
    def most_chunks(self) -> int:
        """The largest V to try. It is 1 for one rank, because Megatron refuses virtual stages there."""
        return self.max_chunks if self.pipeline_size > 1 else 1

    @property
    def _can_split_output(self) -> bool:
        return all(model.can_split_output for _, model in self.models)

    def takes(self, schedule: str) -> bool:
        """Whether ``schedule`` may be recommended. A schedule that splits the output layer must be named in
        ``schedules``."""
        return not SCHEDULES[schedule].barriers or schedule in self.schedules

    @property
    def tried(self) -> tuple[str, ...]:
        """The names of the families to try."""
        may = self._can_split_output
        known = (name for name, one in SCHEDULES.items() if name not in _LIKE_OTHERS and (may or not one.barriers))
        return self.schedules or tuple(known)
