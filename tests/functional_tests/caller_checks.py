"""Programs that call Megatron's schedules, on ranks: each runs under Megatron's and under this engine with equal bits.

They imitate the places where verl (`megatron_actor.py`, `engine/megatron/transformer_impl.py`) and slime
(`megatron_utils/model.py`, `reloadable_process_group.py`) call the schedules: forward-only calls between training
steps, of several models. The module also checks Megatron's own FullCudaGraphWrapper before it captures, and an
imitation of PagedStashRunner from Megatron's main branch.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.transformer.enums import CudaGraphScope

from megatron_pp.errors import NotServedError
from megatron_pp.integrations import megatron_core
from megatron_pp.runtime.communicators import KEPT, close_communicators
from testkit.megatron import lab as megatron_lab
from testkit.megatron.cases import Case

Rollout = Callable[[Any, Case], list[torch.Tensor]]
VERL = "from megatron.core.pipeline_parallel import get_forward_backward_func"
SMALL = {"hidden": 24, "layers": 4}


def fetched(source: str) -> Any:
    """A framework's module, which has imported the getter by name."""
    module: Any = types.ModuleType("framework")
    exec(source, vars(module))
    return module


def equal_under_both(rollout: Rollout, case: Case) -> int:
    """Return the number of tensors, equal with the engine installed before the framework's import and after it."""
    megatron_lab.set_up_parallel_state(case)
    theirs = rollout(fetched(VERL), case)
    early = fetched(VERL)
    with megatron_core.installed(strict=True):
        ours = [rollout(early, case), rollout(fetched(VERL), case)]
    again = rollout(early, case)
    for other in (*ours, again):
        assert len(other) == len(theirs)
        assert all(torch.equal(one, two) for one, two in zip(other, theirs, strict=True))
    return len(theirs)


def microbatches(case: Case, count: int, step: int) -> list[torch.Tensor]:
    return megatron_lab.batches(dataclasses.replace(case, microbatches=count), step)


def state_of(run: megatron_lab.Run) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.parameters().values()]


def verl(case: Case) -> int:
    return equal_under_both(verl_rollouts, case)


def verl_rollouts(framework: Any, case: Case) -> list[torch.Tensor]:
    """Run a reference, a critic of another size and an actor in one process. Each step has a different number of
    microbatches of different lengths; their shapes are sent ahead, so `seq_length` and `micro_batch_size` are 1."""
    actor, reference = megatron_lab.Run(case), megatron_lab.Run(case)
    critic = megatron_lab.Run(dataclasses.replace(case, model=dataclasses.replace(case.model, **SMALL)))
    found: list[torch.Tensor] = []
    for step, count in enumerate((4, 2, 6)):
        data = microbatches(case, count, step)
        with torch.no_grad():
            for run in (reference, actor, critic):
                found += [one["log_probs"] for one in verl_call(framework, run, data, forward_only=True)]
        for run in (actor, critic):
            for chunk in run.chunks:
                chunk.zero_grad_buffer()
            run.optimizer.zero_grad()
            found += [one[0]["loss"] for one in verl_call(framework, run, data, forward_only=False)]
            run.optimizer.step()
    return found + state_of(actor) + state_of(critic) + state_of(reference)


def verl_call(framework: Any, run: megatron_lab.Run, data: list[torch.Tensor], forward_only: bool) -> list[Any]:
    def forward_step(batch_iter: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        assert not return_schedule_plan
        output, loss_of = megatron_lab.forward_step(False, batch_iter, model)

        def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, Any]:
            if forward_only:
                return torch.tensor(1.0), {"log_probs": -output.detach().clone()}
            loss, report = loss_of(output)
            return loss, [report, None]

        return output, loss_func

    count = len(run.chunks)
    return framework.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(data) for _ in range(count)] if count > 1 else iter(data),
        model=run.chunks,
        num_microbatches=len(data),
        seq_length=1 if run.case.variable_shapes else run.case.model.seq,
        micro_batch_size=1 if run.case.variable_shapes else run.case.model.micro_batch,
        forward_only=forward_only,
    )


class DataIterator:
    """slime's data iterator, which is not an iterator of Python. Each chunk has one, even a rank's only chunk."""

    def __init__(self, data: list[torch.Tensor]) -> None:
        self.data, self.offset = data, 0

    def reset(self) -> None:
        self.offset = 0

    def get_next(self) -> torch.Tensor:
        self.offset += 1
        return self.data[self.offset - 1]


def slime(case: Case) -> int:
    return equal_under_both(slime_rollouts, case)


