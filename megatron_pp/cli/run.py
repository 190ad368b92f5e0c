"""``megatron-pp run``: a training script of Megatron's, unchanged, on this engine.

Its flags are the settings of the plug-in, which needs torch; so they are known only when the command runs, and the
command reads its arguments itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_pp.cli.as_main import run_module, run_script
from megatron_pp.cli.errors import UsageError
from megatron_pp.cli.parser import Parser
from megatron_pp.plan.names import did_you_mean

NAME = "run"
SUMMARY = "run a training script of Megatron's on this engine, unchanged"
_EXAMPLES = """\
Settings come before the script, the script's own flags behind it. Each can also be given in the environment, as
MEGATRON_PP_P2P_TIMEOUT=60, and in a TOML file, as p2p_timeout = 60. A flag goes before the environment, which goes
before the file, which goes before what Megatron's config says.

examples:
  torchrun --nproc-per-node 8 -m megatron_pp run --overlap-p2p-comm pretrain_gpt.py --num-layers 32 ...
  torchrun --nproc-per-node 8 -m megatron_pp run --settings pipeline.toml -m my_project.train ...
"""


def prepare(argv: Sequence[str]) -> Callable[[], None]:
    """What runs the script of a command line, under the settings there, which are read and checked now.

    Raises MegatronPPError for a wrong setting, ImportError where the plug-in misses a package; exits where arguments
    are not understood.
    """
    settings: Any = importlib.import_module("megatron_pp.integrations.settings")
    args = _parse(settings.TABLE, argv)
    if not args.module and not os.path.isfile(args.script):
        raise UsageError(f"{args.script}: there is no such file")
    given = {name: getattr(args, name) for name in settings.TABLE if hasattr(args, name)}
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    given |= {name: settings.value_of_text(name, text, _flag(name)) for name, text in texts.items()}
    plugin: Any = importlib.import_module("megatron_pp.integrations.on_import")
    plugin.install_on_import(settings.read_settings(args.settings, **given))
    return partial(_run, run_module if args.module else run_script, args.script, args.arguments)


def _run(as_main: Callable[[str, Sequence[str]], None], script: str, arguments: list[str]) -> None:
    try:
        as_main(script, arguments)
    finally:
        plugin: Any = importlib.import_module("megatron_pp.integrations.megatron_core")
        if not plugin.is_installed():
            print(f"megatron-pp run: {script} has not imported Megatron-core's schedules", file=sys.stderr)


def _parse(table: Any, argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog=f"megatron-pp {NAME}",
        usage="%(prog)s [settings] [-m] SCRIPT [its arguments]",
        description=SUMMARY[0].upper() + SUMMARY[1:] + ".",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--settings", metavar="FILE", default=None, help="a TOML file with settings")
    for name, setting in table.items():
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if setting.is_switch else {"metavar": "VALUE"}
        if not setting.only_keyword:
            parser.add_argument(_flag(name), help=setting.help.replace("%", "%%"), **how)
    parser.add_argument("-m", dest="module", action="store_true", default=False, help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="the script, whose arguments follow it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args(argv)
    if rest:
        name = rest[0].partition("=")[0]
        parser.error(f"option {name} is not known{did_you_mean(name, map(_flag, table))}")
    return args


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
