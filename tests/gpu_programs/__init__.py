"""What runs the programs for GPUs on virtual devices, with every line of them counted."""
