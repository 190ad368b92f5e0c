"""An output layer and its loss, split over all ranks of a pipeline by rows of its weight (Vocabulary Parallelism, arXiv
2411.05288): the module that holds a rank's rows, and the runner by which the engine uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_pp.comm.collectives import Collective, Collectives
from megatron_pp.comm.communicator import P2PCore
from megatron_pp.comm.p2p_communicator import timed
from megatron_pp.comm.wait_handle import WaitHandle
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.output_layer import output_instructions as ops
from megatron_pp.features.output_layer.output_instructions import output_root
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.ir.tasks import MessageKey, Task
from megatron_pp.plan.orders import find_family
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.compute import LossRecord, each_tensor, in_one_block
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor
from megatron_pp.runtime.engine.model_steps import ModelSteps, scaled_loss
from megatron_pp.runtime.message_shapes import Messages
from megatron_pp.runtime.step_hooks import FeatureRun, StepHooks


def rows_of_rank(vocab_size: int, rank: int, size: int) -> range:
    """The rows of the output weight on ``rank`` of ``size``: ceil(vocab_size / size) of them, fewer on the last
    ranks."""
    each = -(-vocab_size // size)
    return range(min(rank * each, vocab_size), min((rank + 1) * each, vocab_size))


@dataclass
class _Microbatch:
    """What a rank keeps of one microbatch. ``exponentials``, ``[tokens, rows]``: of the logits minus their maximum over
    this rank's rows. ``statistics``, ``[4, tokens]``: that maximum, the sum of exponentials and the target's logit,
    first over this rank's rows and later over all; and the label, later a label of another rank that differs, if there
    is one.
    """

    labels: Tensor
    loss_func: Callable[..., Any]
    x: Tensor = field(init=False)
    exponentials: Tensor = field(init=False)
    statistics: Tensor = field(init=False)
    partial_grad: Tensor | None = None
    loss_grad: Tensor | None = None
    dtype: torch.dtype = field(init=False)  # of X


class SplitOutputLayer(torch.nn.Module):
    """A rank's rows of an output layer ``logits = hidden @ weight.T`` with cross-entropy, for schedules that split it
    (``vocab_1f1b``, ``vocab_1f1b_alg1``). Every rank's model chunk has one as a submodule, and calls it with its output
    and the labels of the microbatch. The layer's result is the stage's output.

    On every rank ``forward_step_func`` then returns the stage's output and the loss function. The loss function is
    called on each rank with the losses of all tokens, in the labels' shape and float32 or wider, because their
    gradients are needed on each rank. It must give the same on all ranks. Its report counts on the last stage's rank.

    Args:
        hidden_size: size of the last dimension of the stages' outputs.
        vocab_size: number of rows of the whole weight.
        rank, size: this rank's place in the pipeline.
        ignore_index: tokens with this label have a loss and a gradient of 0, as in ``cross_entropy``.

    ``weight`` is ``[rows, hidden_size]``, with ``rows`` the numbers of its rows. The caller initialises it."""

    def __init__(
        self, hidden_size: int, vocab_size: int, rank: int, size: int, *, ignore_index: int = -100, **factory: Any
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.ignore_index = ignore_index
        self.rows = rows_of_rank(vocab_size, rank, size)
        self.weight = torch.nn.Parameter(torch.zeros(len(self.rows), hidden_size, **factory))
        self._labels: Tensor | None = None

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Note ``labels`` (int64, of ``hidden``'s shape without its last dimension) and return ``hidden``. Raises
        ScheduleInputError for other labels, and on the CPU for a label that is neither a row of the weight nor
        ``ignore_index``. A CUDA device stops at such a label."""
        if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
            raise ScheduleInputError(
                f"labels have shape {list(labels.shape)} and are {labels.dtype}; a split output layer needs one for "
                f"each token of the stage's output, {list(hidden.shape[:-1])}, and torch.int64"
            )
        outside = ((labels < 0) | (labels >= self.vocab_size)) & (labels != self.ignore_index)
        _refuse(
            outside,
            f"a label of a split output layer is outside of 0 to {self.vocab_size - 1}, and not ignore_index "
            f"({self.ignore_index})",
            lambda token: f"token {token} has label {labels.flatten()[token]}",
        )
        self.__dict__["_labels"] = labels
        return hidden

    def take_labels(self) -> Tensor | None:
        """Take the labels of the last forward."""
        labels = self._labels
        self.__dict__["_labels"] = None
        return labels

    def pass_s(self, of: _Microbatch, with_input_grad: bool) -> None:
        """Compute the logits of the rank's rows and their statistics. ``with_input_grad``: also the part of X's
        gradient that can be computed from them, ``exponentials @ weight``."""
        weight = self.weight
        rows = self.rows
        x = of.x.flatten(0, -2)
        logits = (x @ weight.to(x.dtype).t()).to(torch.promote_types(x.dtype, torch.float32))
        maximum = logits.amax(1) if len(rows) else logits.new_full((len(x),), -torch.inf)
        place, mine = _own_labels(of.labels, rows)
        target = (
            logits.gather(1, place[:, None])[:, 0].masked_fill(~mine, 0.0) if len(rows) else torch.zeros_like(maximum)
        )
        of.exponentials = logits.sub_(maximum[:, None]).exp_()
        of.statistics = torch.stack((maximum, of.exponentials.sum(1), target, of.labels.flatten().to(maximum.dtype)))
        of.partial_grad = of.exponentials @ weight.to(of.exponentials.dtype) if with_input_grad else None

    def combine(self, of: _Microbatch, gathered: Tensor) -> None:
        """Combine the statistics of all ranks, ``gathered``, ``[ranks, 4, tokens]``, in the order of ranks. Scales the
        rank's exponentials to its softmax, and completes its part of X's gradient, except for the loss's gradient."""
        weight = self.weight
        rows = self.rows
        maximum = gathered[:, 0].amax(0)
        total = (gathered[:, 1] * (gathered[:, 0] - maximum).exp()).sum(0)
        target = gathered[:, 2].sum(0)
        scale = ((of.statistics[0] - maximum).exp() / total)[:, None]
        least, most = gathered[:, 3].aminmax(dim=0)
        other = torch.where(most == of.statistics[3], least, most)
        of.statistics.copy_(
            torch.stack((maximum, total, target, other))
        )  # in place: its memory is the compute stream's
        of.exponentials.mul_(scale)
        if of.partial_grad is not None and len(rows):
            place, mine = _own_labels(of.labels, rows)
            of.partial_grad.mul_(scale).sub_(weight[place].masked_fill(~mine[:, None], 0.0))

    def pass_t(self, of: _Microbatch, with_input_grad: bool) -> None:
        """The weight gradient of the rank's rows, added to the parameter's as autograd does, its hooks included; with
        ``with_input_grad`` the rank's part of X's gradient."""
        weight = self.weight
        rows = self.rows
        assert of.loss_grad is not None
        grad = of.exponentials
        place, mine = _own_labels(of.labels, rows)
        if len(rows):
            grad.scatter_add_(1, place[:, None], -mine[:, None].to(grad.dtype))
        grad.mul_(of.loss_grad[:, None])
        of.partial_grad = grad @ weight.to(grad.dtype) if with_input_grad else None
        x = of.x.flatten(0, -2)
        of_weight = (grad.to(x.dtype).t() @ x).to(weight.dtype)
        del of.exponentials, of.x
        with torch.enable_grad():
            torch.autograd.backward((weight.view_as(weight),), (of_weight,))


