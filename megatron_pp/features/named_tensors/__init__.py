"""Stages that give each other dicts of tensors (``adjust_tensor_shapes_fn``)."""
