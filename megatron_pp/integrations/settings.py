"""The settings of `install()`: keywords, environment variables and a TOML file, read and checked in this one place.

A keyword goes before the environment, the environment before the file, the file before the training stack's own config,
to which nothing is ever written. `TABLE` has every setting; `megatron-pp run` makes its flags from it.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from megatron_pp.config import rules
from megatron_pp.config.checks import one_of, whole_number
from megatron_pp.config.model_config import TransformerConfig, read_flag
from megatron_pp.errors import ConfigError, ExchangeError, ScheduleInputError
from megatron_pp.on_demand import load
from megatron_pp.plan.names import unknown

PREFIX = "MEGATRON_PP_"
FILE_VARIABLE = "MEGATRON_PP_SETTINGS"
OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("SETTINGS", "NVTX", "PYTHON", "VENV", "TORCH", "URL", "LAUNCHER", "BENCHMARK_MEGATRON_SOURCE"),
        *("NEWEST_TORCH", "TEST_JOBS", "EXHAUSTIVE", "FUZZ", "RACE_REPEATS", "SCREENSHOTS"),
    )
)
"""Variables of this project that are no settings: of its scripts, build, benchmarks and tests."""
_LARGEST_TOML = 1 << 14


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    accept        (name, value) -> the value as the engine takes it; raises ConfigError
    read          text of an environment variable or a flag -> a value for ``accept``
    help          one line
    only_keyword  it can be given as a keyword of `install()` alone
    """

    name: str
    accept: Callable[[str, Any], Any]
    read: Callable[[str], Any]
    help: str
    only_keyword: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off."""
        return self.accept is _switch


@dataclass(frozen=True)
class InstallSettings:
    """What `install()` was given. ``overrides``: field of `StepSettings` -> the value that replaces the config's; the
    others are settings of the plug-in itself (`PLUGIN`).
    """

    strict: bool = False
    any_microbatch_count: bool = False
    split_weight_grad: bool = True
    overrides: Mapping[str, Any] = field(default_factory=dict)


def read_settings(file: str | os.PathLike[str] | None = None, /, **keywords: Any) -> InstallSettings:
    """The settings of ``keywords`` (None: not given), of the environment, and of the TOML ``file`` or else the one that
    ``MEGATRON_PP_SETTINGS`` names.

    Raises ConfigError for an unknown name, with the nearest known one, for a value that the setting cannot have, and
    for a file that cannot be read.
    """
    path = os.environ.get(FILE_VARIABLE) or None if file is None else file
    given: dict[str, Any] = {}
    for layer in ({} if path is None else _from_file(path), _from_environment(), _from_keywords(keywords)):
        given |= _with_policy(layer)
    if given.keys() >= {"overlap_p2p_comm", "batch_p2p_comm"}:
        rules.lowering_policy(SimpleNamespace(**given))
    if given.keys() >= {"p2p_timeout", "compute_timeout"}:
        rules.check_timeouts(SimpleNamespace(**given))
    of_plugin = {name: given.pop(name) for name in PLUGIN if name in given}
    return InstallSettings(**of_plugin, overrides=given)


def value_of_text(name: str, text: str, where: str) -> Any:
    """The value that ``text`` gives the setting ``name``. Raises ConfigError; ``where`` says where the text is from."""
    setting = _named(name, where)
    try:
        return setting.accept(name, setting.read(text))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _from_environment() -> dict[str, Any]:
    """An empty variable counts as not set."""
    given = {}
    for variable, text in os.environ.items():
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES and text:
            name = variable.removeprefix(PREFIX).lower()
            given[name] = value_of_text(name, text, f"environment variable {variable}")
    return given


def _from_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    where = "install()"
    for name in keywords:
        _named(name, where, as_keyword=True)
    return _accepted({name: value for name, value in keywords.items() if value is not None}, where)


def _from_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        content = parse_toml(load("files").read_text(path))
    except ExchangeError as error:  # which names the file
        raise ConfigError(f"settings file {error}") from error
    except ValueError as error:
        raise ConfigError(f"settings file {path}: {error}") from error
    where = f"settings file {path}"
    for name in content:
        _named(name, where)
    return _accepted(content, where)


def parse_toml(text: str) -> dict[str, Any]:
    """Raises ValueError for what is no TOML, or too long, ConfigError where no parser is installed."""
    if len(text) > _LARGEST_TOML:  # for a key of so many parts the parser takes a second, for ten times as many minutes
        raise ValueError(f"it has {len(text):,} characters; settings have at most {_LARGEST_TOML:,}")
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ConfigError("before Python 3.11, reading it takes the package tomli: pip install tomli") from error
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _named(name: str, where: str, as_keyword: bool = False) -> Setting:
    """The setting of this name. Raises ConfigError where there is none, or it cannot be given like this."""
    if name not in TABLE:
        raise ConfigError(f"{where}: {unknown('setting', name, TABLE)}")
    if TABLE[name].only_keyword and not as_keyword:
        raise ConfigError(f"{where}: {name} changes from step to step; give it as a keyword of install()")
    return TABLE[name]


def _accepted(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        return {name: TABLE[name].accept(name, value) for name, value in values.items()}
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _with_policy(layer: dict[str, Any]) -> dict[str, Any]:
    """Transfers overlap or are batched: a source that asks for one, and is silent about the other, decides both. As in
    Megatron, what does not overlap is batched.
    """
    overlap, batched = layer.get("overlap_p2p_comm"), layer.get("batch_p2p_comm")
    if overlap is not None and batched is None:
        return {**layer, "batch_p2p_comm": not overlap}
    return {**layer, "overlap_p2p_comm": False} if overlap is None and batched else layer


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return value


def _whole(name: str, value: Any) -> int:
    return whole_number(name, value)


def _communication(name: str, value: Any) -> Any:
    rules.COMMUNICATION[name](name, value)
    return value


def _path_or_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _text(name: str, value: Any) -> str:
    text = _path_or_text(value)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name} is {value!r}; it must be a text")
    return text


def _schedule(name: str, value: Any) -> str:
    text = _text(name, value)
    rules.known_family(text)
    return text


def _measured(name: str, value: Any) -> Any:
    value = _path_or_text(value)
    rules.measured_of(SimpleNamespace(pipeline_measured=value))
    return value


def _dtype(name: str, value: Any) -> Any:
    dtype = getattr(torch, value.removeprefix("torch."), value) if isinstance(value, str) else value
    rules.check_dtype(name, dtype)
    return dtype


def _steps(name: str, value: Any) -> str:
    text = _text(name, value)
    try:
        load("trace_dir").chosen_steps(text)
    except ScheduleInputError as error:
        raise ConfigError(str(error)) from error
    return text


def _pairs(name: str, value: Any) -> Callable[..., Any]:
    if callable(value):
        return value
    functions: dict[str, Callable[..., Any]] = load("pairs").PAIR_FUNCTIONS
    one_of(name, value, functions)
    return functions[value]


def _step_number(name: str, value: Any) -> Any:
    return value if callable(value) else whole_number(name, value, at_least=0, hint="or a function that returns it")


def _microbatch_costs(name: str, value: Any) -> Any:
    return value if callable(value) else rules.checked_costs(value)


def _number(text: str) -> Any:
    """Text that is no number is returned as it is, for ``accept`` to say what would be right."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


