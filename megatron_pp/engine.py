"""The engine: walks one rank's plan, one dispatch per instruction.

All state of a step is in dictionaries keyed (chunk, microbatch), with nothing left in them at the end. The engine
knows no schedule: order, communication and releases stand in the plan, which was verified before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from megatron_pp.errors import P2PShapeError
from megatron_pp.overlap import HalfCall, PairRunner
from megatron_pp.p2p_core import P2PCore, Receive, Send, is_single_shape
from megatron_pp.plan import instruction as ins
from megatron_pp.plan.instruction import Instruction
from megatron_pp.plan.pairs import is_pair
from megatron_pp.plan.spec import Plan
from megatron_pp.schedule_inputs import say_once
from megatron_pp.steps import Activation, Steps
from megatron_pp.sync_hooks import SyncHooks
from megatron_pp.transport import ACT, GRAD
from megatron_pp.wait_handle import WaitHandle
from megatron_pp.weight_grad.store import WeightGradStore

Key = tuple[int, int]  # (chunk, microbatch)


class _Neighbours(NamedTuple):
    """Where one chunk's messages come from and go to: pipeline ranks, or chunks of this rank for hand-offs; None
    where there is no such stage.
    """

    act_from: int | None
    act_to: int | None
    grad_from: int | None
    grad_to: int | None
    chunk_before: int | None
    chunk_after: int | None


class Shapes(NamedTuple):
    """Shapes of what this rank receives and sends towards the last stage: one shape or a list of shapes each."""

    receive: Any
    send: Any


class PlanExecutor:
    """Executes ``plan`` on the communicator's rank, once. ``position`` is the index of the current instruction at any
    time.
    """

    def __init__(
        self,
        plan: Plan,
        communicator: P2PCore,
        steps: Steps,
        hooks: SyncHooks,
        shapes: Shapes,
        *,
        deallocate: bool = True,
        max_pending_sends: int = 2,
        weights: WeightGradStore | None = None,
        pair_runner: PairRunner | None = None,
        observer: Any = None,
    ) -> None:
        self.plan = plan
        self.rank = communicator.rank
        self.program = plan.programs[self.rank]
        self.communicator = communicator
        self.steps = steps
        self.hooks = hooks
        self.shapes = shapes
        sent = [shapes.send] if is_single_shape(shapes.send) else shapes.send or []
        self._sent_shapes = [] if communicator.shapes_vary or communicator.size == 1 else [list(s) for s in sent]
        self._sent_shape = tuple(self._sent_shapes[0]) if len(self._sent_shapes) == 1 else None
        self.deallocate = deallocate
        self.weights = weights
        self.pair_runner = pair_runner
        self.observer = observer
        self.forward_only = plan.spec.forward_only
        self.position = 0
        self.inputs: dict[Key, Activation] = {}
        self.outputs: dict[Key, Activation] = {}
        self.output_grads: dict[Key, Activation] = {}
        self.input_grads: dict[Key, Activation] = {}
        self.act_receives: dict[Key, WaitHandle] = {}
        self.grad_receives: dict[Key, WaitHandle] = {}
        self.act_sends: dict[Key, WaitHandle] = {}
        self.grad_sends: dict[Key, WaitHandle] = {}
        self.deferred: deque[tuple[WaitHandle, Callable[[WaitHandle, Key], None], Key]] = deque()
        self.max_deferred = max_pending_sends if communicator.transport.pollable else 0
        self.split: frozenset[Key] = frozenset()
        if weights is not None or pair_runner is not None:
            self.split = frozenset((at.chunk, at.mb) for at in self.program if at.op == ins.WEIGHT)
        self._sync_open = False
        self._around = [_neighbours(plan, self.rank, chunk) for chunk in range(plan.spec.num_chunks)]

    def run(self) -> None:
        """Execute every instruction. Afterwards no tensor, handle or gradient of the step is left here."""
        handlers = self._handlers()
        if not self.forward_only:
            self.hooks.disable_grad_sync()
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.forward_only), self._weight_step():
                pairs = self._pairs()
                for position, (op, chunk, mb, members) in enumerate(self.program):
                    if position in pairs:
                        self._run_pair_at(position, handlers)
                        continue
                    self.position = position
                    handlers[op](members or (chunk, mb))
                self._settle(0)
        finally:  # also after a failure: gradients must not stay local in the steps of a user who goes on
            self.hooks.enable_grad_sync()
        self._check_nothing_left()

    @property
    def instruction(self) -> Instruction:
        """The instruction that is being executed (the last one, after the end)."""
        return self.program[self.position]

    def _handlers(self) -> dict[str, Callable[[Any], None]]:
        handlers: dict[str, Callable[[Any], None]] = {
            ins.FORWARD: self._forward,
            ins.BACKWARD: self._backward,
            ins.WEIGHT: self._weight,
            ins.RECV_ACT: self._recv_act,
            ins.WAIT_ACT: self._wait_act,
            ins.SEND_ACT: self._send_act,
            ins.RELEASE_ACT: self._release_act,
            ins.HAND_ACT: self._hand_act,
            ins.RECV_GRAD: self._recv_grad,
            ins.WAIT_GRAD: self._wait_grad,
            ins.SEND_GRAD: self._send_grad,
            ins.RELEASE_GRAD: self._release_grad,
            ins.HAND_GRAD: self._hand_grad,
            ins.PARAM_SYNC: self._param_sync,
            ins.GRAD_ENABLE: self._grad_enable,
            ins.GRAD_SYNC: self._grad_sync,
            ins.BATCH: self._batch,
        }
        if self.observer is None:
            return handlers
        return {op: _Observed(handler, self) for op, handler in handlers.items()}

    # -- compute ---------------------------------------------------------------------------------------------

    def _forward(self, key: Key) -> None:
        around = self._around[key[0]]
        given = self.inputs.pop(key, None) if self.forward_only else self.inputs.get(key)
        output = self.steps.forward(key[0], key[1], given)
        single = isinstance(output, torch.Tensor)
        last = around.act_to is None and around.chunk_after is None
        if not last:
            usual = single and output.shape == self._sent_shape
            if not usual and around.act_to is not None and self._sent_shapes:
                self._check_shapes(key, output)
            self.outputs[key] = list(output) if isinstance(output, (list, tuple)) else output
        elif not self.forward_only:
            self.outputs[key] = output

    def _check_shapes(self, key: Key, output: Activation) -> None:
        """The receiver has buffers of the agreed shapes: where more comes, gloo ends its process, and where less comes
        nobody notices.
        """
        tensors = output if isinstance(output, (list, tuple)) else (output,)
        if not all(isinstance(t, torch.Tensor) for t in tensors):
            return  # refused in words of its own when it is to be sent
        shapes = [list(t.shape) for t in tensors]
        if shapes != self._sent_shapes:
            raise P2PShapeError(
                f"the output of chunk {key[0]} for microbatch {key[1]} has shape {_told(shapes)}, but the next stage "
                f"expects {_told(self._sent_shapes)}, from seq_length, micro_batch_size and hidden_size; where shapes "
                "vary, set variable_seq_lengths"
            )

    def _backward(self, key: Key) -> None:
        given, output = self.inputs.pop(key, None), self.outputs.pop(key)
        output_grad = self.output_grads.pop(key, None)
        if output_grad is None and self._around[key[0]].chunk_after is not None:
            output = None  # the next chunk, on this rank, had no use for it
        if self.weights is None:
            grad = self.steps.backward(key[0], key[1], given, output, output_grad)
        else:
            with self.weights.backward(*key, split=key in self.split):
                grad = self.steps.backward(key[0], key[1], given, output, output_grad)
        if given is not None:
            self.input_grads[key] = grad if isinstance(grad, torch.Tensor) else self._to_give(grad, given, key)
        if self._sync_open:
            self._close_sync()

    def _to_give(self, grad: Activation, given: Activation, key: Key) -> Activation:
        """Input gradients of which some are None. This rank's chunks pass None on, as in one process; another rank has
        posted a receive, and gets zeros.
        """
        if self._around[key[0]].grad_to is None:
            return grad
        if not _is_any_there(grad):
            stage = self.plan.placement.stages[self.rank][key[0]]
            say_once(
                f"stage {stage} makes no use of its input: the rank of the stage before gets gradients of zero, where "
                "one process would leave them None, so that its optimizer may still decay weights or move by momentum"
            )
        return _filled(grad, given)

    def _weight(self, key: Key) -> None:
        if self.weights is not None:  # else B did all of it
            self.weights.run(*key)
        if self._sync_open:
            self._close_sync()

    def _weight_step(self) -> AbstractContextManager[None]:
        """The store's step; it is told which microbatch completes the gradients of each chunk."""
        if self.weights is None or self.forward_only:
            return nullcontext()
        return self.weights.step({at.chunk: at.mb for at in self.program if at.op in (ins.BACKWARD, ins.WEIGHT)})

    def _pairs(self) -> frozenset[int]:
        """Positions of both halves of the plan's overlapped pairs."""
        if self.pair_runner is None or not self.plan.spec.overlap_pairs:
            return frozenset()
        firsts = (k for k, (one, two) in enumerate(pairwise(self.program)) if is_pair(one, two, self.split))
        return frozenset(position for first in firsts for position in (first, first + 1))

    def _run_pair_at(self, position: int, handlers: dict[str, Callable[[Any], None]]) -> None:
        """Run the pair whose forward is at ``position``; for its backward nothing is left to do."""
        if self.program[position].op == ins.FORWARD:
            runner = self.pair_runner
            assert runner is not None
            runner.run(*(self._half(runner, at, handlers) for at in (position, position + 1)))

    def _half(self, runner: PairRunner, position: int, handlers: dict[str, Callable[[Any], None]]) -> HalfCall:
        at = self.program[position]
        return runner.half(at.chunk, at.mb, partial(self._run_half, position, handlers))

    def _run_half(self, position: int, handlers: dict[str, Callable[[Any], None]]) -> None:
        self.position = position
        at = self.program[position]
        handlers[at.op]((at.chunk, at.mb))

    # -- communication: each pair posts and finishes ---------------------------------------------------------

    def _recv_act(self, key: Key) -> None:
        peer = self._around[key[0]].act_from
        self.act_receives[key] = self.communicator.post_recv(self.shapes.receive, peer, ACT, not self.forward_only)  # type: ignore[arg-type]

    def _wait_act(self, key: Key) -> None:
        handle = self.act_receives.pop(key)
        handle.wait()
        self.inputs[key] = handle.tensor

    def _recv_grad(self, key: Key) -> None:
        peer = self._around[key[0]].grad_from
        self.grad_receives[key] = self.communicator.post_recv(self.shapes.send, peer, GRAD, False)  # type: ignore[arg-type]

    def _wait_grad(self, key: Key) -> None:
        handle = self.grad_receives.pop(key)
        handle.wait()
        self.output_grads[key] = handle.tensor

    def _send_act(self, key: Key) -> None:
        self.act_sends[key] = self.communicator.post_send(self.outputs[key], self._around[key[0]].act_to, ACT)  # type: ignore[arg-type]

    def _release_act(self, key: Key) -> None:
        self._release(self.act_sends.pop(key), self._wait_then_deallocate, key)

    def _wait_then_deallocate(self, handle: WaitHandle, key: Key) -> None:
        """The one place where an output's data is given back: once its send is done, not before (Megatron-LM#4047)."""
        handle.wait()
        self._drop_data(key)

    def _drop_data(self, key: Key) -> None:
        """Keep of an output what its backward needs. Its data stays only where something else needs it."""
        if self.forward_only:
            del self.outputs[key]
        elif self.deallocate and key in self.outputs:  # the backward may have used the output up already
            self.outputs[key] = self.steps.backward_root(self.outputs[key])

    def _send_grad(self, key: Key) -> None:
        self.grad_sends[key] = self.communicator.post_send(self.input_grads[key], self._around[key[0]].grad_to, GRAD)  # type: ignore[arg-type]

    def _release_grad(self, key: Key) -> None:
        self._release(self.grad_sends.pop(key), self._wait_then_drop, key)

    def _wait_then_drop(self, handle: WaitHandle, key: Key) -> None:
        handle.wait()
        del self.input_grads[key]

    def _batch(self, members: Sequence[Instruction]) -> None:
        requests = [self._request(at) for at in members]
        for at, handle in zip(members, self.communicator.post_batch(requests), strict=True):
            self._handles_of(at.op)[(at.chunk, at.mb)] = handle

    def _request(self, at: Instruction) -> Send | Receive:
        around, key = self._around[at.chunk], (at.chunk, at.mb)
        if at.op == ins.SEND_ACT:
            return Send(self.outputs[key], around.act_to, ACT)  # type: ignore[arg-type]
        if at.op == ins.SEND_GRAD:
            return Send(self.input_grads[key], around.grad_to, GRAD)  # type: ignore[arg-type]
        if at.op == ins.RECV_ACT:
            return Receive(self.shapes.receive, around.act_from, ACT, not self.forward_only)  # type: ignore[arg-type]
        return Receive(self.shapes.send, around.grad_from, GRAD, False)  # type: ignore[arg-type]

    def _handles_of(self, op: str) -> dict[Key, WaitHandle]:
        return {
            ins.SEND_ACT: self.act_sends,
            ins.SEND_GRAD: self.grad_sends,
            ins.RECV_ACT: self.act_receives,
            ins.RECV_GRAD: self.grad_receives,
        }[op]

    def _release(self, handle: WaitHandle, finish: Callable[[WaitHandle, Key], None], key: Key) -> None:
        """Finish a send now, or, where the transport can tell that it is still on its way, a little later."""
        if self.max_deferred and not handle.is_completed():
            self.deferred.append((handle, finish, key))
        else:
            finish(handle, key)
        if self.deferred:
            self._settle(self.max_deferred)

    def _settle(self, most: int) -> None:
        """Finish deferred sends, oldest first: those that are done, and those beyond ``most``."""
        while self.deferred and (len(self.deferred) > most or self.deferred[0][0].is_completed()):
            handle, finish, key = self.deferred.popleft()
            finish(handle, key)

    # -- hand-offs between two chunks of this rank -----------------------------------------------------------

    def _hand_act(self, key: Key) -> None:
        source: Key = (self._around[key[0]].chunk_before, key[1])  # type: ignore[assignment]
        self.inputs[key] = _map(self._fresh_leaf, self.outputs[source])
        self._drop_data(source)

    def _fresh_leaf(self, output: torch.Tensor) -> torch.Tensor:
        leaf = output.detach()
        return leaf if self.forward_only else leaf.requires_grad_()

    def _hand_grad(self, key: Key) -> None:
        grads = self.input_grads.pop((self._around[key[0]].chunk_after, key[1]))  # type: ignore[arg-type]
        if not isinstance(grads, list):
            self.output_grads[key] = grads
        elif _is_any_there(grads):
            used = [(output, grad) for output, grad in zip(self.outputs[key], grads, strict=True) if grad is not None]
            self.outputs[key], self.output_grads[key] = map(list, zip(*used, strict=True))
        else:
            self.output_grads[key] = None

    # -- data-parallel hooks ---------------------------------------------------------------------------------

    def _param_sync(self, key: Key) -> None:
        self.hooks.param_sync(key[0])

    def _grad_enable(self, key: Key) -> None:
        self.hooks.enable_grad_sync(key[0])
        self._sync_open = True

    def _grad_sync(self, key: Key) -> None:
        self.hooks.grad_sync(key[0])

    def _close_sync(self) -> None:
        """Gradient hooks fire in the one backward that GRAD_ENABLE opened them for."""
        self._sync_open = False
        self.hooks.disable_grad_sync()

    def _check_nothing_left(self) -> None:
        left = {
            name: sorted(getattr(self, name))
            for name in (
                "inputs",
                "outputs",
                "output_grads",
                "input_grads",
                "act_receives",
                "grad_receives",
                "act_sends",
                "grad_sends",
            )
            if getattr(self, name)
        }
        if left:
            raise AssertionError(
                f"rank {self.rank}: the plan ended with tensors or handles left: {left}; this is a fault of the engine"
            )


