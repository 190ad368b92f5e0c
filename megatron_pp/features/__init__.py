"""Features that a setting or a schedule adds to the engine. Each has a folder, which the core loads by name."""
