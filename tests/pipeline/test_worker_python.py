"""Which Python the workers of a caller's session run."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kdissect.pipeline.spark import use_this_python


@pytest.mark.parametrize(
    ("master", "named", "expected"),
    [
        ("local[2]", "python3", sys.executable),
        ("local[2]", "/opt/python", "/opt/python"),
        ("spark://host:7077", "python3", "python3"),
    ],
)
def test_python(monkeypatch: pytest.MonkeyPatch, master: str, named: str, expected: str) -> None:
    """A local session's default is the caller's; what was named, and clusters, stay."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    context = SimpleNamespace(master=master, pythonExec=named)
    session: Any = SimpleNamespace(_sc=context)
    use_this_python(session)
    assert context.pythonExec == expected
