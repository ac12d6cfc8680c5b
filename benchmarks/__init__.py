"""What the numbers in the docs were measured with: `python -m benchmarks.NAME`."""
