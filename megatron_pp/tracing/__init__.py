"""Recording of real steps, and the comparison of a recorded run with its plan."""
