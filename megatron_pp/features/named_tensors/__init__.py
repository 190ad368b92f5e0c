"""Stages that pass dicts of tensors to each other (``adjust_tensor_shapes_fn``)."""
