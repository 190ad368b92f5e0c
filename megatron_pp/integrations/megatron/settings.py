"""The settings of `install()`: keywords, environment variables and a TOML file, read and checked in this one place.

The first of these that has a setting wins: a keyword, the environment, the file, the training stack's own config. The
config is never written to. `TABLE` has every setting; `megatron-pp run` makes its flags from it.
"""

import os
from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron_pp.common.names import unknown
from megatron_pp.config import kinds, rules
from megatron_pp.config.kinds import Kind
from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.config.setting_names import PREFIX, variable_of
from megatron_pp.errors import ConfigError
from megatron_pp.integrations.megatron.given import InstallSettings

FILE_VARIABLE = variable_of("settings")
OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("SETTINGS", "NVTX", "PYTHON", "PYTHON_VERSION", "OTHER_PYTHON", "VENV", "TORCH", "URL", "LAUNCHER"),
        *("BENCHMARK_MEGATRON_SOURCE", "TEST_JOBS", "TEST_AUTOGRAD_THREAD", "EXHAUSTIVE", "FUZZ", "RACE_REPEATS"),
        "SCREENSHOTS",
    )
)
"""Environment variables of this project's scripts, build, benchmarks and tests, which are not settings."""


class Setting(NamedTuple):
    """A row of the table, with one line of help."""

    kind: Kind
    help: str


SWITCHES = {
    "strict": "raise NotServedError where Megatron's own schedule would run",
    "any_microbatch_count": "run interleaved steps that Megatron refuses as slow: fewer microbatches than ranks, or a "
    "last group of fewer microbatches than ranks",
    "split_weight_grad": "convert the model chunks before their first training step if the schedule splits backwards; "
    "on by default",
    "whole_sequence_loss": "divide a loss that counts tokens by the tokens of the whole sequence, not of the shard of "
    "the context-parallel rank",
}
"""Settings that no config has, each with its help text."""
TABLE = {
    option.name: Setting(kind, option.metadata["help"])
    for option in fields(ModelParallelConfig)
    if (kind := option.metadata.get("kind")) is not None and kind.install
} | {name: Setting(kinds.SWITCH, text) for name, text in SWITCHES.items()}


def read_settings(file: str | os.PathLike[str] | None = None, /, **keywords: Any) -> InstallSettings:
    """The settings of ``keywords`` (None: not given), of the environment, and of the TOML ``file``, by default the one
    that ``MEGATRON_PP_SETTINGS`` names.

    Raises ConfigError for an unknown name, with the nearest known one, for a value that the setting cannot have, and
    for a file that cannot be read.
    """
    path = os.environ.get(FILE_VARIABLE) or None if file is None else file
    given: dict[str, Any] = {}
    layers = [_from_environment(), _accepted(keywords, "install()")]
    if path is not None:
        from megatron_pp.integrations.megatron import settings_file

        content = settings_file.read_toml(path)
        layers.insert(0, _accepted(content, f"settings file {path}", as_keywords=False))
    for layer in layers:
        given |= _with_policy(layer)
    if given.keys() >= {"overlap_p2p_comm", "batch_p2p_comm"}:
        rules.lowering_policy(SimpleNamespace(**given))
    if given.keys() >= {"p2p_timeout", "compute_timeout"}:
        rules.check_timeouts(SimpleNamespace(**given))
    of_plugin = {name: given.pop(name) for name in SWITCHES if name in given}
    return InstallSettings(**of_plugin, overrides=given)


def value_of_text(name: str, text: str, where: str) -> Any:
    """The value of ``text`` for the setting ``name``. Raises ConfigError, which says ``where`` the text is from."""
    return _named(name, where).value_of(name, text, where)


def _from_environment() -> dict[str, Any]:
    """An empty variable counts as not set."""
    given = {}
    for variable, text in os.environ.items():
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES and text:
            name = variable.removeprefix(PREFIX).lower()
            given[name] = value_of_text(name, text, f"environment variable {variable}")
    return given


def _named(name: str, where: str, as_keyword: bool = False) -> Kind:
    """The kind of the setting ``name``. Raises ConfigError if there is none, or if it cannot be given in this way."""
    if name not in TABLE:
        raise ConfigError(f"{where}: {unknown('setting', name, TABLE)}")
    if TABLE[name].kind.only_keyword and not as_keyword:
        raise ConfigError(f"{where}: {name} changes from step to step; give it as a keyword of install()")
    return TABLE[name].kind


def _accepted(values: Mapping[str, Any], where: str, as_keywords: bool = True) -> dict[str, Any]:
    """The checked ``values``, without those that are None."""
    kinds_of = {name: _named(name, where, as_keywords) for name in values}
    try:
        return {name: kinds_of[name].accept(name, value) for name, value in values.items() if value is not None}
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _with_policy(layer: dict[str, Any]) -> dict[str, Any]:
    """``layer`` with both fields of the policy if it has one of them: transfers either overlap or are batched. As in
    Megatron, transfers that do not overlap are batched.
    """
    overlap = layer.get("overlap_p2p_comm")
    batched = layer.get("batch_p2p_comm")
    if overlap is not None and batched is None:
        return {**layer, "batch_p2p_comm": not overlap}
    return {**layer, "overlap_p2p_comm": False} if overlap is None and batched else layer
