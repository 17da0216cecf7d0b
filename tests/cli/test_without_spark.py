"""An installation without PySpark: only `dissect` needs it. And what each verb loads."""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import Done, run

HEAVY = ("numpy", "pyarrow", "numba", "pandas", "duckdb", "pyspark", "jinja2", "altair", "asyncio")
HIDE = """
import sys

asked = set()

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            asked.add("pyspark")
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from kdissect.cli import main
"""
# prints of commands, one after the other: verb, exit code, modules that are loaded or wanted then
EACH = f"""{HIDE}
import contextlib, json, os

os._exit = sys.exit
told = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        try:
            main()
        except SystemExit as ended:
            loaded = (asked | sys.modules.keys()) & {{*{HEAVY}}}
            told.append((words[0], ended.code, sorted(loaded)))
print(json.dumps(told))
"""


@pytest.fixture
def capture() -> str:
    return str(ROOT / "captures" / "librdkafka.pcap")


def python(code: str, *arguments: str) -> Done:
    return run(sys.executable, "-c", code, *arguments)


def test_all_verbs_but_dissect_work(capture: str, tmp_path: Path) -> None:
    """Help loads nothing heavy, a list no SQL engine, and none of them asks for pandas or Spark."""
    commands = (
        ["--help"], ["definitions", "Fetch"], ["show", capture], ["summary", capture],
        ["report", capture, "--out", f"{tmp_path}/x.html"], ["sql", capture, "from topics"],
        ["readiness", capture, "--target", "4.0"], ["diff", capture, capture], ["check", capture],
        ["extract", capture, "--out", f"{tmp_path}/x.pcapng", "--topic", "rd-tx"],
        ["replay", capture, "--dry-run"],
    )  # fmt: skip
    done = python(EACH, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(verb, code) for verb, code, _ in told] == [(words[0], 0) for words in commands]
    loaded = [set(modules) for *_, modules in told]
    assert not loaded[0]
    assert not loaded[2] & {"duckdb", "jinja2", "altair"}
    assert {"numpy", "pyarrow", "duckdb"} <= loaded[-1] <= {*HEAVY} - {"pandas", "pyspark"}


def test_dissect_names_the_package_to_install(capture: str, tmp_path: Path) -> None:
    """Exit 3 and one line, before anything is written."""
    done = python(f"{HIDE}\nmain()", "dissect", capture, "--out", str(tmp_path / "tables"))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("kdissect: PySpark is needed")
    assert "pip install 'pyspark" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
