"""A training job as its flags or its files describe it, whatever program reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_pp.tools.check.findings import Finding

TORCHTITAN = "torchtitan"
"""The one program whose jobs run without Megatron."""


@dataclass(frozen=True)
class Job:
    """What is asked of a job. Every setting has the name of Megatron's argument for it, such as
    ``pipeline_model_parallel_size``, however the job's own program spells it.

    framework   the program: "megatron", "megatron-bridge", "verl", "slime", "ms-swift" or "torchtitan"
    gpus        processes of the whole job, one per GPU
    given       what the user wrote, and nothing else, with the types of Megatron's arguments
    args        all settings as a step sees them: behind Megatron's own checks and defaults where ``validated``, else
                what was given on the defaults that are known
    spelling    setting -> how the user writes it: ``--pipeline-model-parallel-size``,
                ``actor.megatron.pipeline_model_parallel_size``
    unknown     what the job has and this command does not understand, as the user wrote it
    found       what reading found: refusals of Megatron's parser and checks, files that are named and missing
    release     of Megatron-core, such as "0.19.2"; "" where none is installed and none was named
    source      what was read, for messages: a script's name, a file's path
    on_engine   whether this engine runs its steps: it is started by `megatron-pp run`, or the script calls `install()`
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
        """A setting; ``default`` where it is missing or None."""
        value = self.args.get(name)
        return default if value is None else value

    def spell(self, name: str) -> str:
        """How the user writes a setting; as a flag of Megatron where nothing else is known."""
        return self.spelling.get(name, "--" + name.replace("_", "-"))
