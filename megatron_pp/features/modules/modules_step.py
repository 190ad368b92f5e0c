"""A training step of a pipeline of several modules.

    pipeline = ModulesPipeline([Module("vision", ...), Module("llm", ...)], {"vision": ["llm"]})
    losses = forward_backward_modules(pipeline, forward_step_func=..., data_iterator=..., model=..., num_microbatches=8)

The model of a rank holds the rank's stages of all its modules. With several chunks (``Module.chunk``) there is a list
of models, and a list of data iterators. A model's ``set_input_tensor`` gets a list with a dict: module's name ->
tensor. The tensor is that of the module's stage before, or on the first stage of another module the module's output.
``forward_step_func`` returns a dict with the outputs of the rank's stages by module, or on the last stage the argument
of its loss function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_pp.config.settings import TE_GRAPHS, StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.modules.graph import Module, ModuleGraph, module_graphs
from megatron_pp.features.modules.modules_plan import ModulesSpec, modules_plan, modules_spec
from megatron_pp.features.modules.modules_runner import BatchParts, ModulesRunner, Parts
from megatron_pp.plan.ir.spec import EXPLICIT, HOOKS, ONE_WAY, Plan
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.compute import Shapes
from megatron_pp.runtime.engine.executor import Feature
from megatron_pp.runtime.engine.model_steps import ModelSteps
from megatron_pp.runtime.host import Host
from megatron_pp.runtime.make_step import communicator_of, observers_of, planned
from megatron_pp.runtime.message_shapes import Messages
from megatron_pp.runtime.own_host import OwnHost, made_steps
from megatron_pp.runtime.plan_choice import certify_once, fields_of_device
from megatron_pp.runtime.run_step import run_step
from megatron_pp.runtime.step import PlanRequest, Step, StepRequest

_ONE_F_ONE_B = "1f1b"


class ModulesPipeline:
    """The modules of a job, and of this rank its graph and a process group of the graph's ranks.

    modules    modules with the ranks of each stage (``graph.py``)
    topology   module -> the modules to which its output goes
    batch_dim  the dimension along which outputs are cut between unequal grids: one number, or one for each module
    parts      cuts and joins outputs in another way than along ``batch_dim``
    rank       this rank in the job, if steps get a ``P2PCommunicator`` of the graph's ranks (as ranks that are threads
               do); by default this process's rank, with a process group of its own

    All ranks of the job make it together, also ranks outside of the modules, as with process groups. Raises PlanError
    on all ranks.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        topology: Mapping[str, Sequence[str]],
        batch_dim: int | Mapping[str, int] = 1,
        parts: Parts | None = None,
        rank: int | None = None,
    ) -> None:
        dimensions = batch_dim if isinstance(batch_dim, Mapping) else {module.name: batch_dim for module in modules}
        self.parts = parts or BatchParts(dimensions)
        self.graph: ModuleGraph | None = None
        self.group: dist.ProcessGroup | None = None
        self.rank = dist.get_rank() if rank is None else rank
        for graph in module_graphs(modules, topology):
            group = dist.new_group(list(graph.members)) if rank is None else None
            if self.rank in graph.members:
                self.graph = graph
                self.group = group
        ends = [module for module in modules if not topology.get(module.name)]
        giving = {module.name for module in ends for replica in module.ranks if self.rank in replica[-1]}
        own = [] if self.graph is None else self.graph.chunks[self.graph.members.index(self.rank)]
        self.gives_loss = [not giving.isdisjoint(chunk.modules) for chunk in own]


class OnModules(Host):
    """The host of a step on ``pipeline``: the differences to a step on a line of stages."""

    pipeline: ModulesPipeline

    def plan(self, asked: PlanRequest) -> Plan:
        assert isinstance(asked.spec, ModulesSpec)
        plan = modules_plan(asked.spec)
        certify_once(plan)
        return plan

    def check(self, asked: PlanRequest) -> None:
        """Check nothing: the checks are for models of one module."""

    def has_features(self, plan: Plan) -> bool:
        return True

    def check_chunks(self, step: Step, plan: Plan) -> None:
        """Compares nothing, because the first and the last stage of a module are not those of the pipeline."""

    def described(self, step: Step, plan: Plan) -> dict[str, str]:
        """Nothing: each module numbers its own layers, so ranks do not compare them."""
        return {}

    def features(self, step: Step, plan: Plan, steps: Any) -> list[Feature]:
        graphs = self.graph_in_evaluation or not plan.spec.forward_only
        return [ModulesRunner(plan, step.communicator.rank, self.pipeline.parts, graphs)]

    def is_last_stage(self, asked: PlanRequest, plan: Plan) -> list[bool]:
        return self.pipeline.gives_loss


