"""What a setting or a schedule adds to the engine, each in a folder of its own; the core loads it by name."""
