"""Records of the values that a rank computes in its training steps, by names in the whole model."""
