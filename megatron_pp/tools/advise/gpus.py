"""GPUs by their data sheets, and how long operations, memory traffic and collectives take on them."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_pp.common.names import unknown
from megatron_pp.errors import PlanError

GB = 1e9
EFFICIENCY = 0.6
"""Share of a GPU's peak that matrix products reach in training: large ones alone reach 720 of 989 on an H100
(SemiAnalysis, December 2024), under a training run's power and with smaller products less."""
ATTENTION = 0.5
"""Share that causal attention reaches, forward and backward (FlashAttention-3, arXiv 2407.08608, 4k to 16k tokens)."""
MEMORY = 0.6
"""Share of the memory's bandwidth that element-wise operations reach."""
LINK = 0.7
"""Share of a link's bandwidth that collectives reach."""
PROCESSORS = 0.15
"""Share of a GPU's multiprocessors that sends and receives tokens beside computation: 20 of 132 (DeepEP's default)."""


class Gpu(NamedTuple):
    """Of data sheets. Rates are per second, links per direction.

    flops       dense 16-bit operations, and ``fp8`` 8-bit ones; 0: it has none
    memory      GB
    bandwidth   bytes of its memory
    link        bytes of NVLink (or its like) to the other GPUs of its ``domain``
    network     bytes of its share of the network beyond
    efficiency  of ``flops``, where large matrix products are known to reach another share than ``EFFICIENCY``
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
    """Raises PlanError for a name that is not in ``GPUS``."""
    found = GPUS.get(name.lower())
    if found is None:
        raise PlanError(unknown("GPU", name, GPUS))
    return found


@dataclass(frozen=True)
class Rates:
    """What ``gpu`` reaches where matrix products have the share ``efficiency`` of its peak; times in milliseconds."""

    gpu: Gpu
    efficiency: float

    def products(self, flops: float, traffic: float, fp8: bool = False) -> float:
        """Matrix products: the longer of their operations and of ``traffic`` bytes of memory."""
        peak = self.gpu.fp8 if fp8 else self.gpu.flops
        return 1e3 * max(flops / (peak * self.efficiency), traffic / self.gpu.bandwidth)

    def attention(self, flops: float) -> float:
        return 1e3 * flops / (self.gpu.flops * ATTENTION)

    def moved(self, nbytes: float) -> float:
        """Element-wise operations that read and write so many bytes."""
        return 1e3 * nbytes / (self.gpu.bandwidth * MEMORY)

    def sent(self, nbytes: float, over_network: bool) -> float:
        """A rank sends so many bytes to its group, on the network or on the links of its domain."""
        rate = self.gpu.network if over_network else self.gpu.link
        return 1e3 * nbytes / (rate * LINK)
