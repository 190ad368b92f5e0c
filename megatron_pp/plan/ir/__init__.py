"""The parts of a plan: instructions, dataflow, placement, spec, programs."""