def split_layers(chunks: Iterable[torch.nn.Module]) -> list[SplitOutputLayer]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, SplitOutputLayer)]


def check_split_layer(inputs: StepInputs, schedule: str, barriers: int, messages: Messages) -> None:
    """Raises ScheduleInputError if only one of model and schedule splits the output layer, or if the step asks for
    something that a split one cannot give."""
    count = len(split_layers(inputs.chunks))
    if barriers and count != 1:
        raise ScheduleInputError(
            f"schedule {schedule} splits the output layer over all ranks, and this rank's model has {count} "
            "megatron_pp.SplitOutputLayer; it needs one on every rank"
        )
    if count and not barriers:
        raise ScheduleInputError(
            f"the model has a megatron_pp.SplitOutputLayer, and schedule {schedule} leaves the output layer to the "
            "last stage; choose vocab_1f1b"
        )
    if barriers and (inputs.collect_non_loss_data or messages.received is not None or messages.sent is not None):
        raise ScheduleInputError(
            f"schedule {schedule} splits the output layer: it gives losses, no other data (collect_non_loss_data), and "
            "stages send tensors, no dicts"
        )


class _Step(StepHooks):
    def why_not_in_megatron(self, settings: StepSettings) -> str:
        return (
            f"config.pipeline_schedule is {settings.pipeline_schedule!r}, which splits the output layer over all "
            "ranks; Megatron's GPTModel has it, its loss and its copy of the word embeddings on the last stage alone. "
            "Choose another schedule, or train a model with a megatron_pp.SplitOutputLayer without install()"
        )

    def check(self, draft: PlanSpec, inputs: StepInputs, settings: StepSettings, wanted: Messages) -> None:
        check_split_layer(inputs, draft.schedule, find_family(draft.schedule).barriers, wanted)

    def steps(self) -> type[ModelSteps]:
        return OutputLayerSteps

    def runner(self, run: FeatureRun) -> OutputLayerRunner:
        return OutputLayerRunner(run.plan.placement, run.communicator, run.steps, run.plan.spec.forward_only)


