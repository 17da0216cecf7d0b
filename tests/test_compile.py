"""What `kdissect.compile` compiles suffices for the captures of the project."""

import sys
from pathlib import Path

import pytest

from tests.conftest import CAPTURES, ROOT
from tests.processes import run

READS = """
import sys, kdissect
for path in sys.argv[2:]:
    tables = kdissect.read(path, keylog=sys.argv[1])
    for name in tables.names:
        tables[name].to_arrow()
"""


@pytest.mark.heavy
def test_nothing_is_left_to_compile(tmp_path: Path) -> None:
    """A copy of the package whose kernels were compiled reads and shows without compiling."""
    import shutil

    shutil.copytree(
        ROOT / "kdissect",
        tmp_path / "kdissect",
        ignore=shutil.ignore_patterns("__pycache__", "machine_code"),
    )
    kernels = tmp_path / "later"
    environment = {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(kernels)}
    captures = sorted(map(str, CAPTURES.glob("*.pcap*")))
    python = [sys.executable, "-W", "ignore"]
    commands = [
        [*python, "-m", "kdissect.compile"],
        [*python, "-c", READS, str(CAPTURES / "tls13.keylog"), *captures],
        [*python, "-m", "kdissect", "show", captures[0]],
    ]
    for command in commands:
        done = run(*command, cwd=tmp_path, timeout_s=None, **environment)
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "kdissect" / "machine_code").glob("*.code"))) > 50
    assert not list(kernels.glob("*.code"))
