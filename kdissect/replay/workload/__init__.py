"""Captures and saved files, read to a `Workload`."""
