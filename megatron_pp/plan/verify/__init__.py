"""Whether a plan may run: completeness, lifetimes, memory, deadlock."""
