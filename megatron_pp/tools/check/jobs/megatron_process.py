"""Reads a script's flags by Megatron's own parser and checks, in a process of its own. It prints one JSON object.

    python -m megatron_pp.tools.check.jobs.megatron_process '{"script": ..., "words": [...], "gpus": 64, ...}'

It makes no process group and uses no GPU. Megatron's `parse_args` and `validate_args` read the number of processes from
the environment, and need the compute capability of the device only. `megatron.training` is imported without the
modules that its package imports for training.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import enum
import gc
import importlib
import importlib.util
import io
import json
import logging
import os
import sys
import types
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_pp.errors import MegatronPPError

_MOST_ERRORS = 20  # usage errors that are collected; the parser runs once more for each
_PARSED = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-layers")
"""A parser that knows these flags is Megatron's."""
_NEWEST = "99.0"
"""The release that libraries are assumed to have in the job."""
_SAME = {
    "transformer_pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "total_model_size": "world_size",
    "num_layers_per_pipeline_stage": "num_layers",
}
"""Local name in Megatron's checks -> the setting that it is computed from."""


class UsageFoundError(MegatronPPError):
    """A usage error of argparse, which would end the script."""


def main() -> None:
    request = json.loads(sys.argv[1])
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that lines which libraries print do not get into the answer
    gc.disable()  # collecting would take a fifth of the import's time
    json.dump(read_request(request), answer)
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # without torch's finalizers, which take half a second


def read_request(request: dict[str, Any], imported: tuple[Any, Any, list[str]] | None = None) -> dict[str, Any]:
    """The answer that `megatron_flags` makes a job of. ``imported`` is the result of `import_arguments`, if this
    process has called it already."""
    script = Path(request["script"])
    sys.path[0] = os.getcwd() if request["module"] else str(script.resolve().parent)
    os.environ.update(request.get("environment", {}))
    os.environ.update(WORLD_SIZE=str(request["gpus"]), RANK="0", LOCAL_RANK="0")
    sys.argv = [request["script"], *request["words"]]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        refusals, arguments, assumed = imported or import_arguments(request["generation"])
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return {"missing": f"{type(error).__name__}: {error}", "module": missing, "release": _release()}
    logging.disable(logging.NOTSET)
    seen = _Seen(request["words"], provider_of(script, arguments))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), _warnings_into(said):
        args = _parsed_and_checked(arguments, refusals, seen)
        config = _further_checks(arguments, refusals, args)
    after = {} if args is None else {**config, **vars(args)}
    return {
        "release": _release(),
        "given": plain(seen.given),
        "args": plain(after),
        "before": plain(seen.before),
        "spelling": seen.spelling,
        "unknown": seen.unknown,
        "usage": seen.usage,
        "refusals": [_with_known_settings(one, {*seen.before, *after}) for one in refusals.found],
        "failed": [*refusals.failed, *([] if refusals.found else refusals.consequences)],
        "said": _lines(said.getvalue()),
        "assumed": assumed,
        "own_flags_read": seen.own[0] is not None,
        "checked": hasattr(arguments, "validate_args") or bool(seen.given),
    }


def _with_known_settings(refusal: Any, known: set[str]) -> dict[str, Any]:
    """A refusal as a dict. Of its names only settings are kept, no local names and methods of Megatron."""
    names = dict.fromkeys(_SAME.get(name, name) for name in refusal.settings)
    return {**dataclasses.asdict(refusal), "settings": [name for name in names if name in known]}


def import_arguments(generation: int) -> tuple[Any, Any, list[str]]:
    """The refusals that checks will record, Megatron's module of arguments, and the names of libraries and variables
    that are missing here and assumed to be there in the job."""
    from megatron_pp.tools.check.jobs.collecting import collect_refusals

    vars(typing).setdefault("override", lambda function: function)  # Megatron's main branch needs Python 3.12
    refusals = collect_refusals()
    _stand_in_for_device(generation)
    try:
        arguments, assumed = _imported()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        from megatron_pp.tools.parity.cpu_stand_in import triton_stand_in

        importlib.import_module("torch._dynamo")  # before the stand-in: it takes the real triton or none
        with triton_stand_in():
            arguments, assumed = _imported()
    vars(arguments)["_print_args"] = lambda *_, **__: None
    return refusals, arguments, assumed


