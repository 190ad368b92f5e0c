"""A training job as its flags or files describe it, the same for all programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_pp.tools.check.findings import Finding

TORCHTITAN = "torchtitan"
"""The only known program whose jobs run without Megatron."""


@dataclass(frozen=True)
class Job:
    """The settings of a job. A setting has the name of Megatron's argument, such as ``pipeline_model_parallel_size``,
    also if the job's own program spells it differently.

    framework   the program: "megatron", "megatron-bridge", "verl", "slime", "ms-swift" or "torchtitan"
    gpus        number of processes of the whole job, one per GPU
    given       the settings that the user wrote, with the types of Megatron's arguments
    args        all settings as a step sees them. If ``validated``, they are the result of Megatron's own checks;
                otherwise the given settings and the known defaults
    spelling    setting -> how the user writes it: ``--pipeline-model-parallel-size``,
                ``actor.megatron.pipeline_model_parallel_size``
    unknown     settings of the job that this command does not know, as the user wrote them
    found       findings of reading, such as refusals by Megatron's parser and checks
    release     release of Megatron-core, such as "0.19.2"; "" if it is not installed
    validated   Megatron's own checks have run
    source      name for messages: the script's name or the file's path
    on_engine   this engine runs the steps: the script is started by `megatron-pp run` or calls `install()`
    """

    framework: str
    gpus: int
    given: Mapping[str, Any]
    args: Mapping[str, Any]
    spelling: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    found: tuple[Finding, ...] = ()
    release: str = ""
    validated: bool = False
    source: str = ""
    on_engine: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a setting; ``default`` if it is missing or None."""
        value = self.args.get(name)
        return default if value is None else value

    def spell(self, name: str) -> str:
        """The name that the user writes for a setting. If the job does not know it, the setting as a Megatron flag."""
        return self.spelling.get(name, "--" + name.replace("_", "-"))
