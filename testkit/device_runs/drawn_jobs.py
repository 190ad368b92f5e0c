"""Drawn jobs on virtual devices: several steps with many settings at once, which change between the steps.

A job has one or two data-parallel replicas of a pipeline, whose hooks reduce gradients and gather parameters beside the
pipeline, training and evaluation steps in turn, and a model whose forwards and backwards call CUDA as programs do:
device synchronisations, kernels that are launched for the first time, allocations, streams of their own, queries.
``DrawnJob.check`` runs it and compares every step with one process.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.config.settings import LOCAL_GRAPHS, TE_GRAPHS
from megatron_pp.faults.attach import close_guard
from megatron_pp.features.pairs.pair_runner import in_turn, on_two_streams
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.ir.spec import CHANNELS, ONE_WAY
from megatron_pp.runtime.communicators import KEPT
from megatron_pp.testing.pipeline import toy_step
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from megatron_pp.testing.toy import (
    TOY_SCHEDULES,
    ToyBlock,
    ToyData,
    ToyResult,
    gradients_of,
    merged,
    toy_chunks,
    toy_config,
    toy_loss,
)
from megatron_pp.weight_grad import split_weight_grad
from testkit.models.graphed_layers import InStaticBuffer, StaticGradients
from testkit.streams import LATER_STEPS, DeviceRules, StreamNetwork, StreamReport, virtual_cuda
from testkit.virtual_groups import process_group, virtual_distributed

RATE = 0.125  # of the optimizer
MEASURED = {"forward": 1.0, "backward_input": 1.2, "weight": 0.7, "transfer": 0.2, "memory_limit": 8.0}
WAITING_CALLS = ("synchronize", "first launch", "allocation")
CALLS = (*WAITING_CALLS, "side stream", "query", "host copy")
"""What forwards and backwards call. ``WAITING_CALLS`` wait until the device is idle."""


class DeviceTimers:
    """Megatron's timers: each start and stop of level ``level`` or below waits for the device, with ``barrier`` also
    for all ranks."""

    def __init__(self, level: int, barrier: Callable[[], Any]) -> None:
        self._log_level = level
        self.barrier = barrier

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        if log_level is not None and log_level > self._log_level:
            return SimpleNamespace(start=lambda **more: None, stop=lambda **more: None)
        return SimpleNamespace(start=self._note, stop=self._note)

    def _note(self, barrier: bool = False) -> None:
        if barrier:
            self.barrier()
        torch.cuda.synchronize()


class CallingBlock(ToyBlock):
    """A stage that makes drawn calls of CUDA in its forwards and backwards, and waits for the gather of its
    parameters. ``static``: it returns input gradients in static buffers. ``checkpoints``: it computes its forward again
    in its backward."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.checkpoints = False
        self.call: Callable[[], str] = lambda: ""
        self.before: Callable[[], None] = lambda: None
        self.static: StaticGradients | None = None
        self.sizes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        if self.static is not None and x.requires_grad:
            x = InStaticBuffer.apply(x, self.static)
        what = self.call()
        self._make(what)
        output = checkpoint(super().forward, x, use_reentrant=True) if self._recomputes(x) else super().forward(x)
        if what == "side stream":
            output = self._on_side(output)
        if output.requires_grad:
            output.register_hook(lambda grad: self._make(self.call()))
        return output

    def _recomputes(self, x: torch.Tensor) -> bool:
        return self.checkpoints and x.requires_grad

    def _on_side(self, output: torch.Tensor) -> torch.Tensor:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        output.record_stream(side)
        with torch.cuda.stream(side):
            output = output * 1.0
        current.wait_stream(side)
        output.record_stream(current)
        return output

    def _make(self, what: str) -> None:
        self.sizes += 1
        if what == "synchronize":
            torch.cuda.synchronize()
        elif what == "first launch":
            one = torch.empty(1 + self.sizes % 40, 2 + self.sizes % 7)
            torch.mm(one.fill_(1.0), one.t())
        elif what == "allocation":
            torch.empty(500 + 37 * (self.sizes % 11)).fill_(1.0)
        elif what == "query":
            torch.cuda.current_stream().record_event().query()
        elif what == "host copy":
            torch.ones(3).cpu()


@dataclass(frozen=True)
class DrawnModel:
    """A model of the job. ``split``: its layers can leave weight gradients for later. ``graphs``: a value of
    ``cuda_graph_impl``. ``checkpoints``: it computes its forwards again in its backwards."""

    number: int
    placement: str
    chunks: int
    split: bool
    graphs: str | None
    checkpoints: bool

    def stages(self, size: int) -> list[ToyBlock]:
        return [ToyBlock(self.name(stage)) for stage in range(size * self.chunks)]

    def name(self, stage: int) -> int:
        """The number that decides the weights of ``stage``."""
        return stage + 20 * self.number


