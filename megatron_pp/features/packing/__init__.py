"""Steps of packed sequences: microbatches of different lengths, token counts and context sizes."""
