"""Tests of kdissect.incidents."""
