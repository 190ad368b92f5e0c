"""A forward and a backward that run as one (``overlapped_forward_backward``)."""
