"""A race checker for streams: the real engine on CPU tensors, with the books of what a GPU may do in another order."""
