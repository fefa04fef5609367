"""Benchmarks: one file, one question. `python -m benchmarks` runs all of them."""
