"""What torch and CUDA's runtime library do on a virtual device: streams, tensors, operations and graphs."""
