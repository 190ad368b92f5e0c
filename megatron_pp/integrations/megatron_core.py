"""Megatron-core's training loop on this engine: one line, `install()`.

    from megatron_pp.integrations import megatron_core
    megatron_core.install()

Afterwards Megatron's three schedule functions, `forward_backward_no_pipelining` and the two for pipelines, run through
this engine, in every module that has imported them. Megatron's own `get_forward_backward_func` returns them. Models,
optimizers, data-parallel wrappers, configs, process groups and the forward and backward of one microbatch stay
Megatron's. Steps that the engine does not serve run on Megatron's own schedule, with one warning that names the reason;
`install(strict=True)` raises NotServedError instead.
"""

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

from megatron_pp.config.setting_names import PREFIX
from megatron_pp.errors import NotServedError, UnknownMegatronError
from megatron_pp.integrations.megatron.given import InstallSettings
from megatron_pp.integrations.megatron.releases.release import importable, load_megatron
from megatron_pp.integrations.megatron.stand_ins import BLOCKS, CHANGES, State, current, put_in_place
from megatron_pp.integrations.megatron.steps.gpt_models import MODELS

__all__ = ["NotServedError", "UnknownMegatronError", "install", "installed", "is_installed", "uninstall"]


def install(strict: bool | None = None, *, settings: str | PathLike[str] | None = None, **others: Any) -> None:
    """Make Megatron-core's training loop use this engine, in this process. A second call changes the settings. It also
    replaces schedules in modules that were imported or reloaded since the first call.

    strict     raise NotServedError for a step that Megatron's own schedule would run
    settings   a TOML file with settings; by default the one that the environment variable MEGATRON_PP_SETTINGS names
    others     settings, such as ``overlap_p2p_comm=True``; docs/megatron.md lists them. None: not given

    A keyword has precedence over the environment variable MEGATRON_PP_<NAME>, the variable over the file, and the file
    over the field of Megatron's config. Nothing is ever written to the config.

    Raises ConfigError for an unknown name or an impossible value. Raises UnknownMegatronError if megatron-core is
    missing, too old, or has an unknown signature; under `strict` also if its schedules read or call something unknown.
    Under `strict` raises NotServedError if another function has the name of a schedule, or of
    `get_forward_backward_func`, and does not call Megatron's. If it raises, nothing was changed.
    """
    install_with(_given(settings, strict, others))


def _given(file: str | PathLike[str] | None, strict: bool | None, others: Mapping[str, Any]) -> InstallSettings:
    """Raises ConfigError."""
    nothing = file is None and not others and not any(name.startswith(PREFIX) for name in os.environ)
    if nothing and (strict is None or isinstance(strict, bool)):
        return InstallSettings(strict=strict is True)
    from megatron_pp.integrations.megatron.settings import read_settings

    return read_settings(file, strict=strict, **others)


def install_with(settings: InstallSettings) -> None:
    """`install()` with settings that have been read."""
    megatron, classes = load_megatron(), importable(MODELS)  # imports come before the lock: one may wait for a thread
    with CHANGES:
        state = put_in_place(State(megatron, settings), classes)
        if BLOCKS:
            BLOCKS[-1].state = state


@atexit.register
def _report_unused() -> None:
    plugin = current()
    if plugin is None or not plugin.called:
        from megatron_pp.integrations.megatron import end_of_program

        end_of_program.report_unused(plugin)


def uninstall() -> None:
    """Restore Megatron-core's own schedules in every module."""
    from megatron_pp.integrations.megatron import removal

    removal.uninstall()


def is_installed() -> bool:
    """Whether Megatron-core's schedules run through this engine."""
    return current() is not None


@contextmanager
def installed(strict: bool | None = None, **others: Any) -> Iterator[None]:
    """`install()` for a `with` block. At its end the state before it is restored, whatever was installed or uninstalled
    within. If blocks end in another order, as in several threads, the state of the block that began last holds."""
    from megatron_pp.integrations.megatron import removal

    with removal.installed(State(load_megatron(), _given(None, strict, others)), importable(MODELS)):
        yield
