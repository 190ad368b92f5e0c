"""The ``megatron-pp`` command, its subcommands one file each. None of them imports torch but `run`, when it runs."""

from megatron_pp.tools.cli.command_line import main

__all__ = ["main"]
