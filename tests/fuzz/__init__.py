"""Mutated captures, with what must hold for any of them."""
