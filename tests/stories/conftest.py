"""A fixture by which truth tests print their comparisons."""

from tests.truth.conftest import say

__all__ = ["say"]
