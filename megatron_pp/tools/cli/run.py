"""``megatron-pp run``: runs an unchanged Megatron training script on this engine.

The flags of this command are the settings of the plug-in. Arguments after the script are the script's, so this command
parses its own arguments.

The script runs within this process as with ``python SCRIPT``, a module as with ``python -m MODULE``. Its exceptions,
also ``SystemExit``, are raised here. Unlike with ``runpy``, the script's ``__main__`` stays in ``sys.modules``: threads
and exit handlers may run after its last line, and may pickle objects that it defines.
"""

import argparse
import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from megatron_pp.common.names import did_you_mean
from megatron_pp.config.kinds import SWITCH
from megatron_pp.integrations.megatron.settings import TABLE, read_settings, value_of_text
from megatron_pp.tools.cli.errors import UsageError
from megatron_pp.tools.cli.options.parser import HelpFormatter, Parser

NAME = "run"
SUMMARY = "run an unchanged Megatron training script on this engine"
_EXAMPLES = """\
Settings come before the script, the script's own flags after it. A setting can also be given in the environment, as
MEGATRON_PP_P2P_TIMEOUT=60, or in a TOML file, as p2p_timeout = 60. A flag overrides the environment, the environment
overrides the file, and the file overrides Megatron's config.

examples:
  torchrun --nproc-per-node 8 -m megatron_pp run --overlap-p2p-comm pretrain_gpt.py --num-layers 32 ...
  torchrun --nproc-per-node 8 -m megatron_pp run --settings pipeline.toml -m my_project.train ...
"""


_OTHERS = "the plug-in"
_GROUPS = {
    "the schedule": (
        "pipeline_schedule", "microbatch_group_size_per_vp_stage", "overlapped_forward_backward", "pipeline_measured",
        "offload_chunks", "offload_slots", "fsdp_collectives", "fsdp_max_active_stages",
    ),
    "transfers": (
        "overlap_p2p_comm", "batch_p2p_comm", "batch_p2p_sync", "pipeline_dtype", "variable_seq_lengths",
        "p2p_channels", "p2p_max_ctas", "max_pending_sends", "warm_up_p2p", "device_sync",
        "deallocate_pipeline_outputs",
    ),
    "failures": ("p2p_timeout", "compute_timeout", "p2p_debug"),
    "traces and measurements": ("trace_dir", "trace_steps", "trace_first_step", "measure", "measure_out", "metrics"),
}  # fmt: skip
"""Title in the help -> settings. Other settings are in a last group."""


def prepare(argv: Sequence[str]) -> Callable[[], None]:
    """A function that runs the script of a command line. The settings are read and checked before it is returned.

    Raises MegatronPPError for a wrong setting, and ImportError if a package of the plug-in is missing. Exits if the
    arguments are not understood.
    """
    parser = script_parser(NAME, "settings", SUMMARY, _EXAMPLES)
    cpu = "try a script without a GPU, slowly: it runs on the CPU with gloo, and stand-ins replace Megatron's calls "
    parser.add_argument("--cpu", action="store_true", default=False, help=cpu + "of the GPU, as for parity")
    add_settings(parser)
    args = parsed(parser, argv)
    if args.cpu:
        _stand_in_for_gpus(args.script, args.module)
    plugin: Any = importlib.import_module("megatron_pp.integrations.on_import")
    plugin.install_on_import(read_settings(args.settings, **given_settings(args)))
    return partial(_run, load_module if args.module else load_script, args.script, args.arguments)


def _stand_in_for_gpus(script: str, module: bool) -> None:
    """Replaces the calls of a GPU until the program ends, as parity does before a script runs on the CPU."""
    runs: Any = importlib.import_module("megatron_pp.tools.parity.runs")
    runs.prepare(runs.Program(script, module, steps=0, deadline=0.0, gpu=False, load=None))


def _run(load: Callable[[str, Sequence[str]], Callable[[], None]], script: str, arguments: list[str]) -> None:
    main = load(script, arguments)
    try:
        main()
    finally:
        plugin: Any = importlib.import_module("megatron_pp.integrations.megatron_core")
        if not plugin.is_installed():
            print(f"megatron-pp run: {script} has not imported Megatron-core's schedules", file=sys.stderr)


