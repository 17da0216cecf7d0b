"""Turns a workload into steps: which requests to send, when, and after which other steps."""