def _imported() -> tuple[Any, list[str]]:
    spec = importlib.util.find_spec("megatron.training")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'megatron.training'", name="megatron.training")
    utils = importlib.import_module("megatron.core.utils")
    assumed = _assume_libraries(utils)
    package: Any = types.ModuleType("megatron.training")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    package.__getattr__ = _not_imported
    sys.modules["megatron.training"] = package
    return importlib.import_module("megatron.training.arguments"), assumed


def _not_imported(name: str) -> Any:
    """A stand-in for a function of `megatron.training`, whose module is not imported: it imports all of training."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "ARGS":
        return []
    return lambda *args, **kwargs: None


def _stand_in_for_device(generation: int) -> None:
    """Replaces the functions that ask the device, and `torch.compile`. This process computes nothing, and torch's
    compiler would take a third of the time to import Megatron."""
    import torch

    vars(torch)["compile"] = lambda model=None, **_: model if model is not None else (lambda function: function)
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        name="GPU", major=generation, minor=0, total_memory=0, multi_processor_count=1
    )
    cuda.get_device_capability = lambda *_: (generation, 0)
    cuda.device_count = lambda: 8
    cuda.current_device = lambda: 0


def _assume_libraries(utils: Any) -> list[str]:
    """Makes Megatron believe that libraries which a machine without GPUs often lacks are there, in the newest release.
    Returns the names of what was missing."""
    assumed = []
    for package, name in (("transformer_engine", "is_te_min_version"), ("flashinfer", "is_flashinfer_min_version")):
        if importlib.util.find_spec(package) is None and hasattr(utils, name):
            setattr(utils, name, lambda *_, **__: True)
            assumed.append(package)
    if "transformer_engine" in assumed and hasattr(utils, "get_te_version"):
        utils.get_te_version = lambda: importlib.import_module("packaging.version").Version(_NEWEST)
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        assumed.append("CUDA_DEVICE_MAX_CONNECTIONS")
        sharded = {"--use-megatron-fsdp", "--use-torch-fsdp2", "--use-custom-fsdp"} & {*sys.argv}
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if sharded else "1"
    return assumed


@dataclasses.dataclass
class _Seen:
    """The result of the parser. ``given`` has the values that the words set, ``before`` all values before the
    checks."""

    words: list[str]
    own: tuple[Any, dict[str, Any]]  # the function by which the script adds flags, and the script's defaults
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    before: dict[str, Any] = dataclasses.field(default_factory=dict)
    spelling: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)
    usage: list[str] = dataclasses.field(default_factory=list)


def _parsed_and_checked(arguments: Any, refusals: Any, seen: _Seen) -> Any:
    """The arguments after Megatron's checks; None if they cannot be read."""
    provider, defaults = seen.own
    original = argparse.ArgumentParser.parse_known_args
    parser_class: Any = argparse.ArgumentParser

    def parse_known_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if args is not None or not all(name in parser._option_string_actions for name in _PARSED):
            return original(parser, args, namespace)
        found = _parse(parser, original, seen)
        seen.before = dict(vars(found))
        return found, []

    parser_class.parse_known_args = parse_known_args
    args = None
    try:
        takes_provider = hasattr(arguments, "add_megatron_arguments") and provider is not None
        args = arguments.parse_args(provider) if takes_provider else arguments.parse_args()
        if hasattr(arguments, "validate_args"):
            if getattr(args, "yaml_cfg", None) is None:
                arguments.validate_args(args, defaults)
            else:
                args = importlib.import_module("megatron.training.yaml_arguments").validate_yaml(args, defaults)
    except SystemExit as ended:
        refusals.record(f"Megatron ends the job here (exit code {ended.code})", "", (), "validate_args")
    except Exception as error:
        refusals.fail(error, (), "parse_args")
    return args


def _parse(parser: argparse.ArgumentParser, original: Any, seen: _Seen) -> argparse.Namespace:
    """All values of the parser. Words that it does not understand are left out and recorded in ``seen``."""
    vars(parser)["error"] = _raise_usage
    vars(parser)["exit"] = _raise_usage
    words = list(seen.words)
    found = argparse.Namespace()
    unknown = []
    for _ in range(_MOST_ERRORS):
        try:
            found, unknown = original(parser, words, argparse.Namespace())
            break
        except UsageFoundError as error:
            text = str(error)
            seen.usage.append(text)
            name = next((name for name in _names_in(text) if name in parser._option_string_actions), "")
            words = without_flag(words, name)
    seen.unknown = list(unknown)
    for option, action in parser._option_string_actions.items():
        if option.startswith("--") and (action.dest not in seen.spelling or _has(words, option)):
            seen.spelling[action.dest] = option
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    parser._defaults.clear()
    with contextlib.suppress(UsageFoundError):
        seen.given = dict(vars(original(parser, words, argparse.Namespace())[0]))
    return found


