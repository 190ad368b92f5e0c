"""``python -m megatron_pp`` is the ``megatron-pp`` command."""

import sys

from megatron_pp.tools.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
