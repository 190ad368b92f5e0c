"""The benchmarks of `scripts/benchmark.py`: one module for each subcommand, and the modules that they share."""
