"""Makes a job of settings without Megatron's own code: adds the defaults of its parser, and sizes that it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from megatron_pp.common.names import did_you_mean
from megatron_pp.tools.check.findings import ERROR, NOTE, RISK, Finding
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.sizes import completed
from megatron_pp.tools.flags.read import Read, read_words
from megatron_pp.tools.flags.table import options

WRONG_VALUE = "value-not-understood"


def read_flags(words: Sequence[str], gpus: int, why: str, release: str = "", own: str = "") -> Job:
    """The job of a script and its flags, read by the table of Megatron's flags.

    ``why`` says why Megatron's own parser did not read them. ``own`` is the script's source: flags that it names are
    not reported as unknown.
    """
    read = read_words(words[1:])
    read.unknown = [name for name in read.unknown if f'"{name}"' not in own and f"'{name}'" not in own]
    found = [Finding("not-read-by-megatron", NOTE, f"{why}; a table of Megatron's flags was used to read the flags")]
    for name in read.unknown:
        text = f"{name} is not a known flag of Megatron{did_you_mean(name, options())}; it was not read"
        found.append(Finding("unknown-flag", RISK, text, "", (name.lstrip("-").replace("-", "_"),)))
    defaults = {"deallocate_pipeline_outputs": True}  # Megatron's training sets it
    return job_of("megatron", read, gpus, words[0], found, release, defaults)


def job_of(
    framework: str,
    read: Read,
    gpus: int,
    source: str,
    found: Sequence[Finding] = (),
    release: str = "",
    defaults: Mapping[str, Any] | None = None,
) -> Job:
    """The job of the settings in ``read``. ``defaults`` are those of the program that differ from Megatron's parser."""
    wrong = [Finding(WRONG_VALUE, ERROR, text) for text in read.wrong]
    return Job(
        framework=framework,
        gpus=gpus,
        given=read.given,
        args=completed(read.given, gpus, defaults or {}),
        spelling=read.spelling,
        unknown=tuple(read.unknown),
        found=(*wrong, *found),
        release=release or installed_release(),
        source=source,
    )


def installed_release() -> str:
    """The installed release of Megatron-core; "" if it is not installed."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return ""
