"""Reads a job from a script with its flags, a file of settings, a shell script or a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_pp.tools.check.findings import NOTE, RISK, Finding
from megatron_pp.tools.check.jobs import files, megatron_flags, recipes, shell
from megatron_pp.tools.check.jobs.errors import UnreadableError
from megatron_pp.tools.check.jobs.flag_table import read_flags
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.flags.table import options
from megatron_pp.tools.flags.words import values_of_words

_SHELL = (".sh", ".bash", ".slurm", ".sbatch")
_YAML = "--yaml-cfg"
_VARIABLES = ("CUDA_", "NCCL_", "NVTE_", "TORCH_", "CUBLAS_")
"""Beginnings of the environment variables that Megatron's checks read."""
_RECIPE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_RUN = re.compile(r"\bmegatron[-_]pp\s+run\b")
_INSTALL = re.compile(r"\binstall(ed)?\(")
_PYTHON_OF_MEGATRON = "pretrain_gpt.py"


@dataclass(frozen=True)
class Given:
    """The description of a job on the command line.

    words        the script or file, and the words after it
    module       the first word is the name of a module
    generation   the GPU's major compute capability
    patience     seconds that Megatron's parser may take
    environment  variables that the job's file sets
    """

    words: Sequence[str]
    gpus: int
    module: bool = False
    generation: int = megatron_flags.HOPPER
    patience: float = megatron_flags.PATIENCE
    environment: Mapping[str, str] = field(default_factory=dict)


def read_job(given: Given) -> Job:
    """The job. Raises UnreadableError or another MegatronPPError if it cannot be read."""
    return replace(_read(given), on_engine=_names_engine(given.words[0]))


def _names_engine(path: str) -> bool:
    """Whether the shell script starts `megatron-pp run`, or the Python script calls `install()` of this engine."""
    lines = (line.partition("#")[0] for line in megatron_flags.own_text(path).splitlines())
    text = "\n".join(lines)
    return bool(_RUN.search(text)) if path.endswith(_SHELL) else "megatron_pp" in text and bool(_INSTALL.search(text))


def _read(given: Given) -> Job:
    first = given.words[0]
    rest = given.words[1:]
    if given.module:
        return _script(given)
    if _RECIPE.fullmatch(first) and not Path(first).exists():
        return recipes.read_recipe(first, rest, given.gpus, given.patience)
    if first.endswith(_SHELL):
        return _shell(given)
    if first.endswith(files.ENDINGS):
        words = _functional_test(first)
        if words is None:
            return files.read_file(first, rest, given.gpus)
        variables = files.loaded(first).get("ENV_VARS")
        environment = {str(name): str(value) for name, value in variables.items()} if variables else {}
        job = _functional_job(replace(given, words=[first, *words, *rest], environment=environment))
        return replace(job, found=(*files.loaded_with_repeats(first)[1], *job.found))
    return _script(given)


def settings_of_file(path: str) -> Job:
    """The job of a file of settings or a shell script, read by tables only: Megatron is not imported, and its checks do
    not run. Raises as ``read_job`` does."""
    if path.endswith(_SHELL):
        return _shell(Given([path], 1), by_table=True)
    words = _functional_test(path)
    if words is None:
        return files.read_file(path, (), 1)
    return read_flags([path, *words], 1, "only sizes are read")


def is_file_of_settings(text: str) -> bool:
    """Whether the value of an option is the name of a file of settings, and not a text with flags."""
    return text.endswith((*_SHELL, *files.ENDINGS)) and not text.startswith("--") and "\n" not in text


def _script(given: Given) -> Job:
    if _YAML in given.words[1:-1]:
        settings = given.words[given.words.index(_YAML) + 1]  # Megatron reads no other flag then
        return replace(files.read_file(settings, (), given.gpus), source=f"{given.words[0]} {_YAML} {settings}")
    first = Path(given.words[0])
    if not given.module and first.is_file() and first.suffix not in ("", ".py"):
        raise UnreadableError(
            f"{first} is not a job that check reads: a Python script with its flags (.py), a shell script "
            f"({', '.join(_SHELL)}) or a file of settings ({', '.join(files.ENDINGS)})"
        )
    return megatron_flags.read_script(
        given.words,
        given.gpus,
        module=given.module,
        generation=given.generation,
        patience=given.patience,
        environment=given.environment,
    )


