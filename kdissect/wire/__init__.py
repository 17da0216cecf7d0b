"""Bytes to values and columns, and back."""
