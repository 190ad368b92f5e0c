"""What no training step needs: commands that look at a job before it runs, or at its traces afterwards."""