class _Observed:
    """A handler with the observer's ``begin`` and ``end`` around it."""

    def __init__(self, handler: Callable[[Any], None], executor: PlanExecutor) -> None:
        self.handler = handler
        self.executor = executor

    def __call__(self, key: Any) -> None:
        at, observer = self.executor.instruction, self.executor.observer
        observer.begin(at)
        try:
            self.handler(key)
        finally:
            observer.end(at)


def _neighbours(plan: Plan, rank: int, chunk: int) -> _Neighbours:
    placement = plan.placement
    stage = placement.stages[rank][chunk]
    before = placement.homes[stage - 1] if stage > 0 else (None, None)
    after = placement.homes[stage + 1] if stage < placement.num_stages - 1 else (None, None)
    rank_before = None if before[0] == rank else before[0]
    rank_after = None if after[0] == rank else after[0]
    return _Neighbours(
        act_from=rank_before,
        act_to=rank_after,
        grad_from=rank_after,
        grad_to=rank_before,
        chunk_before=before[1] if before[0] == rank else None,
        chunk_after=after[1] if after[0] == rank else None,
    )


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Activation) -> Activation:
    """``function`` of a tensor, or of each tensor of a list."""
    return [function(v) for v in value] if isinstance(value, (list, tuple)) else function(value)


def _filled(grad: Activation, given: Activation) -> Activation:
    """Gradients for the previous stage, which waits for them: zeros where the input had no part in the output."""
    if isinstance(given, (list, tuple)):
        return [torch.zeros_like(x) if g is None else g for g, x in zip(grad, given, strict=True)]
    return torch.zeros_like(given) if grad is None else grad


def _is_any_there(grad: Activation) -> bool:
    return any(g is not None for g in grad) if isinstance(grad, list) else grad is not None


def _told(shapes: list[list[int]]) -> str:
    return str(shapes[0] if len(shapes) == 1 else shapes)
