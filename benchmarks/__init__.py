"""Benchmarks: each compares its arms in one run, checks correctness first and prints one JSON line."""
