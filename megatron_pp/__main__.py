"""``python -m megatron_pp`` is the ``megatron-pp`` command."""

import sys

from megatron_pp.cli import main

if __name__ == "__main__":
    sys.exit(main())