def slime_rollouts(framework: Any, case: Case) -> list[torch.Tensor]:
    """Copy the weights of the reference and of the actor in turn into one model. The calls of one pass have different
    numbers of microbatches, and read on in the same iterators."""
    run, counts = megatron_lab.Run(case), [4, 2]
    actor = {name: value.clone() for name, value in run.parameters().items()}
    reference = {name: value * 0.5 for name, value in actor.items()}
    iterators = [DataIterator(microbatches(case, sum(counts), 0)) for _ in run.chunks]
    found: list[torch.Tensor] = []
    for weights in (reference, actor):
        for name, value in run.parameters().items():
            value.copy_(weights[name])
        found += slime_forward(framework, run, iterators, counts)
    for iterator in iterators:
        iterator.reset()
    for count in counts:
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        found += [one["loss"] for one in slime_call(framework, run, iterators, count, forward_only=False)]
        run.optimizer.step()
    return [*found, *slime_forward(framework, run, iterators, counts), *state_of(run)]


@torch.no_grad()
def slime_forward(framework: Any, run: megatron_lab.Run, iterators: list[Any], counts: list[int]) -> list[torch.Tensor]:
    for iterator in iterators:
        iterator.reset()
    for chunk in run.chunks:
        chunk.eval()
    run.config.timers = None
    found: list[Any] = []
    for count in counts:
        found += slime_call(framework, run, iterators, count, forward_only=True)
    for chunk in run.chunks:
        chunk.train()
    assert bool(found) == parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return [tensor for one in found for tensor in one["log_probs"]]


def slime_call(framework: Any, run: megatron_lab.Run, iterators: list[Any], count: int, forward_only: bool) -> Any:
    def forward_step(data_iterator: DataIterator, model: Any, return_schedule_plan: bool = False) -> Any:
        assert not return_schedule_plan
        output, loss_of = megatron_lab.forward_step(False, iter([data_iterator.get_next()]), model)
        if forward_only:
            return output, lambda output: (torch.empty(0), {"log_probs": list(-output.detach().clone())})
        return output, loss_of

    more = {} if forward_only else {"decoder_seq_length": None}
    return framework.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators,
        model=run.chunks,
        num_microbatches=count,
        seq_length=run.case.model.seq,
        micro_batch_size=run.case.model.micro_batch,
        forward_only=forward_only,
        **more,
    )


def whole_step_wrapper(case: Case) -> list[Any]:
    """Check Megatron's wrapper, which reads all batches ahead and passes iterators as a list. If the config does not
    ask for CUDA graphs, the engine runs the steps; else Megatron's own schedule does. Return the number of equal
    tensors, and the error that `strict` raises with graphs."""
    count = equal_under_both(wrapped_steps, case)
    run = megatron_lab.Run(case)
    fields = {"cuda_graph_impl": "local", "cuda_graph_scope": [CudaGraphScope.full_iteration]}
    for name, value in fields.items():
        setattr(run.config, name, value)
    with megatron_core.installed(strict=True), pytest.raises(NotServedError) as caught:
        wrapped_call(fetched(VERL), run, 0)
    with megatron_core.installed():
        reports = wrapped_call(fetched(VERL), run, 0)
    assert bool(reports) == parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return [count, str(caught.value)]


def wrapped_steps(framework: Any, case: Case) -> list[torch.Tensor]:
    run = megatron_lab.Run(case)
    found = [one["loss"] for step in range(2) for one in wrapped_call(framework, run, step)]
    return found + [grad.clone() for grad in run.gradients().values()]


def wrapped_call(framework: Any, run: megatron_lab.Run, step: int) -> list[Any]:
    StaticBufferLoader.static_buffers = {"training": [], "validation": []}
    FullCudaGraphWrapper.curr_iteration = {"training": 0, "validation": 0}
    wrapper = FullCudaGraphWrapper(framework.get_forward_backward_func(), cuda_graph_warmup_steps=10)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        return megatron_lab.forward_step(False, iter([next(data_iterator)["tokens"]]), model)

    data = [{"tokens": tokens} for tokens in megatron_lab.batches(run.case, step)]
    return wrapper(**arguments_of(run, forward_step, data))


def arguments_of(run: megatron_lab.Run, forward_step: Any, data: list[Any]) -> dict[str, Any]:
    """Return arguments as in Megatron's training loop: without virtual stages one iterator, and a list of a model."""
    iterators = [iter(data) for _ in run.chunks]
    return {
        "forward_step_func": forward_step,
        "data_iterator": iterators if len(iterators) > 1 else iterators[0],
        "model": run.chunks,
        "num_microbatches": len(data),
        "seq_length": run.case.model.seq,
        "micro_batch_size": run.case.model.micro_batch,
        "decoder_seq_length": run.case.model.seq,
        "forward_only": False,
    }


