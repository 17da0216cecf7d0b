"""An installation without PySpark: only `dissect` needs it."""

import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import Done, run

HIDE = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
"""
OTHER_VERBS = (
    HIDE
    + """
from typer.testing import CliRunner
from kdissect.cli import app

capture, folder = sys.argv[1:]
for arguments in (
    ["--help"], ["definitions", "Fetch"], ["show", capture], ["summary", capture],
    ["report", capture, "--out", f"{folder}/x.html"], ["sql", capture, "from topics"],
    ["readiness", capture, "--target", "4.3"], ["diff", capture, capture],
    ["extract", capture, "--out", f"{folder}/x.pcapng", "--topic", "rd-tx"],
    ["replay", capture, "--dry-run"],
):
    done = CliRunner().invoke(app, arguments)
    print(arguments[0], done.exit_code, repr(done.exception) if done.exit_code > 1 else "")
"""
)
DISSECT = (
    HIDE
    + """
from kdissect.__main__ import main

main()
"""
)


@pytest.fixture
def capture() -> str:
    return str(ROOT / "captures" / "librdkafka.pcap")


def python(code: str, *arguments: str) -> Done:
    return run(sys.executable, "-c", code, *arguments)


def test_all_verbs_but_dissect_work(capture: str, tmp_path: Path) -> None:
    """Ten calls of verbs succeed while PySpark cannot be imported."""
    done = python(OTHER_VERBS, capture, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert [line for line in lines if not line.endswith((" 0 ", "readiness 1 "))] == []


def test_dissect_names_the_package_to_install(capture: str, tmp_path: Path) -> None:
    """Exit 3 and one line, before anything is written."""
    done = python(DISSECT, "dissect", capture, "--out", str(tmp_path / "tables"))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("kdissect: PySpark is needed")
    assert "pip install 'pyspark" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help_loads_nothing_heavy() -> None:
    """It is there at once: no arrays, no kernels, no SQL engine."""
    code = (
        "import sys, kdissect.cli; from typer.testing import CliRunner\n"
        "CliRunner().invoke(kdissect.cli.app, ['--help'])\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = set(python(code).stdout.split())
    assert "typer" in loaded
    heavy = {"numpy", "pyarrow", "numba", "pandas", "duckdb", "pyspark", "jinja2", "asyncio"}
    assert not loaded & heavy


def test_verbs_over_captures_load_no_pandas(capture: str) -> None:
    """Summary, readiness, sql and check convert no table to pandas."""
    code = (
        "import contextlib, os, sys; from kdissect.cli import main\n"
        "os._exit = sys.exit\n"
        f"for words in (['summary', {capture!r}], ['readiness', {capture!r}, '--target', '4.0'],\n"
        f"    ['sql', {capture!r}, 'FROM exchanges LIMIT 1'], ['check', {capture!r}]):\n"
        "    sys.argv[1:] = words\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "pyarrow" in loaded
    assert not loaded & {"pandas", "pyspark"}