def prepared_on_modules(host: OnModules) -> Step:
    """The step of a call. Raises ScheduleInputError before any communication."""
    pipeline = host.pipeline
    inputs = host.inputs
    settings = host.read_settings()
    host.check_settings(settings)
    check_settings(settings)
    number = host.step_number(settings)
    weights = host.weight_store(settings)
    graph = pipeline.graph
    shapes = Shapes(None, None)
    if graph is None:
        raise ScheduleInputError(f"rank {pipeline.rank} is in no module of the pipeline; let it run no step")
    draft = modules_spec(
        graph,
        inputs.num_microbatches,
        forward_only=inputs.forward_only,
        variable_shapes=True,
        grad_sync=HOOKS if settings.grad_sync_func is None else EXPLICIT,
    )
    request = StepRequest(
        inputs, settings, False, number, 1, weights, False, draft, Messages(shapes, None, None), (shapes,), (), ()
    )
    observers = observers_of(request)
    # From here on there may be communication.
    communicator = communicator_of(request, pipeline.group)
    spec = replace(draft, **fields_of_device(settings, communicator.transport))
    return planned(host, PlanRequest(**vars(request), observers=observers, communicator=communicator, spec=spec))


def unserved_setting(settings: StepSettings) -> str | None:
    """A feature that ``settings`` ask for and that a pipeline of several modules does not have; None if there is
    none."""
    for is_asked, what in (
        (settings.pipeline_schedule not in (None, _ONE_F_ONE_B), f"pipeline_schedule {settings.pipeline_schedule!r}"),
        (settings.p2p_channels != ONE_WAY, f"p2p_channels {settings.p2p_channels!r}"),
        (settings.sequence_slices > 1, "sequence_slices"),
        (bool(settings.skip_tensors), "skip_tensors"),
        (bool(settings.offload_chunks), "offload_chunks"),
        (bool(settings.fsdp_collectives), "fsdp_collectives"),
        (settings.overlapped_forward_backward is not None, "overlapped_forward_backward"),
        (settings.microbatch_costs is not None, "microbatch_costs"),
        (bool(settings.measure), "measure"),
        (bool(settings.trace_dir), "trace_dir"),
        (settings.cuda_graph_impl == TE_GRAPHS, f"cuda_graph_impl {settings.cuda_graph_impl!r}"),
    ):
        if is_asked:
            return what
    return None


def check_settings(settings: StepSettings) -> None:
    """Raises ScheduleInputError for settings that do not go with several modules."""
    if (what := unserved_setting(settings)) is not None:
        raise ScheduleInputError(f"a pipeline of several modules has no {what}; leave it out")
    if not settings.variable_seq_lengths:
        raise ScheduleInputError(
            "a pipeline of several modules needs config.variable_seq_lengths=True: tensors of different modules have "
            "different shapes"
        )
    if settings.pipeline_dtype is None:
        raise ScheduleInputError("config.pipeline_dtype is None; set it to the dtype of the tensors between stages")


class ModuleSteps(ModelSteps):
    """The steps of a model that takes and gives dicts of tensors."""

    def backward(self, chunk: int, mb: int, input_tensor: Any, output: Any, output_grad: Any) -> Any:
        grads: list[Any] | None = None
        if isinstance(output, Mapping):
            output = [output[name] for name in output_grad]
            grads = list(output_grad.values())
        self.run_backward(None, output, grads, self.grad_scale_func)
        return {name: tensor.grad for name, tensor in input_tensor.items()}

    @staticmethod
    def backward_root(output: Any) -> Any:
        if isinstance(output, Mapping):
            return {name: ModelSteps.backward_root(tensor) for name, tensor in output.items()}
        return ModelSteps.backward_root(output)


class ModulesHost(OnModules, OwnHost):
    """The host of one call of ``forward_backward_modules``."""

    def __init__(self, pipeline: ModulesPipeline, arguments: Mapping[str, Any]) -> None:
        super().__init__(StepInputs(len(pipeline.gives_loss) > 1, **arguments), alone=False)
        self.pipeline = pipeline

    def steps(self, step: Step, plan: Plan) -> Any:
        return made_steps(ModuleSteps, step)


def forward_backward_modules(pipeline: ModulesPipeline, **arguments: Any) -> list[Any]:
    """One step on ``pipeline``, called by all its ranks with the arguments of the schedule functions
    (``megatron_pp.schedules.StepArguments``). Returns what the loss function reported on the ranks of a last stage, an
    empty list elsewhere.

    The config needs ``variable_seq_lengths=True`` and ``pipeline_dtype``, one for all modules. Raises
    ScheduleInputError for impossible arguments before any communication, PlanError where modules wait for each other.
    """
    host = ModulesHost(pipeline, arguments)
    return run_step(prepared_on_modules(host), host)
