"""Measurements, side by side with peers in the same run: ``python -m benchmarks --help``. Not tests."""
