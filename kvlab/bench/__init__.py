"""Benches: `python -m kvlab.bench identity` and `... bytes`. Importing this package imports nothing."""
