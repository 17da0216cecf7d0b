"""The coverage page."""

from kdissect.protocol import catalog
from tools.coverage import coverage_markdown, versions_text


def row(page, name):
    (line,) = [each for each in page.splitlines() if f"| {name} |" in each]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_versions_are_written_as_ranges():
    """Consecutive versions are written as one range."""
    assert versions_text([]) == "-"
    assert versions_text([3, 0, 1, 2, 5, 5]) == "0-3, 5"


def test_a_version_counts_with_both_sides():
    """A version counts as decoded only with its request and its response."""
    decoded = [(1, 4, "request"), (1, 4, "response"), (1, 5, "request")]
    seen = {(1, 4, "request"): 1000, (1, 99, "request"): 1}
    page = coverage_markdown(["Somewhere."], decoded, [(1, 4, "request")], seen)
    assert row(page, "Fetch") == ["1", "Fetch", "0-18", "", "4", "-", "4", "1,001"]
    assert row(page, "InitProducerId")[3] == "6"
    assert "93 APIs, 361 versions" in page
    assert ": 1 decoded, 0 encoded, 1 seen in real captures." in page
    assert "- Somewhere." in page
    assert sum(line.startswith("| ") for line in page.splitlines()) == 1 + len(catalog.apis())
