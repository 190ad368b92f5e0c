"""What a model costs on its machines, measured in its own run (``measure``)."""
