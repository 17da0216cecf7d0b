"""Mutated captures, and the properties of all of them."""