class StashRunner:
    """Does what PagedStashRunner does around a schedule: keep the batches, and, as after a buffer that was too small,
    clear the gradients and run the step again."""

    def __init__(self, run: megatron_lab.Run, function: Callable[..., Any]) -> None:
        self.run, self.function = run, function

    def __call__(self, **arguments: Any) -> list[Any]:
        given = arguments["data_iterator"]
        iterators = given if isinstance(given, list) else [given]
        kept = [list(iterator) for iterator in iterators]
        for _ in range(2):
            for chunk in self.run.chunks:
                chunk.zero_grad_buffer()
            result = self.function(**{**arguments, "data_iterator": [iter(one) for one in kept]})
        return result


def stash_runner(case: Case) -> int:
    return equal_under_both(stashed_steps, case)


def stashed_steps(framework: Any, case: Case) -> list[torch.Tensor]:
    run = megatron_lab.Run(case)
    runner = StashRunner(run, framework.get_forward_backward_func())

    def forward_step(data_iterator: Any, model: Any) -> Any:
        return megatron_lab.forward_step(False, data_iterator, model)

    reports = runner(**arguments_of(run, forward_step, megatron_lab.batches(case, 0)))
    return [one["loss"] for one in reports] + [grad.clone() for grad in run.gradients().values()]


class ReloadableGroup(dist.ProcessGroup):
    """slime's group: it holds a group that is destroyed while the GPUs generate and made again afterwards."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(rank=ranks.index(dist.get_rank()), size=len(ranks))
        self.ranks = ranks
        self.reload()

    def reload(self) -> None:
        self.group = dist.new_group(self.ranks)

    def destroy(self) -> None:
        dist.destroy_process_group(self.group)
        self.group = None


QUERIES = ("get_rank", "get_world_size", "get_global_rank", "get_process_group_ranks", "get_backend", "broadcast")


def taking_inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for the groups that reloadable groups hold; slime replaces each of torch's functions so."""

    def inner(one: Any) -> Any:
        return one.group if isinstance(one, ReloadableGroup) else one

    return lambda *args, **kwargs: function(*map(inner, args), **{name: inner(one) for name, one in kwargs.items()})


def reloaded_groups(case: Case) -> int:
    """Run steps before and after reloads of the pipeline's group. Its communicator is closed before the second reload.
    Return the number of tensors, which are equal."""
    megatron_lab.set_up_parallel_state(case)
    theirs = wrapped_steps(fetched(VERL), case)
    plain = parallel_state._PIPELINE_MODEL_PARALLEL_GROUP
    with pytest.MonkeyPatch.context() as patched, megatron_core.installed(strict=True):
        group = ReloadableGroup(dist.get_process_group_ranks(plain))
        for name in QUERIES:
            patched.setattr(dist, name, taking_inner(getattr(dist, name)))
        patched.setattr(parallel_state, "_PIPELINE_MODEL_PARALLEL_GROUP", group)
        first = wrapped_steps(fetched(VERL), case)
        before = [one for one in kept_communicators() if one.pp_group is group.group]
        group.destroy()
        group.reload()
        second = wrapped_steps(fetched(VERL), case)
        assert before
        assert not {*map(id, before)} & {*map(id, kept_communicators())}, "closed"
        transports = [one.transport for one in kept_communicators()]
        close_communicators()
        assert kept_communicators() == []
        assert {one._groups for one in transports if one.size > 1} <= {None}
        group.destroy()
        group.reload()
        third = wrapped_steps(fetched(VERL), case)
        group.destroy()
    for ours in (first, second, third):
        assert len(ours) == len(theirs)
        assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    return len(theirs)


def kept_communicators() -> list[Any]:
    return [one for _, kept in KEPT.items() for one in kept.values()]


def swapped_chunks(case: Case) -> str:
    """Return this rank's error in a step under the engine. The first rank has its model chunks in the wrong order."""
    megatron_lab.set_up_parallel_state(case)
    with megatron_core.installed(strict=True):
        run = megatron_lab.Run(case)
        if parallel_state.get_pipeline_model_parallel_rank() == 0:
            run.chunks.reverse()
        with pytest.raises(Exception, match="chunk 0 on rank 0") as raised:
            run.schedule(0, forward_only=False)
    close_communicators()
    return f"{type(raised.value).__name__}: {raised.value}"