def _raise_usage(*message: Any) -> typing.NoReturn:
    raise UsageFoundError(str(message[-1]) if message else "")


def _names_in(text: str) -> list[str]:
    return [word.strip(":,'\"") for part in text.split() for word in part.split("/") if word.startswith("--")]


def _has(words: list[str], option: str) -> bool:
    return any(word == option or word.startswith(f"{option}=") for word in words)


def without_flag(words: list[str], name: str) -> list[str]:
    """The words without a flag and its values. If ``name`` is "", no words are left."""
    if not name:
        return []
    kept = []
    inside = False
    for word in words:
        if word.startswith("--"):
            inside = word == name or word.startswith(f"{name}=")
        if not inside:
            kept.append(word)
    return kept


def provider_of(script: Path, arguments: Any) -> tuple[Any, dict[str, Any]]:
    """The function by which the script adds flags to Megatron's parser (or None), and the defaults that it gives, as
    far as its source shows them."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None, {}
    provider: Any = None
    defaults: dict[str, Any] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for keyword in call.keywords:
            if keyword.arg == "args_defaults":
                with contextlib.suppress(ValueError):
                    defaults = ast.literal_eval(keyword.value)
            if keyword.arg == "extra_args_provider":
                value = keyword.value.body if isinstance(keyword.value, ast.IfExp) else keyword.value
                provider = _function(tree, value.id) if isinstance(value, ast.Name) else None
    return provider, defaults


def _function(tree: ast.Module, name: str) -> Any:
    """A function that the script defines or imports; None if it cannot be made here."""
    scope: dict[str, Any] = {"argparse": argparse, "os": os}
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                exec(compile(ast.Module([node], []), "script", "exec"), scope)
            elif isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
                scope[name] = getattr(importlib.import_module(node.module), name)
        except Exception:
            return None
    return scope.get(name)


def _further_checks(arguments: Any, refusals: Any, args: Any) -> dict[str, Any]:
    """Runs the checks of the model's config and of the number of microbatches. Returns the config's fields."""
    config: dict[str, Any] = {}
    if args is None or not hasattr(arguments, "validate_args"):
        return config
    try:
        if hasattr(arguments, "core_transformer_config_from_args"):
            config = dict(vars(arguments.core_transformer_config_from_args(args)))
    except Exception as error:
        refusals.fail(error, (), "TransformerConfig")
    sizes = [getattr(args, name, None) for name in ("global_batch_size", "micro_batch_size", "data_parallel_size")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return config
    names = ("global_batch_size", "micro_batch_size", "data_parallel_size")
    try:
        calculator = importlib.import_module("megatron.core.num_microbatches_calculator")
        schedule = getattr(args, "step_batch_size_schedule", None)
        more = {"step_batch_size_schedule": schedule, "seq_length": args.seq_length} if schedule else {}
        calculator.init_num_microbatches_calculator(0, getattr(args, "rampup_batch_size", None), *sizes, **more)
        if schedule:
            args.global_batch_size = calculator.get_current_global_batch_size()  # the batch of the first steps
    except Exception as error:
        refusals.fail(error, names, "num_microbatches_calculator")
    return config


@contextlib.contextmanager
def _warnings_into(said: io.StringIO) -> Iterator[None]:
    """Writes Megatron's warnings into ``said``, those by `warnings` and those by loggers."""
    handler = logging.StreamHandler(said)
    logging.getLogger("megatron").addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: print(message, file=said)
        yield
    logging.getLogger("megatron").removeHandler(handler)


def _lines(text: str) -> list[str]:
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def _release() -> str:
    with contextlib.suppress(Exception):
        return str(importlib.import_module("megatron.core").__version__)
    return ""


def plain(value: Any) -> Any:
    """The value as JSON can have it: enums by name, dtypes without "torch.", other objects as text."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items() if not str(key).startswith("_")}
    if isinstance(value, (list, tuple, set)):
        return [plain(one) for one in value]
    if isinstance(value, types.SimpleNamespace):
        return plain(vars(value))
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return getattr(value, "__name__", None) or str(value)


if __name__ == "__main__":
    main()
