"""Kernels are compiled again when a module that their own one imports has changed, count no
references to what they borrow, and say the same where nothing is compiled."""

import ast
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

import kdissect
from kdissect import jit, kernel_cache
from tests.processes import run

ROOT = Path(kdissect.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if "kernel" in path.read_text("utf-8"))


def imports_of(path: Path) -> set[Path]:
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.ImportFrom):
            continue
        names = (node.module or "").split(".") if node.module else []
        if node.level:
            place = path.parents[node.level - 1]
        elif names and names[0] == ROOT.name:
            place, names = ROOT, names[1:]
        else:
            continue
        place = place.joinpath(*names)
        places = [place, *(place / alias.name for alias in node.names)]
        found |= {file for item in places if (file := item.with_suffix(".py")).is_file()}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_import_is_in_the_stamp(path: Path) -> None:
    """The cache's stamp has the imports that an independent parser finds."""
    assert kernel_cache.imported_modules(path) == imports_of(path)


def test_modules_of_a_package_are_in_the_stamp() -> None:
    """The stamp has modules that a module imports from its package."""
    assert ROOT / "capture" / "link_layers.py" in kernel_cache.imported_modules(
        ROOT / "capture" / "scan.py"
    )


def test_helpers_are_no_older_than_their_kernels() -> None:
    """Machine code of a helper on the disk would know nothing of the modules that it imports."""

    @jit.inlined
    def of_a_test(number: int) -> int:
        return number

    @jit.kernel
    def user(numbers: np.ndarray) -> int:
        return of_a_test(numbers[0])

    assert user(np.ones(1, np.int64)) == 1
    assert not list(kernel_cache.folder().glob("*of_a_test*"))


def test_kernels_that_borrow_make_no_arrays() -> None:
    """A borrowing kernel counts no references, and cannot allocate an array."""

    @jit.kernel
    def borrows(numbers: np.ndarray) -> int:
        numbers[0] = 2
        return len(numbers[1:])

    @jit.kernel
    def makes(numbers: np.ndarray) -> int:
        return len(np.zeros_like(numbers))

    borrows._cache = numba.core.caching.NullCache()  # what comes from the disk shows no code
    numbers = np.ones(3, np.int64)
    assert borrows(numbers) == 2
    assert numbers[0] == 2
    code = borrows.inspect_llvm(borrows.signatures[0])
    assert "define" in code
    assert "NRT_incref" not in code
    with pytest.raises(numba.core.errors.NumbaError):
        makes(numbers)


def test_a_capture_reads_the_same_without_compilation(captures: Path) -> None:
    """Every kernel as plain Python, whose integers have no width."""
    path = str(captures / "librdkafka.pcap")
    script = "import kdissect, sys; print(*kdissect.read(sys.argv[1]).exchanges.to_arrow()[0])"
    python = (sys.executable, "-W", "ignore")
    plain = run(*python, "-c", script, path, check=True, KDISSECT_NO_JIT="1")
    wanted = kdissect.read(path).exchanges.to_arrow()[0].to_pylist()
    assert list(map(int, plain.stdout.split())) == wanted
    assert wanted
