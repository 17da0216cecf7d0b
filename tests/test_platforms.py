"""Platforms without the modules and calls of Linux, and hosts whose name does not resolve."""

import sys
from pathlib import Path

import pytest

import kdissect
from tests.conftest import CAPTURES
from tests.processes import KDISSECT, Done, run

# Windows has no such modules, and no library without a name
WITHOUT_UNIX = """
import ctypes, mmap, os, sys

class NotThere:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "pwd", "grp", "termios", "readline", "posix_ipc"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotThere())
for name in ("fcntl", "resource", "pwd", "grp", "termios", "readline"):
    sys.modules.pop(name, None)
load = ctypes.CDLL

class Library(load):
    def __init__(self, name, *arguments, **options):
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        super().__init__(name, *arguments, **options)

ctypes.CDLL = Library
for name in ("MAP_ANONYMOUS", "MAP_NORESERVE", "MAP_PRIVATE", "MAP_SHARED", "PROT_READ"):
    if hasattr(mmap, name):
        delattr(mmap, name)
"""
IMPORTS = """
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(sys.argv) - 1)
"""
# what a user meets there
COMMANDS = """
from kdissect.__main__ import main
main()
"""


def elsewhere(program: str, *arguments: str) -> Done:
    """Run a program in a process without Unix's own modules."""
    return run(sys.executable, "-c", WITHOUT_UNIX + program, *arguments)


def test_every_module_can_be_imported_without_unix() -> None:
    """No import needs fcntl, resource or the C library; PySpark's own modules are left out."""
    package = Path(kdissect.__file__).parent
    files = sorted(package.rglob("*.py"))
    names = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in files
        if path.name != "__main__.py" and "pyspark" not in path.read_text()
    ]
    done = elsewhere(IMPORTS, *names)
    assert done.stderr == ""
    assert done.stdout == f"{len(names)}\n"
    assert len(names) > 200


@pytest.mark.parametrize("verb", ["summary", "show"])
def test_a_capture_can_be_read_without_unix(verb: str) -> None:
    """With tables or in windows."""
    done = elsewhere(COMMANDS, verb, str(CAPTURES / "java_2_0_1.pcap"))
    assert done.returncode == 0, done.stderr
    assert "Metadata" in done.stdout


@pytest.mark.heavy
@pytest.mark.spark
def test_dissect_runs_on_a_host_whose_name_does_not_resolve(tmp_path: Path) -> None:
    """Containers have such names; Spark on this machine needs none."""
    if run("unshare", "--uts", "true").returncode:
        pytest.skip("this user cannot give a process another host name")
    dissect = 'hostname no-such-name && "$@"'
    command = (*KDISSECT, "dissect", CAPTURES / "java_2_0_1.pcap", "--out", tmp_path / "out")
    done = run("unshare", "--uts", "sh", "-c", dissect, "sh", *command)
    assert done.returncode == 0, done.stderr