def _functional_test(path: str) -> list[str] | None:
    """The flags in a file of a functional test of Megatron-LM; None if the file is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None  # the reader of files raises the fitting error
    if not re.search(r"^MODEL_ARGS\s*:", text, re.MULTILINE):
        return None
    arguments = files.loaded(path).get("MODEL_ARGS")
    if not isinstance(arguments, dict) or not isinstance(files.loaded(path).get("ENV_VARS") or {}, dict):
        raise UnreadableError(f"{path}: MODEL_ARGS has no flags; a flag looks like --num-layers: 32")
    return [word for name, value in arguments.items() for word in words_of(str(name), value)]


def words_of(name: str, value: object) -> list[str]:
    """The words of a flag, as Megatron-LM's own shell script writes them: true is a switch, false is left out, brackets
    are a list."""
    if isinstance(value, list):
        return [name, *map(str, value)]
    text = "true" if value is None else str(value).replace("\\", "")  # the backslashes are for the shell
    if text.lower() in ("true", "false"):
        return [name] if text.lower() == "true" else []
    if text.startswith("[") and text.endswith("]"):
        return [name, *text[1:-1].replace(",", " ").split()]
    one_word = name in options() and not options()[name].kind.endswith("list")
    return [name, *([text] if one_word else text.split())]


def _functional_job(given: Given) -> Job:
    """The job of a functional test. If the file is in a checkout of Megatron-LM, the checkout's parser reads it."""
    path = Path(given.words[0]).resolve()
    for folder in path.parents:
        script = folder / _PYTHON_OF_MEGATRON
        if script.is_file() and (folder / "megatron" / "training").is_dir():
            job = _script(replace(given, words=[str(script), *given.words[1:]]))
            return replace(job, source=given.words[0])
    return read_flags(given.words, given.gpus, "the file is not in a checkout of Megatron-LM")


def _shell(given: Given, by_table: bool = False) -> Job:
    first = given.words[0]
    rest = list(given.words[1:])
    command = shell.read_shell(first)
    words, left = _set_words([word for word in (*command.words, *rest) if word not in ("$@", "$*")])
    found = []
    if left:
        text = f"not read, because {first} does not set their variables: {', '.join(left)}"
        found.append(Finding("variables-not-set", NOTE, text))
    if command.unknown:
        unknown = ", ".join(command.unknown).replace(f"${{{shell.PRINTED}}}", "$(...)")
        text = f"not known, so all their branches were read, and the later one wins: {unknown}"
        found.append(Finding("conditions-not-known", NOTE, text))
    if command.program in ("verl", "verl-sft"):
        changes = [word for word in words if "=" in word and not word.startswith("--")]
        job = files.job_of_values(command.program, files.changes_of(changes, first), given.gpus, first)
    elif command.program in ("slime", "ms-swift"):
        values = values_of_words(words)
        for name in ("NNODES", "NPROC_PER_NODE"):
            text = " ".join(command.variables.get(name, []))
            values |= {name: int(text)} if text.isdigit() else {}
        job = files.job_of_values(command.program, values, given.gpus, first)
    elif by_table:
        job = read_flags([first, *words], given.gpus, "only sizes are read")
    else:
        set_here = {name: " ".join(value) for name, value in command.variables.items() if name.startswith(_VARIABLES)}
        job = _megatron_in_shell(replace(given, environment=set_here), command, words)
    return replace(job, source=first, found=(*found, *job.found))


def _set_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words whose variables are set, and the flags and changes whose value is a variable that is not set."""
    kept: list[str] = []
    left: list[str] = []
    begin = 0
    while begin < len(words):
        end = begin + 1
        takes_values = words[begin].startswith("--") and "=" not in words[begin]
        while takes_values and end < len(words) and not words[end].startswith("--"):
            end += 1
        part = words[begin:end]
        unset = any("$" in word for word in part)
        if unset:
            left.append(" ".join(part).replace(f"${{{shell.PRINTED}}}", "$(...)"))
        kept += [] if unset else part
        begin = end
    return kept, left


def _megatron_in_shell(given: Given, command: shell.Command, words: list[str]) -> Job:
    first = given.words[0]
    script = command.script
    found = []
    place = next((one for one in (Path(first).parent / script, Path(script)) if one.is_file()), None)
    nodes = shell.number_behind(command.launcher, "--nnodes")
    each = shell.number_behind(command.launcher, "--nproc-per-node")
    processes = (nodes or 1) * (each or 0)
    if each is not None and processes != given.gpus and (nodes is not None or each > given.gpus):
        text = f"the launcher starts {processes} processes, but --gpus is {given.gpus}"
        found.append(Finding("other-number-of-gpus", RISK, text, f"--gpus {processes}"))
    if place is not None or command.module:
        job = _script(replace(given, words=[str(place or script), *words], module=command.module))
    else:
        job = read_flags([first, *words], given.gpus, f"{first} names {script}, which does not exist")
    return replace(job, found=(*found, *job.found))
