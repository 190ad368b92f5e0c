"""GPUs with the numbers of their data sheets, and the times of operations, memory traffic and collectives on them."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_pp.common.names import unknown
from megatron_pp.errors import PlanError

GB = 1e9
EFFICIENCY = 0.6
"""Share of a GPU's peak that matrix products reach in training. On an H100, large products alone reach 720 of 989
(SemiAnalysis, December 2024). At the power of a training run, and with smaller products, the share is lower."""
ATTENTION = 0.5
"""Share that causal attention reaches, forward and backward (FlashAttention-3, arXiv 2407.08608, 4k to 16k tokens)."""
MEMORY = 0.6
"""Share of the memory's bandwidth that element-wise operations reach."""
LINK = 0.7
"""Share of a link's bandwidth that collectives reach."""
PROCESSORS = 0.15
"""Share of a GPU's multiprocessors that send and receive tokens during computation: 20 of 132 (DeepEP's default)."""


class Gpu(NamedTuple):
    """The data sheet of a GPU. Rates are per second; rates of links are per direction.

    flops       dense 16-bit operations
    fp8         dense 8-bit operations; 0 if it has none
    memory      GB of memory
    bandwidth   bytes from and to its memory
    link        bytes over NVLink (or a similar link) to the other GPUs of its domain
    network     bytes over its share of the network between domains
    domain      number of GPUs that are connected by such links
    efficiency  share of ``flops`` that matrix products reach, if it is known to differ from ``EFFICIENCY``
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    fp8: float = 0.0
    network: float = 50e9
    domain: int = 8
    efficiency: float = EFFICIENCY


GPUS = {
    "v100": Gpu(125e12, 32, 0.9e12, 150e9, network=6.25e9),
    "a100-40gb": Gpu(312e12, 40, 1.555e12, 300e9, network=25e9),
    "a100": Gpu(312e12, 80, 2.039e12, 300e9, network=25e9),
    "a800": Gpu(312e12, 80, 2.039e12, 200e9, network=25e9),
    "l40s": Gpu(362e12, 48, 0.864e12, 32e9, 733e12, 25e9),
    "h20": Gpu(148e12, 96, 4.0e12, 450e9, 296e12),
    "h800": Gpu(989e12, 80, 3.35e12, 200e9, 1979e12),
    "h100": Gpu(989e12, 80, 3.35e12, 450e9, 1979e12),
    "h200": Gpu(989e12, 141, 4.8e12, 450e9, 1979e12),
    "b200": Gpu(2250e12, 180, 8.0e12, 900e9, 4500e12),
    "b300": Gpu(2250e12, 270, 8.0e12, 900e9, 4500e12, 100e9),
    "gb200": Gpu(2500e12, 186, 8.0e12, 900e9, 5000e12, domain=72),
    "gb300": Gpu(2500e12, 279, 8.0e12, 900e9, 5000e12, 100e9, 72),
    "mi300x": Gpu(1307e12, 192, 5.3e12, 448e9, 2615e12, efficiency=0.4),  # large products alone: 620 of 1307
    "mi325x": Gpu(1307e12, 256, 6.0e12, 448e9, 2615e12, efficiency=0.4),
    "mi355x": Gpu(2517e12, 288, 8.0e12, 538e9, 5033e12, efficiency=0.25),  # 620 of 2517 in Primus's traces of a layer
}


def gpu_named(name: str) -> Gpu:
    """The GPU of this name. Raises PlanError for a name that is not in ``GPUS``."""
    found = GPUS.get(name.lower())
    if found is None:
        raise PlanError(unknown("GPU", name, GPUS))
    return found


@dataclass(frozen=True)
class Rates:
    """The times that operations take on ``gpu``, in milliseconds, if matrix products reach the share ``efficiency`` of
    its peak."""

    gpu: Gpu
    efficiency: float

    def products(self, flops: float, traffic: float, fp8: bool = False) -> float:
        """The time of matrix products: that of their operations or of ``traffic`` bytes of memory, whichever is
        longer."""
        peak = self.gpu.fp8 if fp8 else self.gpu.flops
        return 1e3 * max(flops / (peak * self.efficiency), traffic / self.gpu.bandwidth)

    def attention(self, flops: float) -> float:
        return 1e3 * flops / (self.gpu.flops * ATTENTION)

    def moved(self, nbytes: float) -> float:
        """The time of element-wise operations that read and write ``nbytes``."""
        return 1e3 * nbytes / (self.gpu.bandwidth * MEMORY)

    def sent(self, nbytes: float, over_network: bool) -> float:
        """The time in which a rank sends ``nbytes`` to its group, over the network or over the links of its domain."""
        rate = self.gpu.network if over_network else self.gpu.link
        return 1e3 * nbytes / (rate * LINK)
