"""Outputs on the pages are the outputs of the commands."""

from pathlib import Path

import pytest

from tests import console
from tests.conftest import ROOT

ON_SPARK = {"dissect"}
PAGES = {
    page.stem: page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if any(console.commands(page.read_text()))
}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ON_SPARK])
def test_a_page_shows_the_output_of_its_commands(page: str, tmp_path: Path) -> None:
    """Each command of the page, run where the page says; `python -m tests.console` renews them."""
    text = PAGES[page].read_text()
    console.prepare(tmp_path, text)
    for command, output in console.commands(text):
        assert console.run_here(command, tmp_path) == output, command


@pytest.mark.heavy
@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_the_output_of_its_commands_in_a_shell(page: str, tmp_path: Path) -> None:
    """The same, each command a process of its own."""
    text = PAGES[page].read_text()
    console.prepare(tmp_path, text)
    for command, output in console.commands(text):
        assert console.run(command, tmp_path) == output, command
