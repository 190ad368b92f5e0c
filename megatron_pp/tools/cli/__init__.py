"""The ``megatron-pp`` command. Each subcommand has a file. Only `run` imports torch, when it runs a script."""

from megatron_pp.tools.cli.command_line import main

__all__ = ["main"]