@dataclass(frozen=True)
class DrawnStep:
    """One call of the schedule, with ``models[model]``. ``fields``: fields of the config. ``timers``: the level of
    Megatron's timers, 0: none. ``hooks``: those of the config that are set. ``calls``: what forwards and backwards
    call. ``scale``: of ``grad_scale_func``, a power of two. ``per_token``: gradients are not divided by the number of
    microbatches."""

    model: int
    data: ToyData
    forward_only: bool
    fields: dict[str, Any]
    timers: int = 0
    hooks: frozenset[str] = frozenset()
    calls: tuple[str, ...] = ()
    scale: float = 1.0
    per_token: bool = False


@dataclass(frozen=True)
class DrawnJob:
    """``order``: the seed of the order in which the ranks run, one at a time, on a network without process groups. With
    None they run freely over process groups, under the fault guard. ``keeps_communicators``: the engine makes and
    keeps the communicators, so that their settings change between steps."""

    seed: str
    size: int
    replicas: int
    models: tuple[DrawnModel, ...]
    channels: str
    variable: bool
    order: int | None
    keeps_communicators: bool
    rules: DeviceRules
    record_streams: bool
    device_id: bool
    steps: tuple[DrawnStep, ...]

    def check(self) -> StreamReport:
        """Run the job, with more memory if its device has too little. Raises AssertionError for a race, for numbers
        that are not those of one process, and for memory that is still in use at the end."""
        try:
            return self._check()
        except Exception as error:  # over process groups it may be another rank's
            if "OutOfMemoryError" not in f"{type(error)} {error}":
                raise
        return replace(self, rules=replace(self.rules, memory=2 * self.rules.memory)).check()

    def _check(self) -> StreamReport:
        network = StreamNetwork(
            self.size * self.replicas,
            self.channels == ONE_WAY,
            seed=self.order,
            rules=self.rules,
            record_streams=self.record_streams,
        )
        expected = in_one_process(self)
        store = dist.HashStore()
        with virtual_cuda(), virtual_distributed() if self.order is None else nullcontext():
            found = run_ranks(network.size, partial(_rank_main, self, network, store), network.abort, 60.0)
            gc.collect()
            kept = [len(device._blocks) for device in network.devices]
        report = StreamReport.of(network, [])
        for number, wanted in enumerate(expected):
            for replica in range(self.replicas):
                mine = found[replica * self.size : (replica + 1) * self.size]
                result = merged([results[number] for results in mine])
                result.grads = {name: torch.tensor(grad) for name, grad in result.grads.items()}
                difference = result.difference(wanted[replica])
                assert difference == 0.0, f"step {number} of replica {replica} differs by {difference}"
        assert not report.races, str(report)
        assert not any(kept), f"blocks of memory that ranks still use: {kept}"
        return report


def data_of(step: DrawnStep, replica: int) -> ToyData:
    return replace(step.data, first=step.data.first + 50 * replica)


def in_one_process(job: DrawnJob) -> list[list[ToyResult]]:
    """By step and replica, what one process computes. Replicas have the sum of their gradients."""
    models = [model.stages(job.size) for model in job.models]
    found = []
    for step in job.steps:
        stages = models[step.model]
        results = [_alone(stages, data_of(step, replica), step) for replica in range(job.replicas)]
        if not step.forward_only:
            total = {name: sum(r.grads[name] for r in results[1:]) + grad for name, grad in results[0].grads.items()}
            results = [ToyResult(result.losses, total) for result in results]
            with torch.no_grad():
                for number, stage in enumerate(stages):
                    for name, parameter in stage.named_parameters():
                        parameter.add_(total[f"{number}.{name}"], alpha=-RATE)
        found.append(results)
    return found


def _alone(stages: list[ToyBlock], data: ToyData, step: DrawnStep) -> ToyResult:
    result = ToyResult()
    for stage in stages:
        stage.zero_grad()
    with torch.set_grad_enabled(not step.forward_only):
        for x, target in data.iterator():
            for stage in stages:
                x = stage(x)
            loss, report = toy_loss(target, x)
            result.losses.append(float(report["loss"]))
            if not step.forward_only:
                (step.scale * loss / (1 if step.per_token else data.num_microbatches)).backward()
    if not step.forward_only:
        result.grads = {name: grad.clone() for name, grad in gradients_of(dict(enumerate(stages))).items()}
    return result


