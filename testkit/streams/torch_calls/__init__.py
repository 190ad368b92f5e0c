"""torch and CUDA's runtime library on a virtual device: streams, tensors, operations and graphs."""
