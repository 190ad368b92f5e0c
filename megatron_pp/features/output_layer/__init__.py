"""An output layer that is split over all ranks (``vocab_1f1b``)."""
