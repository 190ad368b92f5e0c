"""The command line: flags override a TOML file, which overrides what a resumed run remembers."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import tyro

from examples.gpt.errors import ArgumentError, CheckpointError, NoCheckpointError
from examples.gpt.files import read_text, write_atomically
from examples.gpt.settings import ModelOptions, Settings
from megatron_pp.plan.schedule_file import names_a_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ARGUMENTS = "arguments.json"
_NOT_SAVED = {"model", "config", "run_dir", "resume"}
_FIELDS = [f for f in (*fields(Settings), *fields(ModelOptions)) if f.name not in _NOT_SAVED]
# Those with a factory are read from the environment, anew at each start.
_SAVED = {f.name for f in _FIELDS if f.default_factory is MISSING}
# tyro wants a value for a switch that may also be None.
_SWITCHES = {"--batch-p2p-comm": "--batch-p2p-comm=True", "--no-batch-p2p-comm": "--batch-p2p-comm=False"}


def parse(argv: Sequence[str]) -> Settings:
    """The settings that a command line asks for.

    Raises:
        ArgumentError: an unknown flag or an impossible value.
        CheckpointError: ``--resume`` names no run, or one whose settings are damaged.
    """
    settings = _parse(argv)
    given: list[str] = []
    if settings.config is not None:
        given = _read_config(Path(settings.config))
        settings = _parse([*given, *argv])
    if settings.run_dir is not None and settings.resume is not None:
        raise ArgumentError("--run-dir and --resume are both given; a resumed run stays in its own folder: give one")
    if settings.resume is not None:
        settings = _parse([*_read_saved(find_run(Path(settings.resume))), *given, *argv])
    settings.check()
    return settings


def save(settings: Settings, folder: Path) -> None:
    """Write the settings to ``folder`` for a later ``--resume``, which may be given in another directory."""
    schedule, measured = settings.model.pipeline_schedule, settings.model.pipeline_measured
    content = {**vars(settings), **vars(settings.model), "data": [str(Path(path).absolute()) for path in settings.data]}
    if schedule is not None and names_a_file(schedule):
        content["pipeline_schedule"] = str(Path(schedule).absolute())
    if measured is not None:
        content["pipeline_measured"] = str(Path(measured).absolute())
    write_atomically(folder / ARGUMENTS, json.dumps({name: content[name] for name in sorted(_SAVED)}, indent=1) + "\n")


def find_run(path: Path) -> Path:
    """The run's folder, given it or something in it. Raises NoCheckpointError if there is none."""
    # os.path: a link to itself, or a name that no file can have, is no run.
    for folder in (path, *Path(os.path.realpath(path)).parents[:2]):
        if os.path.isfile(folder / ARGUMENTS):
            return folder
    raise NoCheckpointError(
        f"there is no run at {path}; give a folder that --run-dir or runs/ holds, with {ARGUMENTS} in it"
    )


def _parse(argv: Sequence[str]) -> Settings:
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(Settings, args=[_SWITCHES.get(flag, flag) for flag in argv], prog="train.py")
    except SystemExit as end:
        if not end.code:  # --help
            raise
        # What stands before the first rule of tyro's box, in one line: every rank says it.
        lines = [line.strip("│ ") for line in said.getvalue().splitlines() if line[:1] not in "╭╰"]
        sentence = " ".join(lines[: next((i for i, line in enumerate(lines) if line.startswith("─")), None)])
        raise ArgumentError(f"{sentence.rstrip('.')} (--help lists all flags)") from None


def _read_config(path: Path) -> list[str]:
    """The flags that a TOML file stands for; its tables only group them."""
    try:
        flags = _flags_of(tomllib.loads(path.read_text(encoding="utf-8")))
        _parse(flags)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--config is {path}, which cannot be used: {error}") from error
    return flags


def _read_saved(folder: Path) -> list[str]:
    try:
        saved = json.loads(read_text(folder / ARGUMENTS))
        flags = _flags_of(saved, _SAVED)
        _parse(flags)
    except (OSError, ValueError, AttributeError, RecursionError, ArgumentError) as error:
        advice = "give all flags and a new --run-dir"
        raise CheckpointError(f"{folder / ARGUMENTS} cannot be read ({error}); {advice}") from error
    return flags


def _flags_of(values: dict[str, Any], known: set[str] | None = None) -> list[str]:
    """``{"seed": 1, "model": {"bias": True}}`` as ``--seed=1 --bias``; of ``known`` names only, if given."""
    flags: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, dict):
            flags += _flags_of(value, known)
        elif known is not None and name not in known:
            continue
        elif isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            if any(str(part).startswith("-") for part in value):  # it would be read as a flag
                raise ValueError(f"{name} holds {value!s:.60}; no part may begin with '-'")
            flags += [flag, *map(str, value)]
        else:
            flags.append(f"{flag}={value}")
    return flags