class _Rank:
    """One rank of one replica, with one model: its chunks, its hooks and its optimizer."""

    def __init__(self, job: DrawnJob, model: DrawnModel, rank: int, config: Any, link: Any, group: Any) -> None:
        self.job = job
        self.model = model
        self.rank = rank % job.size
        self.replica = rank // job.size
        self.config = config
        self.link = link  # its communicator, or what stands for one that the engine keeps
        self.group = group  # of the replicas; None if there is one
        self.placement = Placement(model.placement, job.size, model.chunks)
        self.chunks = toy_chunks(self.placement, self.rank, config, lambda stage: CallingBlock(model.name(stage)))
        if model.split:
            split_weight_grad(self.chunks)
        self.side = torch.cuda.Stream()
        self.rng = random.Random(f"{job.seed} {model.number} {rank}")
        self.reduced: set[int] = set()
        self.gathered: dict[int, Any] = {}
        self.masters: dict[int, torch.Tensor] = {}
        self.inside = 0

    # -- hooks of the config -----------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1

    def grad_sync(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Reduce gradients that are complete beside the pipeline."""
        assert not self.inside
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for parameter in parameters:
                self._reduce(parameter)

    def _reduce(self, parameter: torch.nn.Parameter) -> None:
        assert id(parameter) not in self.reduced
        self.reduced.add(id(parameter))
        assert parameter.grad is not None
        if self.group is None:
            parameter.grad.mul_(1.0)
        else:
            self.group.allreduce([parameter.grad])

    def finalize(self, *chunks_and_tokens: Any, **more: Any) -> None:
        left = [p for chunk in self.chunks for p in chunk.parameters() if id(p) not in self.reduced]
        for parameter in left:
            self._reduce(parameter)
        torch.cuda.current_stream().wait_stream(self.side)

    def param_sync(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Gather parameters beside the pipeline."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side), torch.no_grad():
            for parameter in parameters:
                master = self.masters.pop(id(parameter), None)
                if master is None:  # it is there
                    continue
                if self.group is None:
                    parameter.copy_(master)
                else:
                    whole = torch.empty(parameter.numel())
                    self.group.all_gather_single(whole, master.reshape(-1).chunk(self.job.replicas)[self.replica])
                    parameter.copy_(whole.view_as(parameter))
                master.record_stream(self.side)
                self.gathered[id(parameter)] = self.side.record_event()

    def wait_for(self, chunk: Any) -> None:
        """Called before each forward: the parameters of ``chunk`` are there."""
        parameters = list(chunk.parameters())
        if any(id(parameter) in self.masters for parameter in parameters):
            self.param_sync(parameters)
        for parameter in parameters:
            if (event := self.gathered.get(id(parameter))) is not None:
                torch.cuda.current_stream().wait_event(event)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, number: int) -> ToyResult:
        step = self.job.steps[number]
        self._configure(step)
        self.reduced.clear()
        for chunk in self.chunks:
            chunk.zero_grad()
        reports = toy_step(
            self.chunks,
            data_of(step, self.replica),
            self.link,
            forward_step_func=partial(_forward_step, step, random.Random(f"{self.job.seed} {number} {self.rank}")),
            forward_only=step.forward_only,
            **({"p2p_communicator": None} if self.job.keeps_communicators else {}),
        )
        result = ToyResult([float(report["loss"]) for report in reports])
        if not step.forward_only:
            if "finalize" not in step.hooks:
                self.finalize()
            stages = dict(zip(self.placement.stages[self.rank], self.chunks, strict=True))
            result.grads = {name: grad.tolist() for name, grad in gradients_of(stages).items()}
            self._update(number)
        return result

    def _configure(self, step: DrawnStep) -> None:
        barrier = (lambda: None) if self.job.order is not None else (lambda: dist.barrier())
        for name, value in step.fields.items():
            setattr(self.config, name, value)
        self.config.grad_scale_func = partial(_scaled, step.scale) if step.scale != 1.0 else None
        self.config.calculate_per_token_loss = step.per_token
        self.config.timers = DeviceTimers(step.timers, barrier) if step.timers else None
        self.config.no_sync_func = self.no_sync if "no_sync" in step.hooks else None
        self.config.grad_sync_func = self.grad_sync if "grad_sync" in step.hooks else None
        self.config.param_sync_func = self.param_sync if "param_sync" in step.hooks else None
        self.config.finalize_model_grads_func = self.finalize if "finalize" in step.hooks else None
        static = StaticGradients() if self.model.graphs == TE_GRAPHS else None
        for chunk in self.chunks:
            chunk.inner.checkpoints = self.model.checkpoints
            chunk.inner.static = static
            chunk.inner.before = partial(self.wait_for, chunk)
            chunk.inner.call = lambda: self.rng.choice(("", "", *step.calls))

    def _update(self, number: int) -> None:
        later = [step for step in self.job.steps[number + 1 :] if step.model == self.model.number]
        gathers = any("param_sync" in step.hooks for step in later[:1])
        self.gathered.clear()
        with torch.no_grad():
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad, alpha=-RATE)
                    if gathers:
                        self.masters[id(parameter)] = parameter.detach().clone()
                        parameter.fill_(float("nan"))


def _forward_step(step: DrawnStep, rng: random.Random, iterator: Any, model: Any, *flags: Any) -> Any:
    x, target = next(iterator)

    def loss_of(output: torch.Tensor) -> Any:
        loss, report = toy_loss(target, output)
        if "host copy" in step.calls and rng.random() < 0.3:
            loss.item()
        return (loss, torch.ones((), dtype=torch.int), report) if step.per_token else (loss, report)

    return model(x), loss_of


def _scaled(scale: float, loss: torch.Tensor) -> torch.Tensor:
    return scale * loss


def _rank_main(job: DrawnJob, network: StreamNetwork, store: Any, rank: int) -> list[ToyResult]:
    with network.running(rank):
        if job.order is not None:
            config = _config(job, job.models[0])
            link = P2PCommunicator(ThreadGroup(rank, job.size), config, network.transport(rank))
            return _steps(job, [_Rank(job, job.models[0], rank, config, link, None)])
        place = network.devices[rank].place if job.device_id else None
        with process_group(network, rank, store, place):
            return _in_groups(job, rank)


def _in_groups(job: DrawnJob, rank: int) -> list[ToyResult]:
    everyone = range(job.size * job.replicas)
    made = [dist.new_group(list(everyone[at :: job.size])) for at in range(job.size)]
    replicas = made[rank % job.size] if job.replicas > 1 else None
    ranks, pipelines = [], []
    for model in job.models:
        if not pipelines or not job.keeps_communicators:
            made = [dist.new_group(list(everyone[at : at + job.size])) for at in everyone[:: job.size]]
            pipelines.append(made[rank // job.size])
        config = _config(job, model)
        link: Any = SimpleNamespace(size=job.size, pp_group=pipelines[-1])
        if not job.keeps_communicators:
            link = P2PCommunicator(pipelines[-1], config)
        ranks.append(_Rank(job, model, rank, config, link, replicas))
    try:
        return _steps(job, ranks)
    finally:
        links = [one.link for one in ranks]
        if job.keeps_communicators:
            links = [one for group in pipelines for one in KEPT.pop(group).values()]
        for communicator in links:
            close_guard(communicator)
            communicator.transport.close()


def _config(job: DrawnJob, model: DrawnModel) -> Any:
    chunks = model.chunks if model.chunks > 1 else None
    first = next((step.fields for step in job.steps if step.model == model.number), {})
    fixed = {"p2p_channels": job.channels, "variable_seq_lengths": job.variable}
    return toy_config(virtual_pipeline_model_parallel_size=chunks, **{**fixed, **first})


def _steps(job: DrawnJob, ranks: list[_Rank]) -> list[ToyResult]:
    return [ranks[step.model].step(number) for number, step in enumerate(job.steps)]


# -- draws -------------------------------------------------------------------------------------------------------------


def drawn_job(seed: str, folder: str = "") -> DrawnJob:
    """A job by ``seed``. ``folder``: for traces and measured times; without one neither is written."""
    rng = random.Random(seed)
    size, on_groups, may_wait = rng.randint(1, 4), rng.random() < 0.5, rng.random() < 0.75
    models = [_model(rng, number, size) for number in range(rng.choice((1, 1, 2)) if on_groups else 1)]
    job = DrawnJob(
        seed,
        size,
        replicas=rng.choice((1, 2)) if on_groups and size < 4 else 1,
        models=tuple(models),
        channels=rng.choice(CHANNELS),
        variable=rng.random() < 0.25,
        order=None if on_groups else rng.randrange(6),
        keeps_communicators=on_groups and rng.random() < 0.5,
        rules=_rules(rng, on_groups, may_wait),
        record_streams=rng.random() < 0.3,
        device_id=rng.random() < 0.5,
        steps=(),
    )
    steps = tuple(_step(rng, job, number, may_wait, folder) for number in range(3 + len(models)))
    return replace(job, steps=steps)


def _model(rng: random.Random, number: int, size: int) -> DrawnModel:
    placement = rng.choice((LOOP, LOOP, "v")) if size > 1 else LOOP
    graphs = rng.choice((None, None, LOCAL_GRAPHS, TE_GRAPHS)) if placement == LOOP else None
    chunks = 2 if placement != LOOP else rng.randint(1, 3)
    plain = graphs is None
    return DrawnModel(number, placement, chunks, plain and rng.random() < 0.6, graphs, plain and rng.random() < 0.2)


def _rules(rng: random.Random, on_groups: bool, may_wait: bool) -> DeviceRules:
    rules = DeviceRules(
        first_launches=rng.random() < 0.8,
        eager_bytes=rng.choice((0, 0, 1 << 20)),
        memory=rng.choice((0, 0, 80_000)),
        hardware_queues=rng.choice((0, 0, 0, 1, 2, 8)),
        multiprocessors=rng.choice((0, 0, 0, 132)),
        one_device=rng.random() < 0.2,
        queries_block=rng.random() < 0.2,
    )
    return rules if may_wait else replace(LATER_STEPS, eager_bytes=rules.eager_bytes)


def _step(rng: random.Random, job: DrawnJob, number: int, may_wait: bool, folder: str) -> DrawnStep:
    model = job.models[number % len(job.models)]
    known = [name for name in TOY_SCHEDULES if _fits(name, model)]
    schedule = rng.choice(known)
    policy = rng.choice(({"overlap_p2p_comm": True}, {"overlap_p2p_comm": True}, {"batch_p2p_comm": True}, {}))
    variable = rng.random() < 0.25 if job.keeps_communicators else job.variable
    count = rng.randint(1, 9)
    if model.graphs is not None:  # replayed in the order of their capture
        schedule = "interleaved_1f1b" if model.chunks > 1 else "1f1b"
        count = job.size * (1 + len(job.seed) % 3)
    fields = _fields(rng, job, model, schedule, policy, variable)
    fields["device_sync"] = rng.choice((None, None, True)) if may_wait else False
    if folder:
        fields |= {"trace_dir": folder if rng.random() < 0.4 else None, "trace_steps": f"{number + 1}"}
    return DrawnStep(
        model.number,
        ToyData(count, rng.choice((3, 5)), variable=variable, first=100 * number),
        rng.random() < 0.25 and bool(number),
        fields,
        timers=rng.choice((0, 0, 1, 2)) if may_wait else 0,
        hooks=frozenset(name for name in ("no_sync", "grad_sync", "param_sync", "finalize") if rng.random() < 0.5),
        calls=tuple(name for name in CALLS if rng.random() < 0.4 and (may_wait or name not in WAITING_CALLS)),
        scale=rng.choice((1.0, 4.0)),
        per_token=rng.random() < 0.25,
    )


def _fits(name: str, model: DrawnModel) -> bool:
    family = TOY_SCHEDULES[name]
    return family.placement == model.placement and family.chunks in (None, model.chunks) and not family.sliced


def _fields(
    rng: random.Random, job: DrawnJob, model: DrawnModel, schedule: str, policy: dict[str, Any], variable: bool
) -> dict[str, Any]:
    searched = TOY_SCHEDULES[schedule].search is not None
    free = model.graphs is None and not searched
    pairs = rng.choice((None, None, in_turn, on_two_streams)) if free and schedule != "pipe_offload" else None
    offloads = free and pairs is None and rng.random() < 0.2
    return {
        "overlap_p2p_comm": False,
        "batch_p2p_comm": None,
        **policy,
        "pipeline_schedule": schedule,
        "pipeline_measured": MEASURED if searched else None,
        "cuda_graph_impl": model.graphs,
        "variable_seq_lengths": variable,
        "p2p_channels": rng.choice(CHANNELS) if job.keeps_communicators else job.channels,
        "p2p_max_ctas": rng.choice((None, 4)) if job.keeps_communicators else None,
        "batch_p2p_sync": rng.random() < 0.3 and "batch_p2p_comm" in policy,
        "max_pending_sends": rng.choice((None, 0, 1, 2, 5)),
        "deallocate_pipeline_outputs": rng.random() < 0.7,
        "microbatch_group_size_per_vp_stage": job.size + rng.randint(0, job.size)
        if free and rng.random() < 0.4
        else None,
        "overlapped_forward_backward": pairs,
        "offload_chunks": rng.randint(0, model.chunks) if offloads else None,
        "offload_slots": rng.choice((None, 1, 2)),
        "num_microbatches_with_partial_activation_checkpoints": rng.choice((None, None, None, 1)),
        "p2p_debug": rng.random() < 0.25,
        "metrics": rng.choice((0, 0, _ignored)),
        "barrier_with_L1_time": rng.random() < 0.5,
    }


def _ignored(step: int, numbers: Any) -> None:
    """Takes metrics."""
