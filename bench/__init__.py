"""Benchmarks: `make bench` runs them and writes reports/benchmarks.md."""