STEP = _Step()


class OutputLayerSteps(ModelSteps):
    """``ModelSteps`` for a split output layer, which computes the loss. A forward notes the microbatch's labels and
    loss function, and the last stage returns its output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.layer,) = split_layers(self.chunks)
        self.noted: dict[int, _Microbatch] = {}
        self._reports = list(self.options.is_last_stage)
        self.options.is_last_stage = [False for _ in self._reports]

    def _call(self, chunk: int, mb: int) -> tuple[Any, Any]:
        output, loss_func = super()._call(chunk, mb)
        labels = self.layer.take_labels()
        if labels is None or loss_func is None:
            what = "the model gave its SplitOutputLayer no labels" if labels is None else "there is no loss function"
            raise ScheduleInputError(
                f"microbatch {mb}: {what}; with a split output layer every rank needs both, as logits are whole nowhere"
            )
        self.noted[mb] = _Microbatch(labels, loss_func)
        return each_tensor(in_one_block, output) if self._reports[chunk] else output, None  # to be broadcast

    def loss_grad(self, microbatch: _Microbatch) -> Tensor | None:
        """The gradient of each token's loss, ``[tokens]``; None in evaluation. On the last stage's rank the loss
        function's report counts."""
        options = self.options
        reports = any(self._reports)
        if options.forward_only and not reports:
            return None
        maximum, total, target, _ = microbatch.statistics
        ignored = microbatch.labels.flatten() == self.layer.ignore_index
        with torch.set_grad_enabled(not options.forward_only):
            losses = (maximum + total.log() - target).masked_fill_(ignored, 0.0)
            losses.requires_grad_(not options.forward_only)
            record = self.record if reports else LossRecord()
            of_tokens = losses.view(microbatch.labels.shape)
            loss = scaled_loss(of_tokens, microbatch.loss_func, self.settings, options, record)
            if options.forward_only:
                return None
            if self.grad_scale_func is not None:
                loss = self.grad_scale_func(loss)
            return torch.autograd.grad(loss, losses)[0].masked_fill(ignored, 0.0)


def _refuse(wrong: Tensor, why: str, of_token: Callable[[int], str]) -> None:
    """Raises ScheduleInputError for the first token for which ``wrong`` is true. The host does not wait for a CUDA
    device: instead the device stops with an assertion, as in ``cross_entropy``."""
    if wrong.is_cuda:
        torch._assert_async(~wrong.any(), why)
    elif wrong.any():
        raise ScheduleInputError(f"{why}: {of_token(int(wrong.flatten().nonzero()[0]))}")


def _own_labels(labels: Tensor, rows: range) -> tuple[Tensor, Tensor]:
    """For each token the place of its label among ``rows`` (0 if it is not among them), and whether it is among
    them."""
    place = labels.flatten() - rows.start
    mine = (place >= 0) & (place < len(rows))
    return place.masked_fill(~mine, 0), mine


