"""Measurements of sqlsem beside its peers in the same run: ``python -m benchmarks --help``. Not tests."""
