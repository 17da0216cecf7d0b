"""Outputs on the pages are the outputs of the commands."""

from collections.abc import Callable
from pathlib import Path

from tests import console
from tests.cases import cases
from tests.conftest import ROOT

ON_SPARK = {"dissect"}
PAGES = {
    page.stem: page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if any(console.commands(page.read_text()))
}


@cases(
    ("page", "run"),
    [(page, console.run_here) for page in PAGES if page not in ON_SPARK],
    heavy=[(page, console.run) for page in PAGES],
)
def test_a_page_shows_the_output_of_its_commands(
    page: str, run: Callable[[str, Path], str], tmp_path: Path
) -> None:
    """Each command of the page, in this process or in a shell; `python -m tests.console` renews
    them."""
    text = PAGES[page].read_text()
    console.prepare(tmp_path, text)
    for command, output in console.commands(text):
        assert run(command, tmp_path) == output, command
