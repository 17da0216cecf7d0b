"""What a command loads before it does anything."""

import subprocess
import sys

from tests.conftest import ROOT

HELP = """
import os, sys
from kdissect.startup import light_help
from kdissect.cli import app

if sys.argv.pop() == "light":
    light_help()
app(["report", "--help"], standalone_mode=False)
print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def _help(way: str) -> tuple[str, set[str]]:
    command = [sys.executable, "-c", HELP, way]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    return run.stdout, set(run.stderr.split())


def test_help_needs_no_parser_of_markdown() -> None:
    """The help is the same with and without the parts of Rich that it does not use."""
    light, loaded = _help("light")
    usual, loaded_usual = _help("usual")
    assert light == usual
    assert "--out" in light
    assert {"markdown_it", "pygments"} <= loaded_usual
    assert not {"markdown_it", "pygments"} & loaded