@dataclass(eq=False)
class OutputLayerRunner:
    """Runs S, T and the collectives of one rank; ``steps`` are those of the step. Of the engine's tables it reads the
    last stage's ``outputs`` and makes its ``output_grads``."""

    placement: Placement
    communicator: P2PCore
    steps: OutputLayerSteps
    forward_only: bool
    handles: dict[MessageKey, WaitHandle] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.layer = self.steps.layer
        self.root = output_root(self.placement)
        self.is_root = self.communicator.rank == self.root
        self.early = self.placement.barriers == 1  # whether S makes the part of X's gradient, and not T
        self.trains = not self.forward_only

    @property
    def kept(self) -> dict[int, _Microbatch]:
        """Microbatch -> what is kept of it, from its forward until nothing of it is needed."""
        return self.steps.noted

    @property
    def tables(self) -> dict[str, dict[Any, Any]]:
        return {"microbatches of the output layer": self.kept, "collectives": self.handles}

    def attach(self, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        """Add the handlers. No stage gives the loss, because the collectives and passes here compute it."""
        self.executor = weakref.proxy(engine)
        engine.loss_stage = ins.NONE
        handlers |= {
            ops.BROADCAST: self._broadcast,
            ops.WAIT_BROADCAST: self._wait,
            ops.OUTPUT_S: self._s,
            ops.ALL_REDUCE: self._all_reduce,
            ops.WAIT_ALL_REDUCE: self._wait_all_reduce,
            ops.OUTPUT_T: self._t,
            ops.REDUCE: self._reduce,
            ops.WAIT_REDUCE: self._wait_reduce,
        }

    def _post(self, at: Task, collective: Collective, name: str) -> None:
        self.handles[at.message] = self.communicator.post_collective(collective, name)

    def _wait(self, at: Task) -> None:
        self.handles.pop(at.message).wait()

    def _broadcast(self, at: Task) -> None:
        microbatch = self.kept[at.mb]
        root = self.root
        if self.is_root:
            x = self.executor.outputs[at.key].detach()
        else:
            x = self.communicator.allocate((*microbatch.labels.shape, self.layer.weight.shape[1]), False)
        microbatch.x = x
        microbatch.dtype = x.dtype
        self._post(at, lambda group: group.broadcast(x, root), "broadcast of the last stage's output")

    def _s(self, at: Task) -> None:
        with torch.no_grad(), timed(self.steps.timers, "forward-compute"):
            self.layer.pass_s(self.kept[at.mb], self.early and self.trains)
        if self.forward_only:
            del self.kept[at.mb].x
            self._give_back(at)

    def _all_reduce(self, at: Task) -> None:
        # Local names, because ``self`` keeps the handle of ``run``.
        of = self.kept[at.mb]
        layer = self.layer
        root = self.root

        def run(group: Collectives) -> None:
            layer.combine(of, group.all_gather(of.statistics))
            if of.partial_grad is not None:
                group.reduce(of.partial_grad, root)

        self._post(at, run, "all-reduce of the softmax statistics")

    def _wait_all_reduce(self, at: Task) -> None:
        self._wait(at)
        of = self.kept[at.mb]
        own = of.labels.flatten()
        other = of.statistics[3].long()
        _refuse(
            own != other,
            f"microbatch {at.mb}: ranks gave their SplitOutputLayer different labels; every rank's data iterator gives "
            "the same ones",
            lambda token: (
                f"token {token} has label {own[token]} on rank {self.communicator.rank}, {other[token]} on another"
            ),
        )
        of.loss_grad = self.steps.loss_grad(of)
        if self.early and self.trains:
            grad, of.partial_grad = of.partial_grad, None
            if self.is_root and grad is not None and of.loss_grad is not None:
                self._give_gradient(at, of, grad.mul_(of.loss_grad[:, None]))
        if self.forward_only:
            del self.kept[at.mb]

    def _t(self, at: Task) -> None:
        of = self.kept[at.mb]
        with torch.no_grad(), timed(self.steps.timers, "backward-compute"):
            self.layer.pass_t(of, not self.early)
        self._give_back(at)
        if self.early:
            del self.kept[at.mb]
        self.executor.close_sync()

    def _reduce(self, at: Task) -> None:
        grad = self.kept[at.mb].partial_grad
        root = self.root
        assert grad is not None
        self._post(at, lambda group: group.reduce(grad, root), "reduction of the output's gradient")

    def _wait_reduce(self, at: Task) -> None:
        self._wait(at)
        of = self.kept.pop(at.mb)
        if self.is_root and of.partial_grad is not None:
            self._give_gradient(at, of, of.partial_grad)

    def _give_gradient(self, at: Task, of: _Microbatch, grad: Tensor) -> None:
        shape = *of.labels.shape, self.layer.weight.shape[1]
        self.executor.output_grads[at.key] = grad.view(shape).to(of.dtype)

    def _give_back(self, at: Task) -> None:
        """Called when the last stage's output is not read any more."""
        if self.is_root:
            self.executor.drop_data(at.key)
