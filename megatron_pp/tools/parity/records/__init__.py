"""What a rank computes and leaves behind in its training steps, written down by names in the whole model."""
