"""Holds a rank's copies of named tensors, which stages send to later stages, and the sums of their gradients.

A stage that uses some gets its input and behind it a dict of them, by ``set_input_tensor``. A stage that makes some
returns (output, dict). The plan says which (``routes.py``), moves them, and drops them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_pp.comm.communicator import Receive, Send
from megatron_pp.comm.transport import ACT, GRAD
from megatron_pp.config.settings import TE_GRAPHS, StepSettings
from megatron_pp.errors import P2PShapeError, ScheduleInputError
from megatron_pp.features.skip_tensors.routes import Held, SkipTensor, routes_in
from megatron_pp.features.skip_tensors.skip_instructions import DROP
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.compute import Activation, Root, in_one_block
from megatron_pp.runtime.engine.deallocate import backward_root
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor
from megatron_pp.runtime.message_shapes import Messages
from megatron_pp.runtime.step_hooks import FeatureRun, StepHooks

TensorKey = tuple[int, int, int, str]  # stage where the rank holds it, microbatch, slice, name


def check_skip_tensors(tensors: Iterable[SkipTensor], inputs: StepInputs, settings: StepSettings) -> None:
    """Raises ScheduleInputError for settings that exclude named tensors, and for an unknown dtype."""
    for tensor in tensors:
        _dtype_of(tensor, settings.pipeline_dtype)
    for given, name, why in (
        (inputs.adjust_tensor_shapes_fn is not None, "adjust_tensor_shapes_fn", "that gives edges other tensors"),
        (settings.cuda_graph_impl == TE_GRAPHS, "cuda_graph_impl", "graphs reuse the memory of gradients"),
    ):
        if given:
            raise ScheduleInputError(f"config.skip_tensors does not go with {name}: {why}")


def _dtype_of(tensor: SkipTensor, default: torch.dtype | None) -> torch.dtype | None:
    if tensor.dtype is None:
        return default
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype) or (tensor.gradient and not dtype.is_floating_point):
        raise ScheduleInputError(
            f"config.skip_tensors: {tensor.name} has dtype {tensor.dtype!r}; it must be the name of one in torch, "
            "as in 'float32', and one of floating point unless it has no gradient"
        )
    return dtype


class _Step(StepHooks):
    def why_not_in_megatron(self, settings: StepSettings) -> str:
        if not settings.skip_tensors:
            return ""
        return (
            "config.skip_tensors names tensors that skip stages, and Megatron's models give a stage one tensor; "
            "leave it out, or train stages that take and give named tensors without install()"
        )

    def check(self, draft: PlanSpec, inputs: StepInputs, settings: StepSettings, wanted: Messages) -> None:
        if draft.skip_tensors:
            check_skip_tensors(draft.skip_tensors, inputs, settings)

    def runner(self, run: FeatureRun) -> SkipRunner | None:
        if not run.plan.spec.skip_tensors:
            return None
        graphs = run.graphs or not run.plan.spec.forward_only
        return SkipRunner(run.plan, [one.send for one in run.shapes], run.communicator.dtype, graphs)


STEP = _Step()


class SkipRunner:
    """``shapes``: of the activations between stages, by slice; None where they are not known before they come.
    ``dtype``: that of the activations. ``graphs``: whether stages build autograd graphs."""

    def __init__(self, plan: Plan, shapes: Sequence[Any], dtype: torch.dtype | None, graphs: bool) -> None:
        routes = routes_in(plan)
        assert routes is not None
        self.routes = routes
        self.plan = plan
        self.graphs = graphs
        self.sums_gradients = graphs and not plan.spec.forward_only
        self.held: dict[TensorKey, Tensor] = {}  # tensors; those that stages of this rank use are leaves
        self.roots: dict[TensorKey, Root] = {}  # roots of the tensors made here
        self.sums: dict[TensorKey, Tensor] = {}
        self.tables: dict[str, dict[Any, Any]] = {
            "named tensors": self.held,
            "their graphs": self.roots,
            "sums of their gradients": self.sums,
        }
        self._dtypes = {one: _dtype_of(one, dtype) for one in plan.spec.skip_tensors}
        self._shapes = {one: self._shapes_of(one, shapes) for one in plan.spec.skip_tensors}

    def _shapes_of(self, tensor: SkipTensor, shapes: Sequence[Any]) -> list[Any]:
        """The shape of ``tensor`` in each slice. Its first dimension is cut as that of the activations."""
        if tensor.shape is None or len(shapes) == 1:
            return [tensor.shape or shape for shape in shapes]
        whole = sum(shape[0] for shape in shapes)
        return [(tensor.shape[0] * shape[0] // whole, *tensor.shape[1:]) for shape in shapes]

    def attach(self, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        """Let messages with a name move the tensors held here, and let chunks run with these tensors."""
        self.engine = weakref.proxy(engine)
        for op in ins.POST_OPS | ins.WAIT_OPS:
            named = self._wait if op in ins.WAIT_OPS else self._post
            handlers[op] = partial(_by_name, handlers[op], named)
        handlers[DROP] = self._drop
        calls = engine.calls
        calls.named_request = self.request
        calls.named_release = self.finish
        calls.forward = partial(self.forward, calls.forward)
        calls.backward = partial(self._backward, calls.backward)

    def _post(self, at: Task) -> None:
        self.engine.post(at, self.request(at))

    def _wait(self, at: Task) -> None:
        handle = self.engine.handles.pop(at.message)
        handle.wait()
        key = _key(self._of(at), at)
        if at.op == ins.WAIT_F:
            self.held[key] = handle.tensor
        else:
            self._add(key, handle.tensor)

    def _drop(self, at: Task) -> None:
        """Drop a tensor now, or behind sends that are finished later."""
        deferred = self.engine.deferred
        if deferred:
            deferred.append((deferred[-1][0], at))
        else:
            self.finish(at)

    def _backward(self, call: Callable[..., Any], at: Task, given: Any, output: Any, output_grad: Any) -> Any:
        grad = call(at, given, *self.with_roots(at, output, output_grad))
        self.collect(at)
        return grad

    def forward(self, call: Callable[[Task, Activation], Activation], at: Task, given: Activation) -> Activation:
        """Run the chunk. Returns its output without the named tensors, which are held here. Raises ScheduleInputError
        if the chunk gives other tensors than are declared, P2PShapeError if one has another shape or dtype."""
        used = self.routes.used[at.stage]
        made = self.routes.made[at.stage]
        if used:
            named = {name: self.held[_key(held, at)] for name, held in used.items()}
            given = [*(given if isinstance(given, list) else [given]), named]
        output = call(at, given)
        if not made:
            return output
        several = isinstance(output, (tuple, list)) and len(output) == 2 and isinstance(output[1], Mapping)
        if not several or set(output[1]) != set(made):
            got = f"(output, dict of {', '.join(output[1])})" if several else f"a {type(output).__name__}"
            raise ScheduleInputError(
                f"stage {at.stage} gave {got}; config.skip_tensors says that it gives (output, dict of "
                f"{', '.join(made)})"
            )
        for name, held in made.items():
            self._hold(held, at, output[1][name])
        return output[0]

    def _hold(self, held: Held, at: Task, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            raise ScheduleInputError(f"stage {at.stage} gave a {type(tensor).__name__} as {held.name}, not a tensor")
        expected = self._shapes[held.tensor][at.part]
        dtype = self._dtypes[held.tensor] or tensor.dtype
        fits = expected is None or self.plan.spec.variable_shapes or tuple(expected) == tuple(tensor.shape)
        if not fits or tensor.dtype != dtype:
            raise P2PShapeError(
                f"tensor {held.name} of stage {at.stage} for microbatch {at.mb} has shape {list(tensor.shape)} and is "
                f"of {tensor.dtype}, but later stages expect {list(expected or tensor.shape)} of {dtype}: declare its "
                "shape and dtype in config.skip_tensors, or set variable_seq_lengths where shapes vary"
            )
        key = _key(held, at)
        own = in_one_block(tensor.detach()) if held.sends else tensor.detach()
        self.held[key] = own.requires_grad_(self._is_leaf(held))
        root = backward_root(tensor) if self.sums_gradients and held.tensor.gradient else None
        if root is not None:
            self.roots[key] = root

    def _is_leaf(self, held: Held) -> bool:
        """Whether stages of this rank make gradients of the tensor."""
        return self.graphs and held.tensor.gradient and bool(held.users)

    def with_roots(self, at: Task, output: Any, output_grad: Activation) -> tuple[Any, Activation]:
        """The roots of the backward of ``at``, and their gradients: the output, and the tensors that the stage made."""
        named = []
        for held in self.routes.made[at.stage].values():
            root = self.roots.pop(_key(held, at), None)
            total = self.sums.pop(_key(held, at), None)
            if root is not None and total is not None:
                named.append((root, total))
        if not named:
            return output, output_grad
        own = [] if output is None else [(output, output_grad)]
        roots, grads = zip(*own, *named, strict=True)
        return list(roots), list(grads)

    def collect(self, at: Task) -> None:
        """Called after a backward: add the gradients of the tensors that the stage used to the rank's sums. If there is
        none, a rank that waits for the sum gets zeros."""
        for held in self.routes.used[at.stage].values():
            key = _key(held, at)
            leaf = self.held[key]
            grad, leaf.grad = leaf.grad, None
            if grad is not None:
                self._add(key, grad)
            elif held.tensor.gradient and not held.is_made_here and key not in self.sums:
                self.sums[key] = torch.zeros_like(leaf, requires_grad=False)

    def _add(self, key: TensorKey, grad: Tensor) -> None:
        """Add ``grad`` to a sum, in the order of the calls. The first one becomes the sum; nothing else holds it."""
        total = self.sums.get(key)
        if total is None:
            self.sums[key] = grad
        else:
            with torch.no_grad():
                total.add_(grad)

    def request(self, at: Task) -> Send | Receive:
        """The request that a send or receive posts."""
        held = self._of(at)
        channel = ACT if at.op in (ins.SEND_F, ins.RECV_F) else GRAD
        dtype = self._dtypes[held.tensor]
        if at.op in ins.RECV_OPS:
            shape = self._shapes[held.tensor][at.part]
            leaf = at.op == ins.RECV_F and self._is_leaf(held)
            return Receive(shape, at.peer, channel, leaf, dtype)
        table = self.held if at.op == ins.SEND_F else self.sums
        return Send(table[_key(held, at)], at.peer, channel, dtype)

    def finish(self, at: Task) -> None:
        """Called when a send is over or the plan drops the tensor: release the tensor if this was its last use."""
        if at.op == ins.FREE_B:
            del self.sums[_key(self._of(at), at)]
        elif at.op == DROP:
            del self.held[_key(self._of(at), at)]

    def _of(self, at: Task) -> Held:
        held = self.routes.of(at.instruction)
        assert held is not None, "the plan was verified"
        return held


def _by_name(plain: Callable[[Task], Any], named: Callable[[Task], Any], at: Task) -> Any:
    return (named if at.tensor else plain)(at)


def _key(held: Held, at: Task) -> TensorKey:
    return held.stage, at.mb, at.part, held.name
