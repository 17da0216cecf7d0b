"""Compares two dissected captures, for example before and after an upgrade."""