def script_parser(name: str, options: str, summary: str, examples: str) -> Parser:
    """The parser of a command that takes ``options``, a script, and the script's own arguments."""
    return Parser(
        prog=f"megatron-pp {name}",
        usage=f"%(prog)s [{options}] [-m] SCRIPT [its arguments]",
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples,
        formatter_class=HelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The plug-in's settings on a command line. Raises ConfigError for an impossible value."""
    given = {name: getattr(args, name) for name in TABLE if hasattr(args, name)}
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    return given | {name: value_of_text(name, text, _flag(name)) for name, text in texts.items()}


def add_settings(parser: Parser) -> None:
    """Adds an option for each setting of the plug-in, and one for a file of settings."""
    parser.add_argument("--settings", metavar="FILE", default=None, help="a TOML file with settings")
    groups = {title: parser.add_argument_group(title) for title in (*_GROUPS, _OTHERS)}
    for name, setting in TABLE.items():
        if setting.kind.only_keyword:
            continue
        how: dict[str, Any] = {"metavar": "VALUE"}
        if setting.kind is SWITCH:
            how = {"action": argparse.BooleanOptionalAction}
        elif setting.kind.choices:  # the setting checks its choices itself, with a better error than argparse
            how = {"metavar": "{" + ",".join(setting.kind.choices) + "}"}
        title = next((title for title, names in _GROUPS.items() if name in names), _OTHERS)
        groups[title].add_argument(_flag(name), help=setting.help.replace("%", "%%"), **how)


def parsed(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """The parser's options, the script and its own arguments. Exits if they are not understood. Raises UsageError if
    the script does not exist."""
    parser.add_argument("-m", dest="module", action="store_true", default=False, help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="the script; its arguments follow it")
    rest_of_it = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    rest_of_it.required = False  # otherwise the error about a missing script also names "..."
    args, rest = parser.parse_known_args(argv)
    if rest:
        name = rest[0].partition("=")[0]
        parser.error(f"option {name} is not known{did_you_mean(name, parser.options)}")
    if not args.module and not os.path.isfile(args.script):
        problem = "it is a folder, not a script" if os.path.isdir(args.script) else "there is no such file"
        raise UsageError(f"{args.script}: {problem}")
    return args


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def load_script(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    """A function that runs the script as ``__main__``. Raises UsageError if the file cannot be read."""
    file = os.path.abspath(path)
    try:
        with io.open_code(file) as script:
            source = script.read()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    _begin(os.path.dirname(os.path.realpath(path)), [path, *arguments])
    code = compile(source, file, "exec", dont_inherit=True)
    return partial(_execute, code, file, loader=SourceFileLoader("__main__", file))


def load_module(name: str, arguments: Sequence[str]) -> Callable[[], None]:
    """A function that runs the module as ``__main__``. Raises UsageError if the module does not exist or has no
    code."""
    _begin(os.getcwd(), ["-m", *arguments])  # as in Python while it looks for the module
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:  # its package does not exist, or this is not a module's name
        if not f"{name}.".startswith(f"{getattr(error, 'name', name)}."):
            raise
        spec = None
    code = spec.loader.get_code(spec.name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise UsageError(f"-m {name}: there is no module of this name that can be run")
    sys.argv[0] = spec.origin or name
    return partial(_execute, code, spec.origin, loader=spec.loader, package=spec.parent, cached=spec.cached, spec=spec)


def _begin(folder: str, argv: list[str]) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder  # instead of the folder of this command, or the current folder
    sys.argv[:] = argv


def _execute(
    code: CodeType,
    file: str | None,
    loader: Any,
    package: str | None = None,
    cached: str | None = None,
    spec: ModuleSpec | None = None,
) -> None:
    main = ModuleType("__main__")
    attributes = {"file": file, "loader": loader, "package": package, "cached": cached, "spec": spec}
    vars(main).update({f"__{name}__": value for name, value in attributes.items()}, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(code, vars(main))
