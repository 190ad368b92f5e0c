"""Reads a Megatron script's flags by Megatron's own parser and checks, as rank 0 of the job would."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_pp.common.names import did_you_mean
from megatron_pp.tools.check.findings import ERROR, NOTE, RISK, Finding
from megatron_pp.tools.check.jobs.errors import UnreadableError
from megatron_pp.tools.check.jobs.job import Job

PATIENCE = 120.0  # seconds that importing Megatron and reading the flags may take
HOPPER = 9
_CHANGE_OR_ADVICE = re.compile(
    r"disabl|ignor|deprecat|overrid|not support|no longer|turn|setting|warning|replac|instead|forc|only|cannot|fall"
    r"|must|should|recommend",
    re.IGNORECASE,
)
"""Matches the lines by which Megatron says that it changes a setting, or gives advice."""
_ROUTINE = re.compile(r"Overriding default arguments|python|Setting global batch size|Please specify --split", re.I)
_TRAINING = "megatron.training"
_OF_PACKAGES = re.compile(r"please install|not installed|install (it|them) (with|via|by)", re.IGNORECASE)
"""Matches refusals that are about this machine, not about the job."""
_ENVIRONMENT = re.compile(r"\bos\.(environ|getenv)\b")
"""Matches conditions that read environment variables, which may not be set on a login node."""
_ASSUMED = {
    "transformer_engine": "Transformer Engine is not installed here; the job is assumed to have the release it needs",
    "flashinfer": "FlashInfer is not installed here; the job is assumed to have the release it needs",
    "CUDA_DEVICE_MAX_CONNECTIONS": "CUDA_DEVICE_MAX_CONNECTIONS is not set here; the job is assumed to set it right",
}


_NEEDED = re.compile(r"install|not available|your version|>=| > ", re.IGNORECASE)
_LIBRARIES = {
    "transformer_engine": re.compile(r"\bTE\b|transformer[-_ ]?engine|NVTE_", re.IGNORECASE),
    "flashinfer": re.compile("flashinfer", re.IGNORECASE),
}
"""Library -> the names that refusals use for it."""


def read_script(
    words: Sequence[str],
    gpus: int,
    *,
    module: bool = False,
    generation: int = HOPPER,
    patience: float = PATIENCE,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """The job of ``words``: a script, or the name of a module if ``module`` is set, and its flags.

    ``generation`` is the GPU's major compute capability. ``environment`` has variables that are set in the job but not
    in this process. Raises UnreadableError.
    """
    script = _path_of(words[0], module)
    text = own_text(script)
    if "ArgumentParser(" in text and _TRAINING not in text:
        from megatron_pp.tools.check.jobs import flag_table

        return flag_table.read_flags(words, gpus, f"{words[0]} has its own parser", own=text)
    request = {"script": script, "module": module, "words": [*words[1:]], "gpus": gpus, "generation": generation}
    request["environment"] = dict(environment or {})
    return job_of_answer(_asked(request, patience), words, script, gpus)


def job_of_answer(answer: Mapping[str, Any], words: Sequence[str], script: str, gpus: int) -> Job:
    """The job of the answer that a process of `megatron_process` gave. ``script`` is the file that ``words`` name."""
    if "missing" in answer or not answer["checked"]:
        from megatron_pp.tools.check.jobs import flag_table

        return flag_table.read_flags(words, gpus, _why_not_imported(answer), str(answer.get("release", "")))
    found = [*_usage(answer, words, script), *_refusals(answer), *_changes(answer), *_assumed(answer)]
    return Job(
        framework="megatron",
        gpus=gpus,
        given=answer["given"],
        args=answer["args"] or answer["before"],
        spelling=answer["spelling"],
        unknown=tuple(_unknown_flags(answer["unknown"], script)),
        found=tuple(found),
        release=answer["release"],
        validated=bool(answer["args"]) and not answer["failed"],
        source=words[0],
    )


def _path_of(name: str, module: bool) -> str:
    if not module:
        if not Path(name).is_file():
            problem = "is a folder, not a script" if Path(name).is_dir() else "does not exist"
            raise UnreadableError(f"{name} {problem}; check reads a script with its flags, or a file of settings")
        _check_is_source(name)
        return name
    sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.remove("")
    if spec is None or spec.origin is None:
        raise UnreadableError(f"there is no module {name!r}; -m needs the name of a module, such as my_project.train")
    return spec.origin


def _check_is_source(path: str) -> None:
    """Raises UnreadableError if Python cannot decode the file: a binary, or text in another encoding than it names."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8, nor in an encoding it names"
        raise UnreadableError(f"{path} cannot be read as a Python script: {why}") from error
    if "\0" in text:
        raise UnreadableError(f"{path} cannot be read as a Python script: it is a binary file")


def _asked(request: Mapping[str, Any], patience: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "megatron_pp.tools.check.jobs.megatron_process", json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        why = f"Megatron's parser did not read the flags of {request['script']} within {patience:g} s"
        raise UnreadableError(f"{why}; --patience SECONDS gives it more time") from None
    if done.returncode or not done.stdout:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"missing": f"its process ended: {last[0]}", "release": ""}
    return json.loads(done.stdout)


