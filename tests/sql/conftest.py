"""A table set of a shipped capture."""

from pathlib import Path

import pytest

import kdissect


@pytest.fixture(scope="session")
def table_set(tmp_path_factory: pytest.TempPathFactory, captures: Path) -> Path:
    """On disk, in a folder whose name would be a pattern in SQL."""
    out = tmp_path_factory.mktemp("sql") / "tables [1] it's*?"
    kdissect.read(captures / "librdkafka.pcap").write(out)
    return out


@pytest.fixture(scope="session")
def tables(table_set: Path) -> kdissect.Tables:
    return kdissect.open(table_set)
