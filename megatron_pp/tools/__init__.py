"""Commands that check a job before it runs, or read its traces afterwards. No training step needs them."""
