"""Shell completion: Typer's script works in bash, for verbs and values of options."""

import os
import sys
from pathlib import Path

import pytest

from tests.processes import run

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("kdissect de", ["definitions"]), ("kdissect dissect --payload h", ["hash"])],
)
def test_bash_completes(typed: str, offered: list[str]) -> None:
    """The script that bash reads asks the program."""
    words = typed.split()
    asked = (
        'eval "$(_KDISSECT_COMPLETE=source_bash kdissect)"; '
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _kdissect_completion kdissect; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = run("bash", "--norc", "-c", asked, check=True, PATH=PATH)
    assert done.stdout.split() == offered
