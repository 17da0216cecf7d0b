"""The Python that workers run; `tests/cluster` has the error if it cannot run kdissect."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kdissect.pipeline.spark_session import use_this_python, worker_python

SETTING = "spark.pyspark.python"


@pytest.mark.parametrize(
    ("master", "named", "expected"),
    [
        ("local[2]", "python3", sys.executable),
        ("local[2]", "/opt/python", "/opt/python"),
        ("spark://host:7077", "python3", "python3"),
    ],
)
def test_local_sessions_use_the_python_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, master: str, named: str, expected: str
) -> None:
    """Local sessions use the caller's Python, unless the user or the cluster names one."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    context = SimpleNamespace(master=master, pythonExec=named)
    session: Any = SimpleNamespace(_sc=context)
    use_this_python(session)
    assert context.pythonExec == expected


@pytest.mark.parametrize(
    ("master", "setting", "variable", "expected"),
    [
        ("spark://host:7077", "/set/python", "/env/python", "/set/python"),
        ("spark://host:7077", None, "/env/python", "/env/python"),
        ("spark://host:7077", None, None, sys.executable),
        ("local[2]", "/set/python", None, "/set/python"),
        ("local[2]", None, "/env/python", sys.executable),
    ],
)
def test_python_of_our_own_session(
    monkeypatch: pytest.MonkeyPatch,
    master: str,
    setting: str | None,
    variable: str | None,
    expected: str,
) -> None:
    """Spark's ranks: its setting, then the variable."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    if variable is not None:
        monkeypatch.setenv("PYSPARK_PYTHON", variable)
    conf = {} if setting is None else {SETTING: setting}
    assert worker_python(master, conf) == expected
