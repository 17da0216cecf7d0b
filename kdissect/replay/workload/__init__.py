"""Captures, table sets and saved files, read to a `Workload`."""
