"""What several folders of tests share."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CAPTURES = ROOT / "captures"


@pytest.fixture(scope="session")
def captures() -> Path:
    """The folder of captures that ships with the project."""
    return CAPTURES


@pytest.fixture
def kdissect() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line as a user does: a process of its own."""

    def run(*args: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kdissect", *args]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT
        )

    return run


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One session for all tests that need Spark: two cores, failed tasks are tried again."""
    from kdissect.pipeline.spark import session

    started = session("local[2]", {}, tmp_path_factory.mktemp("spark") / "spark.log")
    yield started
    started.stop()
