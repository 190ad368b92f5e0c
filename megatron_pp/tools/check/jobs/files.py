"""Jobs in files: Megatron's YAML, Megatron-Bridge's, verl's and ms-swift's, and torchtitan's TOML."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_pp.plan.costs.files import read_text
from megatron_pp.tools.check.findings import RISK, Finding
from megatron_pp.tools.check.jobs import special
from megatron_pp.tools.check.jobs.errors import UnreadableError
from megatron_pp.tools.check.jobs.flag_table import job_of
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.references import resolved
from megatron_pp.tools.flags.programs import read_keys, setting_of

ENDINGS = (".yaml", ".yml", ".toml")
_PROGRAMS = {
    "verl": ("actor_rollout_ref",),
    "megatron-yaml": ("language_model", "model_parallel"),
    "torchtitan": ("parallelism",),
    "megatron-bridge": ("model",),
}
"""Program -> sections at the top of its files, one of which tells it from others; in the order of the question."""
_MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size")


def read_file(path: str, changes: Sequence[str], gpus: int) -> Job:
    """The job of a file, with ``changes`` such as ``model.pipeline_model_parallel_size=4`` on top of it. Raises
    UnreadableError, and FileFormatError for a file that is missing or no text."""
    if Path(path).is_dir():
        raise UnreadableError(f"{path} is a folder; check takes a script with its flags, or a file of settings")
    nested, found = loaded_with_repeats(path)
    values = flat(nested) | changes_of(changes, path)
    program = program_of(path, values)
    job = job_of_values(program, values, gpus, path)
    return replace(job, found=(*found, *job.found))


def job_of_values(program: str, values: Mapping[str, Any], gpus: int, source: str) -> Job:
    if program == "megatron-yaml":
        values = {f"{key.rpartition('.')[0]}.{name_of(key)}".lstrip("."): value for key, value in values.items()}
    values, references = resolved(values)
    values, found = special.prepared(program, values, gpus, Path(source).parent)
    references = [key for key in references if setting_of(program, key) != ""]
    if references:
        text = f"values that refer to others in a way that check does not follow are not read: {', '.join(references)}"
        found = [*found, Finding("references-not-followed", RISK, text, "", tuple(references))]
    read = read_keys(program, values)
    unknown = f"{len(read.unknown)} keys are not understood and not read: {', '.join(read.unknown)}"
    if read.unknown:
        found = [*found, Finding("unknown-keys", RISK, unknown, "", tuple(read.unknown))]
    name = "megatron" if program == "megatron-yaml" else program
    return job_of(name, read, gpus, source, found, defaults=special.DEFAULTS.get(program))


def loaded(path: str) -> Mapping[str, Any]:
    return loaded_with_repeats(path)[0]


def loaded_with_repeats(path: str) -> tuple[Mapping[str, Any], list[Finding]]:
    """The file's values, and what is given twice in it with unlike values."""
    text = read_text(path)
    values, twice = (_toml(path, text), []) if path.endswith(".toml") else _yaml(path, text)
    if values is None or values == {}:
        raise UnreadableError(f"{path} is empty; a file of settings has lines such as pipeline_model_parallel_size: 4")
    if not isinstance(values, Mapping):
        raise UnreadableError(f"{path} holds a {type(values).__name__}, not settings with names")
    text = f"{path} has unlike values for one key; the last one counts: {', '.join(twice)}"
    return values, [Finding("key-given-twice", RISK, text, "one of them")] if twice else []


def _yaml(path: str, text: str) -> tuple[Any, list[str]]:
    yaml: Any = importlib.import_module("yaml")
    try:
        loader = _loader(yaml)(text)
        return loader.get_single_data(), loader.twice
    except RecursionError:
        raise UnreadableError(f"{path}: this is no file of settings (it is nested too deeply)") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UnreadableError(f"{path}{where}: this is no YAML ({why})") from None


def _loader(yaml: Any) -> Any:
    """PyYAML's safe one. An object with a tag is its values; keys that are given twice are in its ``twice``."""

    class Loader(yaml.SafeLoader):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.twice: list[str] = []

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            before: dict[str, Any] = {}
            for key, value in node.value:
                given = before.setdefault(key.value, value) if isinstance(key.value, str) else value
                if given is not value and yaml.serialize(given) != yaml.serialize(value):
                    self.twice.append(f"{key.value} (line {key.start_mark.line + 1})")
            return super().construct_mapping(node, deep=deep)

    def untagged(loader: Any, _: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)

    Loader.add_multi_constructor("", untagged)
    return Loader


def _toml(path: str, text: str) -> Any:
    try:
        toml: Any = importlib.import_module("tomllib")
    except ModuleNotFoundError:
        toml = importlib.import_module("tomli")
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise UnreadableError(f"{path}: this is no TOML ({error})") from None


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Path with dots -> value. What names an object, such as ``_target_: torch.bfloat16``, is its last name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping) and "_target_" in value and {*value} <= {"_target_", "_call_"}:
            found[key] = str(value["_target_"]).rpartition(".")[2]
        elif isinstance(value, Mapping) and value:
            found |= flat(value, f"{key}.")
        elif not isinstance(value, Mapping):
            found[key] = value
    return found


def changes_of(words: Sequence[str], path: str) -> dict[str, Any]:
    """Hydra's ``name.of.key=value``; ``+`` and ``++`` before it add a key, ``~`` removes one."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if word.startswith("~"):
            found[key.lstrip("~")] = None
        elif not equals or word.startswith("-"):
            raise UnreadableError(f"{word!r} behind {path} is no change of it; one looks like name.of.key=value")
        else:
            found[key] = value_of(value)
    return found


def value_of(text: str) -> Any:
    """A value as Hydra reads it."""
    if text.lower() in ("null", "none", ""):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text.strip("'\"")


def program_of(path: str, values: Mapping[str, Any]) -> str:
    """Whose file it is, by what it has. Raises UnreadableError."""
    tops = {key.partition(".")[0] for key in values}
    parts = {key.partition(".")[0] for key in values if "." in key}
    for program, sections in _PROGRAMS.items():
        if parts & {*sections} and path.endswith(".toml") == (program == "torchtitan"):
            return program
    if {name_of(key) for key in values} & {*_MEGATRON} and not path.endswith(".toml"):
        swift = tops & {"model", "dataset", "rlhf_type", "tuner_type", "train_type", "max_length", "mcore_model"}
        return "ms-swift" if swift else "megatron-yaml"
    known = "Megatron's, Megatron-Bridge's, verl's or ms-swift's YAML, or torchtitan's TOML"
    raise UnreadableError(f"{path} has {_few(tops)} at its top: it is not {known}")


def name_of(key: str) -> str:
    """The setting that a key of Megatron's own files is named as: its last part, written as a flag or not."""
    return key.rpartition(".")[2].lstrip("-").replace("-", "_")


def _few(names: set[str]) -> str:
    some = sorted(names)[:6]
    return ", ".join(some) + (", ..." if len(names) > len(some) else "")
