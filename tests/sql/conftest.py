"""A table set of a shipped capture."""

from pathlib import Path

import pytest

import kdissect


@pytest.fixture(scope="session")
def tables(table_set: Path) -> kdissect.Tables:
    return kdissect.open(table_set)