def _why_not_imported(answer: Mapping[str, Any]) -> str:
    if answer.get("module") in ("megatron.training", "megatron"):
        return (
            "megatron.training cannot be imported: it is not on PyPI but in a checkout of Megatron-LM, which must be "
            "beside the script or on PYTHONPATH"
        )
    if "missing" not in answer:
        return "the script does not read its flags with Megatron's parser"
    return f"megatron.training cannot be imported ({answer['missing']})"


def _unknown_flags(words: Sequence[str], script: str) -> list[str]:
    """The flags that neither Megatron's parser nor the script's source knows."""
    names = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    text = own_text(script)
    return [name for name in names if f'"{name}"' not in text and f"'{name}'" not in text]


def own_text(script: str) -> str:
    """The source of the script; "" if it cannot be read."""
    try:
        return Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _usage(answer: Mapping[str, Any], words: Sequence[str], script: str) -> list[Finding]:
    found = []
    for text in answer["usage"]:
        found.append(Finding("flag-not-understood", ERROR, f"Megatron's parser refuses {text}"))
    known = ["--" + name.replace("_", "-") for name in answer["before"]]
    known = [*known, *answer["spelling"].values()]
    text_of_script = own_text(script)
    adds_own = "extra_args_provider" in text_of_script and not answer["own_flags_read"]
    own_parser = _TRAINING not in text_of_script
    for name in _unknown_flags(answer["unknown"], script):
        level = ERROR
        text = f"Megatron {answer['release']}'s parser does not know {name}{did_you_mean(name, known)}"
        if own_parser:
            level, text = RISK, f"{text}; the script does not name megatron.training and may have its own parser"
        elif adds_own:
            level, text = RISK, f"{text}; it may be one of the flags that the script adds"
        found.append(Finding("unknown-flag", level, text, f"remove {name}", (name.lstrip("-").replace("-", "_"),)))
    return found


def _refusals(answer: Mapping[str, Any]) -> list[Finding]:
    found = []
    for one in answer["refusals"]:
        if _asks_for_what_is_assumed(answer, one["text"]):
            continue  # it is about this machine, not about the job
        if _OF_PACKAGES.search(one["text"]):
            text = f"Megatron needs a package that is missing here, but may be there in the job: {one['text']}"
            found.append(Finding("package-not-here", NOTE, text))
            continue
        settings = tuple(one["settings"])
        about = settings[0].replace("_", "-") if settings else "settings"
        text = one["text"].strip() or f"this must hold: {one['condition']}"
        given = ", ".join(_valued(answer, name) for name in settings if name in answer["given"])
        text = f"Megatron refuses: {text}" + (f" ({given})" if given else "")
        level = ERROR
        if _ENVIRONMENT.search(one["condition"]):
            level, text = RISK, f"{text}; the job's environment is not known here"
        found.append(Finding(f"megatron-refuses-{about}", level, text, "", settings))
    for text in answer["failed"]:
        found.append(Finding("megatron-fails", ERROR, f"Megatron's checks fail: {text}"))
    return found


def _asks_for_what_is_assumed(answer: Mapping[str, Any], text: str) -> bool:
    """Whether a refusal is about a library, or its release, that the job is assumed to have."""
    words = (_LIBRARIES[one] for one in answer["assumed"] if one in _LIBRARIES)
    return bool(_NEEDED.search(text)) and any(one.search(text) for one in words)


def _valued(answer: Mapping[str, Any], name: str) -> str:
    value = answer["given"][name]
    spelling = answer["spelling"].get(name, name)
    return spelling if value is True else f"{spelling} {value}"


def _changes(answer: Mapping[str, Any]) -> list[Finding]:
    """A note for each given setting that Megatron's checks have changed, with the lines that Megatron prints about it.
    Then a note for each other line that Megatron prints."""
    said = [line for line in answer["said"] if _CHANGE_OR_ADVICE.search(line) and not _ROUTINE.search(line)]
    found: list[Finding] = []
    explained: set[str] = set()
    for name, value in answer["given"].items():
        if not answer["args"] or name not in answer["args"]:
            continue
        after = answer["args"][name]
        if after == value or [after] == value:  # Megatron replaces some lists of one value by the value
            continue
        words = re.compile(re.escape(name).replace("_", "[-_ ]?"), re.IGNORECASE)
        reasons = [line for line in said if words.search(line)]
        explained.update(reasons)
        reason = f": {'; '.join(reasons)}" if reasons else ""
        text = f"Megatron changes {_valued(answer, name)} to {after}{reason}"
        found.append(Finding(f"megatron-changes-{name.replace('_', '-')}", NOTE, text, "", (name,)))
    rest = [line for line in said if line not in explained]
    return found + [Finding("megatron-says", NOTE, f"Megatron says: {line}") for line in rest]


def _assumed(answer: Mapping[str, Any]) -> list[Finding]:
    return [Finding("assumed", NOTE, _ASSUMED[name]) for name in answer["assumed"]]
