"""Runs pipelines of several modules under Megatron-core: a step along the bridges of its communicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pp.features.modules.modules_step import ModulesPipeline, OnModules, prepared_on_modules
from megatron_pp.integrations.megatron.given import InstallSettings
from megatron_pp.integrations.megatron.releases.release import Megatron
from megatron_pp.integrations.megatron.steps.call import MegatronHost
from megatron_pp.integrations.megatron.steps.forward_backward import MegatronSteps, freed_output
from megatron_pp.integrations.megatron.steps.modules import pipeline_of
from megatron_pp.plan.ir.instruction import FORWARD
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.host import Host
from megatron_pp.runtime.run_step import run_step
from megatron_pp.runtime.step import Step


def run(megatron: Megatron, installed: InstallSettings, arguments: Mapping[str, Any]) -> list[Any]:
    """One call of Megatron's schedule with several modules: `arguments` are its keywords."""
    host = ModulesMegatronHost(megatron, installed, arguments)
    return run_step(prepared_on_modules(host), host)


class ModulesMegatronHost(OnModules, MegatronHost):
    """The host of one call with several modules."""

    def __init__(self, megatron: Megatron, installed: InstallSettings, arguments: Mapping[str, Any]) -> None:
        self.pipeline = pipeline_of(arguments["p2p_communicator"])
        Host.__init__(self, StepInputs(len(self.pipeline.gives_loss) > 1, **arguments), alone=False)
        self.megatron = megatron
        self.installed = installed
        self.config = self.inputs.config
        self.embedding: Any = None

    def steps(self, step: Step, plan: Plan) -> ModuleMegatronSteps:
        return ModuleMegatronSteps(self.megatron, step, self.overridden_config, self.pipeline)

    def is_in_v(self, step: Step) -> bool:
        return False

    def holds_last_stage(self, step: Step) -> bool:
        return any(self.pipeline.gives_loss)


class ModuleMegatronSteps(MegatronSteps):
    """Runs microbatches with Megatron's backward of several modules. Tensors from the same module come in lists."""

    def __init__(self, megatron: Megatron, step: Step, overridden: Any, pipeline: ModulesPipeline) -> None:
        super().__init__(megatron, step, overridden)
        graph = pipeline.graph
        assert graph is not None
        received = graph.edges[FORWARD][step.communicator.rank][0].received
        self.in_lists = {edge.module for edge in received if not edge.bridge}
        self.language_model = step.inputs.pg_collection.language_model_module_name

    def forward(self, chunk: int, mb: int, input_tensor: Any) -> Any:
        given = {name: [tensor] if name in self.in_lists else tensor for name, tensor in input_tensor.items()}
        return super().forward(chunk, mb, given)

    def backward(self, chunk: int, mb: int, input_tensor: Any, output: Any, output_grad: Any) -> Any:
        if isinstance(output, dict) and self.deallocates:
            output = self.backward_root(output)
        return self.schedules.backward_step_multimodule(
            input_tensor, output, output_grad, self.overridden, language_model_module_name=self.language_model
        )

    def backward_root(self, output: Any) -> Any:
        if isinstance(output, dict):
            return {name: freed_output(tensor) for name, tensor in output.items()}
        return freed_output(output)
