"""What the pages show is what the commands print."""

from pathlib import Path

import pytest

from tests import console
from tests.conftest import ROOT

# questions.md is run by test_questions.py where the logs are that it is compared with
LOGS = ROOT.parent / "shared" / "captures"
PAGES = ["diff", "readiness", "report", "sql", *(() if LOGS.exists() else ("questions",))]


@pytest.mark.parametrize("page", PAGES)
def test_a_page(page: str, tmp_path: Path) -> None:
    """Each command of the page, run where the page says; `python -m tests.console` renews them."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    console.prepare(tmp_path, text)
    shown = list(console.commands(text))
    assert shown
    for command, output in shown:
        assert console.run(command, tmp_path) == output, command
