"""Captured requests in the terms of the target, and the IDs its responses give."""
