"""Kernels where the package cannot be written, and where several processes compile at once."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import CAPTURES, ROOT
from tests.processes import Done, run
from tests.truth.rows import set_differences

# Few and small kernels: what is tested is where their machine code is kept.
SMALL = """
import os
import numpy as np
from kdissect.capture import mapped_files
import kdissect
here = mapped_files.Sources([kdissect.__file__])
rows = np.array([(3, 40, 0)], [("pos", "<i8"), ("length", "<i8"), ("source", "<i4")])
is_right = here.gather(rows).tobytes() == open(kdissect.__file__, "rb").read()[3:43]
hits = sum(mapped_files._locate.stats.cache_hits.values())
# in one write, since processes share the pipe
os.write(1, f"{is_right}\\n{kdissect.__file__}\\n{hits}\\n".encode())
"""

needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0,
    reason="a read-only file system is mounted: needs root and unshare",
)


def read_only(folder: Path, script: str) -> list[str]:
    """A command that runs a shell script where `folder` cannot be written, whoever runs it."""
    mounts = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder} || exit 99\n"
    return ["unshare", "-m", "sh", "-c", mounts + script]


def run_from_root(command: list[str], **variables: str) -> Done:
    variables["PYTHON"] = sys.executable
    settings = [f"{name}={value}" for name, value in variables.items()]
    done = run("env", "-u", "NUMBA_CACHE_DIR", *settings, *command, cwd="/", timeout_s=900)
    if done.returncode == 99:
        pytest.skip("no file system can be mounted here")
    return done


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a copy of the package without machine code, and an empty home."""
    root = tmp_path / "install"
    ignored = shutil.ignore_patterns("__pycache__", "machine_code")
    shutil.copytree(ROOT / "kdissect", root / "kdissect", ignore=ignored)
    (root / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    return root


@needs_mounts
def test_a_package_and_a_home_that_cannot_be_written(installed: Path, tmp_path: Path) -> None:
    """Two processes compile at once; a third one loads their kernels from the temporary folder."""
    (installed / "small.py").write_text(SMALL)
    script = f"cd {installed}\n" + "$PYTHON small.py & $PYTHON small.py; wait; $PYTHON small.py"
    done = run_from_root(
        read_only(installed, script),
        HOME=str(installed / "home"),
        XDG_CACHE_HOME=str(installed / "home" / "cache"),
        PYTHONPATH=str(installed),
        TMPDIR=str(tmp_path / "tmp"),
    )
    assert done.returncode == 0, done.stderr
    told = "kdissect compiles its kernels for this CPU, once"
    assert [line.startswith(told) for line in done.stderr.splitlines()] == [True, True]
    lines = done.stdout.splitlines()
    assert lines.count("True") == 3
    assert lines.count(str(installed / "kdissect" / "__init__.py")) == 3
    assert lines[-1] == "1", "the third one compiled again"
    assert not list((installed / "home").iterdir())
    (kept,) = (tmp_path / "tmp").iterdir()
    assert kept.stat().st_mode & 0o077 == 0


def test_machine_code_is_found_by_content(installed: Path, tmp_path: Path) -> None:
    """A copy with other times at another path compiles nothing; a changed source compiles again."""

    def loaded(root: Path) -> int:
        """How many kernels a process loads from the disk; the others are compiled."""
        (root / "small.py").write_text(SMALL)
        variables = {"PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
        done = run_from_root([sys.executable, str(root / "small.py")], **variables)
        assert done.returncode == 0, done.stderr
        _, place, count = done.stdout.splitlines()
        assert place == str(root / "kdissect" / "__init__.py")
        return int(count)

    assert loaded(installed) == 0
    again = shutil.copytree(installed, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    assert loaded(again) == 1
    with open(again / "kdissect" / "jit.py", "a") as source:
        source.write("CHANGED = 1\n")
    assert loaded(again) == 0


@needs_mounts
@pytest.mark.spark
@pytest.mark.heavy
def test_a_read_only_install_with_a_cold_cache(installed: Path, tmp_path: Path) -> None:
    """Two workers that start at once compile all kernels, and the rows are right."""
    import kdissect

    capture = CAPTURES / "java_2_0_1.pcap"
    command = f"$PYTHON -m kdissect dissect {capture} --out {tmp_path}/out --split-bytes 60000"
    done = run_from_root(
        read_only(installed, f"cd {installed}\n{command} --master 'local[2]' --quiet"),
        HOME=str(installed / "home"),
        XDG_CACHE_HOME=str(installed / "home"),
        PYTHONPATH=str(installed),
        TMPDIR=str(tmp_path / "tmp"),
    )
    assert done.returncode == 0, done.stderr
    assert set_differences(kdissect.read(capture), kdissect.open(tmp_path / "out")) == []
