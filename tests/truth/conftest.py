"""What the truth tests compared is said at the end of the run, also when all is well."""

from collections.abc import Callable

import pytest


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Say a sentence in the summary of the run (works under pytest-xdist too)."""

    def _say(sentence: str) -> None:
        print(sentence)
        record_property("compared", sentence)

    return _say


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    sentences = [
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "compared"
    ]
    if sentences:
        terminalreporter.section("compared with the truth")
        for sentence in sentences:
            terminalreporter.write_line(sentence)
