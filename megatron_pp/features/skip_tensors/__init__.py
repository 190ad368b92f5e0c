"""Named tensors that stages send to later ones (``skip_tensors``)."""
