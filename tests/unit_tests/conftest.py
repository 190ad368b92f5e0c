"""What unit tests run under."""

from __future__ import annotations

import multiprocessing

# Ranks that a test starts with start_method="forkserver" are forked from a process that has loaded these.
multiprocessing.set_forkserver_preload(["pytest", "examples.gpt.program", "tests.harness.processes"])