_ROWS: tuple[tuple[str, Callable[[str, Any], Any], Callable[[str], Any]], ...] = (
    ("pipeline_schedule", _schedule, str),
    ("pipeline_measured", _measured, str),
    ("microbatch_group_size_per_vp_stage", _whole, _number),
    ("offload_chunks", _communication, _number),
    ("offload_slots", _communication, _number),
    ("overlap_p2p_comm", _switch, read_flag),
    ("batch_p2p_comm", _switch, read_flag),
    ("batch_p2p_sync", _switch, read_flag),
    ("deallocate_pipeline_outputs", _switch, read_flag),
    ("overlapped_forward_backward", _pairs, str),
    ("variable_seq_lengths", _switch, read_flag),
    ("pipeline_dtype", _dtype, str),
    ("p2p_channels", _communication, str),
    ("p2p_max_ctas", _communication, _number),
    ("max_pending_sends", _communication, _number),
    ("warm_up_p2p", _switch, read_flag),
    ("device_sync", _switch, read_flag),
    ("p2p_timeout", _communication, _number),
    ("compute_timeout", _communication, _number),
    ("p2p_debug", _switch, read_flag),
    ("step_number", _step_number, str),
    ("trace_dir", _text, str),
    ("trace_steps", _steps, str),
    ("trace_first_step", _whole, _number),
    ("measure", _communication, _number),
    ("measure_out", _text, str),
    ("pipeline_replan", _communication, str),
    ("microbatch_costs", _microbatch_costs, str),
)

_ONLY_KEYWORDS = ("step_number", "microbatch_costs")

PLUGIN = {
    "strict": "raise NotServedError where Megatron's own schedule would run",
    "any_microbatch_count": "run interleaved steps that Megatron refuses as slow: fewer microbatches than ranks, or a "
    "last group that is smaller than their number",
    "split_weight_grad": "split backwards where the schedule does, by converting the model chunks before their first "
    "training step; on unless it is set",
}
"""Switches that no config has -> a line of help."""


def _table() -> dict[str, Setting]:
    of_config = TransformerConfig.__dataclass_fields__
    rows = [
        Setting(name, accept, read, of_config[name].metadata["help"], only_keyword=name in _ONLY_KEYWORDS)
        for name, accept, read in _ROWS
    ]
    rows += [Setting(name, _switch, read_flag, help_text) for name, help_text in PLUGIN.items()]
    return {row.name: row for row in rows}


TABLE = _table()
