"""Files and modules that documents, docstrings and comments name are there."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

FOLDERS = (
    *("kdissect", "pyspark_kdissect", "tests", "lab", "bench", "tools"),
    *("docs", "reports", "examples"),
)
# Of no file in particular.
PLACEHOLDERS = {"docs/PAGE.md", "a/b/c.py", "b/c.py", "c.py"}
FILE = re.compile(r"(?<![\w./*-])(?:\.\./)?((?:[\w-]+/)*[\w-]+\.(?:py|md))\b")
MODULE = re.compile(r"(?<![\w.])(?:kdissect|tests|lab|bench|tools)(?:\.[a-z_]+)+")


def sources() -> list[Path]:
    """What people read, with the programs."""
    found = [*ROOT.glob("*.md"), *(ROOT / "captures").glob("*.md")]
    for folder in FOLDERS:
        found += [path for kind in ("py", "md") for path in (ROOT / folder).rglob(f"*.{kind}")]
    return sorted(found)


def known_endings() -> set[str]:
    """Every file by each end of its path: `a/b/c.py`, `b/c.py`, `c.py`."""
    parts = [path.relative_to(ROOT).parts for path in sources()]
    return PLACEHOLDERS | {"/".join(each[at:]) for each in parts for at in range(len(each))}


def prose(path: Path) -> Iterator[str]:
    """A document; of a program its comments and docstrings."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        yield text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def is_module(name: str) -> bool:
    """A module or a folder of them, or a name in one."""
    path = ROOT.joinpath(*name.split("."))
    return any(each.is_dir() or each.with_suffix(".py").is_file() for each in (path, path.parent))


def test_named_files_and_modules_exist() -> None:
    """Every file and module in prose exists."""
    known = known_endings()
    missing = set()

    def unknown(text: str) -> set[str]:
        names = {name for name in FILE.findall(text) if name not in known}
        return names | {name for name in MODULE.findall(text) if not is_module(name)}

    for path in sources():
        if unknown(path.read_text("utf-8")):  # else its prose has none either
            for text in prose(path):
                missing |= {f"{path.relative_to(ROOT)}: {name}" for name in unknown(text)}
    assert not missing
