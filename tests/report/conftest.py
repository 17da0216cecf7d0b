"""What the tests of reports share: table sets of the captures that ship, and a browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kdissect
from kdissect.api import Tables
from kdissect.report import Report
from tests.builders.tables import hostile, tables


@pytest.fixture(scope="session")
def table_set(librdkafka: Tables, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tables on disk, in a folder named `orders`."""
    folder = tmp_path_factory.mktemp("report") / "orders"
    librdkafka.write(folder)
    return folder


@pytest.fixture(scope="session")
def report(table_set: Path) -> Report:
    """Its report, with CSV files beside it."""
    tables_of = kdissect.open(table_set)
    return tables_of.report(table_set.parent / "out" / "orders.html", name="orders")


@pytest.fixture(scope="session")
def page(report: Report) -> Path:
    """The page of that report."""
    return report.html


@pytest.fixture(scope="session")
def document(report: Report) -> dict[str, Any]:
    """The document of that report."""
    return report.document


@pytest.fixture(scope="session")
def attacked_report(librdkafka: Tables, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A report of tables in which every name is hostile, with CSV files beside it."""
    return hostile(librdkafka).report(tmp_path_factory.mktemp("hostile") / "hostile.html")


@pytest.fixture(scope="session")
def attacked(attacked_report: Report) -> Path:
    """The page of that report."""
    return attacked_report.html


@pytest.fixture(scope="session")
def empty_report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a table set without rows."""
    return tables().report(tmp_path_factory.mktemp("empty") / "empty.html", csv=False)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium, driven through the DevTools protocol; skips without one."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    started.set_page_load_timeout(60)
    yield started
    started.quit()
