"""The cases that are compared with Megatron-core, as data: a model, its parallel layout, and a schedule.

They are plain dataclasses without torch, so that a test or a script can list cases and read results without a start.
`lab` builds and runs one case on a rank; `runner` runs lists of them on sets of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

POLICIES = ("overlap", "overlap+flush", "batched", "plain")


@dataclass(frozen=True)
class Model:
    """A small GPT of Megatron-core, and its data. Sizes are in tokens, features and layers. ``hybrid``: the layer
    pattern of a HybridModel, which is built instead. ``flags``: flags of Megatron's scripts, which then decide the
    whole config."""

    layers: int = 8
    hidden: int = 16
    heads: int = 2
    vocab: int = 48
    seq: int = 8
    micro_batch: int = 2
    tied: bool = False
    position: str = "rope"
    dropout: float = 0.0
    experts: int | None = None
    per_token_loss: bool = False
    hybrid: str = ""
    extra_config: tuple[tuple[str, Any], ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One run: a model with one parallel layout and one way to communicate. `engine` is "ours" or "megatron"."""

    model: Model = field(default_factory=Model)
    engine: str = "ours"
    pp: int = 1
    vp: int | None = None
    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1  # split over the data-parallel ranks
    etp: int | None = None  # tensor-parallel ranks of an expert; None: as for other layers
    microbatches: int = 8
    policy: str = "plain"
    deallocate: bool = True
    variable_shapes: bool = False
    forward_only: bool = False
    group: int | None = None
    steps: int = 1
    optimizer: str | None = None  # None, "adam" or "distributed"
    clip_grad: float = 1.0
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    bucket_size: int | None = None
    evaluate_between: bool = False
    trace: bool = False
    split_tied: bool = False  # give tied embeddings two parameters of equal values, and add their gradients at the end
    schedule: str | None = None  # config.pipeline_schedule of our engine
    split_weight_grad: bool = False  # the script converts the chunks; otherwise install() does, if the schedule has W
    loop: str = "plain"  # the kind of training loop, see `loops.LOOPS`

    @property
    def world(self) -> int:
        return self.pp * self.tp * self.dp * self.cp

    def short(self) -> Case:
        """The case with at most two steps, and two microbatches for each stage but at least four: a warm-up, a steady
        state, a cool-down."""
        count = min(self.microbatches, max(4, 2 * self.pp))
        return replace(self, steps=min(self.steps, 2), microbatches=count)

    def label(self) -> str:
        """One line that differs for all cases of a table."""
        parts = [f"P={self.pp}", f"V={self.vp or '-'}", self.policy]
        parts.append("dealloc" if self.deallocate else "keep")
        if self.variable_shapes:
            parts.append("variable")
        if self.forward_only:
            parts.append("forward-only")
        if self.group is not None:
            parts.append(f"group={self.group}")
        if self.tp > 1:
            parts.append(f"TP={self.tp}")
        if self.dp > 1:
            parts.append(f"DP={self.dp}")
        if self.cp > 1:
            parts.append(f"CP={self.cp}")
        if self.ep > 1:
            parts.append(f"EP={self.ep}")
        if self.model.tied:
            parts.append("tied")
        return " ".join(parts)


@dataclass
class Job:
    """A case to run, and what happens with its losses and gradients.

    `save` and `reference` are paths of files; "{rank}" in them becomes the rank. `reference` is what the
    run's own losses, gradients and parameters are compared with; with `other_cut` it has the same parameters on other
    ranks of the pipeline. `check` is "module:function". It is called on every rank with the case, in place of a
    training. Its result is in the outcome's `facts`.
    """

    case: Case
    save: str | None = None
    reference: str | None = None
    other_cut: bool = False
    check: str | None = None
    deadline: float = 60.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> Job:
        raw = dict(raw)
        case = dict(raw.pop("case"))
        model = dict(case.pop("model"))
        model["extra_config"] = tuple((k, v) for k, v in model["extra_config"])
        model["flags"] = tuple(model["flags"])
        return Job(case=Case(model=Model(**model), **case), **raw)


def compared(
    cases: Iterable[Case], reference_of: Callable[[Case], Case], file: str, other_cut: bool = False
) -> list[Job]:
    """Jobs that compare each case with its reference, ordered by number of ranks. Each reference comes once, before its
    cases. "{n}" in the reference's ``file`` becomes a number.
    """
    jobs: list[Job] = []
    saved: dict[Case, str] = {}
    for case in sorted(cases, key=lambda case: case.world):
        reference = reference_of(case)
        if reference not in saved:
            saved[reference] = file.replace("{n}", str(len(saved)))
            jobs.append(Job(reference, save=saved[reference]))
        jobs.append(Job(case, reference=saved[reference], other_cut=other_cut))
    return jobs


@dataclass
class Outcome:
    """The outcome of a job. `status` is "ok", "error" or "hang". Differences are the largest over all ranks.

    loss_difference, grad_difference, param_difference, note_difference: largest absolute difference (inf where a
    number is not finite); notes are those of the training loop.
    grad_size: largest absolute gradient, which shows that the comparison is not of zeros. compared: number of
    parameters compared, over all ranks. traces, facts: per rank, the recorded lines and the results of a check.
    """

    status: str
    message: str = ""
    loss_difference: float | None = None
    grad_difference: float | None = None
    param_difference: float | None = None
    note_difference: float | None = None
    grad_size: float = 0.0
    compared: int = 0
    losses: list[float] = field(default_factory=list)
    traces: list[list[str]] = field(default_factory=list)
    facts: list[Any] = field(default_factory=list)

    def short(self) -> str:
        """The text for a cell of a table: the largest difference, or the failure."""
        if self.status != "ok":
            return self.status if not self.message else f"{self.status}: {self.message}"
        found = (self.loss_difference, self.grad_difference, self.param_difference, self.note_difference)
        worst = max((x for x in found if x is not None), default=0.0)
        return "0" if worst == 0 else f"{worst:.3g}"
