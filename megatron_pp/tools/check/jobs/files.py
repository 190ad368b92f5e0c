"""Reads jobs from files: YAML of Megatron, Megatron-Bridge, verl and ms-swift, and TOML of torchtitan."""

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
"""Program -> top-level sections of its files. A file that has one of them is the program's. Tried in this order."""
_NAMES = {"megatron-yaml": "megatron", "verl-sft": "verl"}
"""Program with a table of its own -> the name in the answer."""
_MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size")


def read_file(path: str, changes: Sequence[str], gpus: int) -> Job:
    """The job of a file after ``changes`` such as ``model.pipeline_model_parallel_size=4``.

    Raises UnreadableError, and FileFormatError for a file that does not exist or is not text.
    """
    if Path(path).is_dir():
        raise UnreadableError(f"{path} is a folder; check reads a script with its flags, or a file of settings")
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
        text = f"not read, because check does not know this kind of reference to other values: {', '.join(references)}"
        found = [*found, Finding("references-not-followed", RISK, text, "", tuple(references))]
    read = read_keys(program, values)
    keys = (
        "1 key is not known and was" if len(read.unknown) == 1 else f"{len(read.unknown)} keys are not known and were"
    )
    unknown = f"{keys} not read: {', '.join(read.unknown)}"
    if read.unknown:
        found = [*found, Finding("unknown-keys", RISK, unknown, "", tuple(read.unknown))]
    name = _NAMES.get(program, program)
    return job_of(name, read, gpus, source, found, defaults=special.DEFAULTS.get(program))


def loaded(path: str) -> Mapping[str, Any]:
    return loaded_with_repeats(path)[0]


def loaded_with_repeats(path: str) -> tuple[Mapping[str, Any], list[Finding]]:
    """The file's values, and a finding if a key is in it twice with different values."""
    text = read_text(path)
    values, twice = (_toml(path, text), []) if path.endswith(".toml") else _yaml(path, text)
    if values is None or values == {}:
        raise UnreadableError(f"{path} is empty; a file of settings has lines such as pipeline_model_parallel_size: 4")
    if not isinstance(values, Mapping):
        raise UnreadableError(f"{path} contains a {type(values).__name__}, not settings with names")
    text = f"{path} has two different values for a key; the last one counts: {', '.join(twice)}"
    return values, [Finding("key-given-twice", RISK, text, "one of them")] if twice else []


def _yaml(path: str, text: str) -> tuple[Any, list[str]]:
    yaml: Any = importlib.import_module("yaml")
    try:
        loader = _loader(yaml)(text)
        return loader.get_single_data(), loader.twice
    except RecursionError:
        raise UnreadableError(f"{path}: this is not a file of settings (it is nested too deeply)") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UnreadableError(f"{path}{where}: this is not YAML ({why})") from None


def _loader(yaml: Any) -> Any:
    """A subclass of PyYAML's safe loader. It reads an object with a tag as its plain values, and lists keys that a file
    has twice in ``twice``."""

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
        raise UnreadableError(f"{path}: this is not TOML ({error})") from None


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Path with dots -> value. The value of a reference to an object, such as ``_target_: torch.bfloat16``, is the last
    part of its name."""
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
    """The values of Hydra's changes ``name.of.key=value``. ``+`` and ``++`` in front add a key, ``~`` removes a key."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if word.startswith("~"):
            found[key.lstrip("~")] = None
        elif not equals or word.startswith("-"):
            raise UnreadableError(f"{word!r} after {path} is not a change of it; write changes as name.of.key=value")
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
    """The program whose file it is, judged by its keys. Raises UnreadableError if no program has such keys."""
    tops = {key.partition(".")[0] for key in values}
    parts = {key.partition(".")[0] for key in values if "." in key}
    for program, sections in _PROGRAMS.items():
        if parts & {*sections} and path.endswith(".toml") == (program == "torchtitan"):
            return program
    if {name_of(key) for key in values} & {*_MEGATRON} and not path.endswith(".toml"):
        swift = tops & {"model", "dataset", "rlhf_type", "tuner_type", "train_type", "max_length", "mcore_model"}
        return "ms-swift" if swift else "megatron-yaml"
    known = "YAML of Megatron, Megatron-Bridge, verl or ms-swift, and TOML of torchtitan"
    raise UnreadableError(f"{path} has {_few(tops)} as top-level keys, which no known program has. Possible: {known}")


def name_of(key: str) -> str:
    """The setting of a key in Megatron's own files: the key's last part, which may be written as a flag."""
    return key.rpartition(".")[2].lstrip("-").replace("-", "_")


def _few(names: set[str]) -> str:
    some = sorted(names)[:6]
    return ", ".join(some) + (", ..." if len(names) > len(some) else "")
