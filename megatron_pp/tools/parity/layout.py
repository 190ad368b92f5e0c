"""The parallel layout in a script's flags: reads it, removes it for one process, and switches off single parts of
it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from megatron_pp.config.hybrid_pattern import HybridPattern
from megatron_pp.tools.flags.flags import Flags

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
STAGE_LAYERS = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
HYBRID = "--hybrid-layer-pattern"
LAYOUT = "--pipeline-model-parallel-layout"
VOCABULARY = "--make-vocab-size-divisible-by"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
SHARDED_OPTIMIZER = "--use-distributed-optimizer"
_OF_PIPELINES = (
    *(PP, STAGE_LAYERS, CHUNKS, LAYOUT, FIRST, LAST, "--microbatch-group-size-per-virtual-pipeline-stage"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    *("--standalone-embedding-stage", "--defer-embedding-wgrad-compute", "--wgrad-deferral-limit"),
    *("--overlap-p2p-communication-warmup-flush", "--no-overlap-p2p-communication"),
)
_OF_CONTEXT = (CP, "--cp-comm-type", "--hierarchical-context-parallel-sizes")
_OF_OPTIMIZERS = (
    *(SHARDED_OPTIMIZER, "--overlap-param-gather", "--overlap-param-gather-with-optimizer-step"),
    *("--num-distributed-optimizer-instances", "--no-align-param-gather", "--ddp-num-buckets", "--ddp-bucket-size"),
)
_OF_RECOMPUTATION = (
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules"),
    *("--recompute-activations", "--distribute-saved-activations"),
)
_OVERLAPPED = ("--overlap-grad-reduce", "--delay-grad-reduce", "--ddp-average-in-collective", "--tp-comm-overlap")
_SHARED_EXPERTS = ("--moe-shared-expert-overlap", "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")

SWITCHES: dict[str, tuple[str, ...]] = {
    "CP": _OF_CONTEXT,
    "TP": (TP, "--sequence-parallel"),
    "PP": _OF_PIPELINES,
    "VPP": (STAGE_LAYERS, CHUNKS, "--microbatch-group-size-per-virtual-pipeline-stage"),
    "EP": (EP,),
    "ETP": (ETP,),
    "DP": (),
    "sequence parallelism": ("--sequence-parallel",),
    "distributed optimizer": _OF_OPTIMIZERS,
    "overlapped reduction": _OVERLAPPED,
    "recomputation": _OF_RECOMPUTATION,
    "overlap of experts": _SHARED_EXPERTS,
    "MTP": ("--mtp-num-layers", "--mtp-loss-scaling-factor"),
    "per-token loss": ("--calculate-per-token-loss",),
    "experts": (),
    "uneven masks": (),
    "checkpoint": (),
}
"""Part of a layout -> its flags. The last five change the model, the loss or how it begins, so their reference changes
too."""
RESTORE, SAVE, RESUME = CHECKPOINTS = ("restore", "save", "resume")
"""One process saves and the layout restores, the layout saves and one process restores, the layout does both."""
NO_OPTIMIZER = ("--no-load-optim", "--no-save-optim")

_SIZES = {"CP": CP, "TP": TP, "PP": PP, "EP": EP, "ETP": ETP}


@dataclass(frozen=True)
class Layout:
    """A run that is compared with one process: the script's flags, the number of processes, the masks of its data, and
    one of CHECKPOINTS if training uses a checkpoint."""

    flags: Flags
    world: int
    uneven_masks: bool = True
    checkpoint: str = ""

    def size(self, name: str) -> int:
        """The number of ranks of "TP", "PP", "CP", "EP", "ETP" or "DP", or of model chunks per rank ("VPP")."""
        if name == "DP":
            return self.world // (self.size("TP") * self.size("PP") * self.size("CP"))
        if name == "VPP":
            return _chunks(self.flags)
        return self.flags.number(_SIZES[name], self.flags.number(TP, 1) if name == "ETP" else 1)

    def parts(self) -> list[str]:
        """The parts in SWITCHES that this layout has."""
        sizes = [name for name in ("CP", "TP", "PP", "VPP", "EP", "DP") if self.size(name) > 1]
        sizes += ["ETP"] if ETP in self.flags and self.size("ETP") != self.size("TP") else []
        rest = [name for name, own in SWITCHES.items() if name not in (*_SIZES, "VPP", "DP") and self.flags.having(own)]
        rest += ["uneven masks"] if self.uneven_masks else []
        rest += ["experts"] if "--num-experts" in self.flags else []
        rest += ["checkpoint"] if self.checkpoint else []
        return sizes + rest

    def without(self, part: str) -> Layout:
        """The layout without this part, with as many processes as it then needs."""
        flags = self.flags.without(*SWITCHES[part])
        if part == "uneven masks":
            return replace(self, uneven_masks=False)
        if part == "checkpoint":
            return replace(self, checkpoint="")
        if part == "experts":
            flags = Flags(tuple(item for item in flags.items if not _of_experts(item[0])))
        if part == "VPP":
            flags = flags.set(LAYOUT, None)
        if part in ("PP", "VPP") and HYBRID in flags:
            flags = flags.set(HYBRID, _with_stages(flags.text(HYBRID), self.size("PP") if part == "VPP" else 1))
        if part == "MTP" and "m" in flags.text(LAYOUT):
            flags = flags.set(LAYOUT, flags.text(LAYOUT).replace("m", ""))
        if part == "TP":
            flags = _same_vocabulary(flags, self.size("TP"))
        dp = 1 if part == "DP" else self.size("DP")
        return replace(self, flags=flags).resized(dp)

    def halved(self, part: str) -> Layout | None:
        """The layout with half of the ranks of this part; None if it has fewer than 4 or cannot be halved."""
        size = self.size(part) if part in (*_SIZES, "DP") else 0
        if size < 4 or size % 2:
            return None
        if part == "PP" and (
            self.flags.having((LAYOUT, STAGE_LAYERS)) or HybridPattern.read(self.flags.text(HYBRID)).names_stages
        ):
            return None
        if part == "DP":
            return self.resized(size // 2)
        flags = self.flags.set(_SIZES[part], size // 2)
        if part == "TP":
            flags = _same_vocabulary(flags, 2)
        return replace(self, flags=flags).resized(self.size("DP"))

    def resized(self, dp: int) -> Layout:
        """The layout with the fewest processes that have ``dp`` data-parallel ranks; more if experts need them."""
        dense = self.size("TP") * self.size("PP") * self.size("CP") * dp
        experts = self.size("EP") * self.size("ETP") * self.size("PP") if "--num-experts" in self.flags else 1
        return replace(self, world=math.lcm(dense, experts))

    def alone(self) -> Layout:
        """The layout of one process that computes the same. It saves a checkpoint if this layout has one."""
        layout = self
        for part in ("CP", "PP", "EP", "ETP", "distributed optimizer", "overlapped reduction", "recomputation"):
            layout = replace(layout, flags=layout.flags.without(*SWITCHES[part]))
        flags = layout.flags.without(*_SHARED_EXPERTS, *SWITCHES["TP"])
        if HYBRID in flags:
            flags = flags.set(HYBRID, _with_stages(flags.text(HYBRID), 1))
        if self.checkpoint and SHARDED_OPTIMIZER in self.flags:  # its checkpoints differ from those of other optimizers
            flags = flags.set(SHARDED_OPTIMIZER, True)
        written = SAVE if self.checkpoint else ""
        return Layout(_same_vocabulary(flags, self.size("TP")), 1, self.uneven_masks, written)

    def label(self) -> str:
        """The layout in words, such as "TP 2, DP 2, MTP"."""
        sized = (*_SIZES, "VPP", "DP")
        words = {part: f"{part} {self.size(part)}" for part in sized} | {
            "checkpoint": f"checkpoint ({self.checkpoint})"
        }
        return ", ".join(words.get(part, part) for part in self.parts())


def stages_of(text: str) -> list[str]:
    """The letters of each stage in Megatron's text: E embedding, t layer, m multi-token prediction, L loss. ``*n``
    repeats."""
    text = re.sub(r"[\s,]", "", text)
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    return re.sub(r"([A-Za-z|])\*(\d+)", lambda found: found[1] * int(found[2]), text).split("|")


def _with_stages(pattern: str, stages: int) -> str:
    """The pattern of hybrid layers with fewer stages, if it names stages."""
    found = HybridPattern.read(pattern)
    if found.names_stages:
        each = len(found.stages) // stages
        found = found.with_stages(
            "".join(found.stages[first : first + each]) for first in range(0, each * stages, each)
        )
    return str(found)


def fewest_processes(flags: Flags) -> int:
    """The fewest processes that the layout needs. If a flag is about data parallelism, it has two data-parallel
    ranks."""
    whole = Layout(flags, 1).resized(1)
    shared = flags.having((*_OF_OPTIMIZERS, *_OVERLAPPED))
    return whole.world * 2 if shared and whole.size("DP") == 1 else whole.world


def _same_vocabulary(flags: Flags, factor: int) -> Flags:
    """The flags with a vocabulary of the same padded size. Megatron pads it to a multiple of the flag times the
    tensor-parallel ranks."""
    return flags.set(VOCABULARY, flags.number(VOCABULARY, 128) * factor) if VOCABULARY in flags else flags


def _chunks(flags: Flags) -> int:
    pp = flags.number(PP, 1)
    if pp == 1:
        return 1
    if HYBRID in flags:
        return max(1, len(HybridPattern.read(flags.text(HYBRID)).stages) // pp)
    if CHUNKS in flags:
        return flags.number(CHUNKS, 1)
    if LAYOUT in flags:
        return len(stages_of(flags.text(LAYOUT))) // pp
    if STAGE_LAYERS in flags:
        return flags.number("--num-layers", 1) // pp // flags.number(STAGE_LAYERS, 1)
    return 1


def _of_experts(name: str) -> bool:
    return name.startswith("--moe-") or name in ("--num-experts", EP, ETP)
