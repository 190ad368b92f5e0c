"""What a plan is made of: instructions, dataflow, placement, spec, programs."""
