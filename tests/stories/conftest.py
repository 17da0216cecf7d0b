"""The truth tests' way to say what was compared."""

from tests.truth.conftest import say

__all__ = ["say"]
