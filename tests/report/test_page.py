"""The page as a file: whole, escaped, said to those who do not see it."""

import csv
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kdissect.api import Tables, selected
from kdissect.pipeline.selection import Selection
from kdissect.report import Report
from kdissect.report.document import LISTS
from tests.builders.tables import at, connection, exchange, tables

_VOID = frozenset(("meta", "link", "br", "input", "img", "hr"))
_SIZE_MAX = 3_000_000


class _Reader(HTMLParser):
    """Elements with their attributes and text, and whether they close in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _read(path: Path) -> _Reader:
    reader = _Reader()
    reader.feed(path.read_text())
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_needs_nothing_else(page: Path) -> None:
    """No element refers to another file or host."""
    reader = _read(page)
    for _, attributes in reader.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,"
    text = page.read_text()
    assert len(text.encode()) < _SIZE_MAX
    # names of XML vocabularies are the only addresses, and nothing fetches those
    assert set(re.findall(r"https?://([\w.-]+)", text)) == {"www.w3.org"}
    policy = next(m for m in reader.named("meta") if m.get("http-equiv"))["content"] or ""
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.partition("style-src")[0]


@pytest.mark.parametrize("which", ["page", "attacked"])
def test_structure_for_screen_readers(which: str, request: pytest.FixtureRequest) -> None:
    """Landmarks, headings in steps, captions and scopes, names for regions, unique ids."""
    reader = _read(request.getfixturevalue(which))
    for tag in ("header", "nav", "main", "footer", "h1"):
        assert len(reader.named(tag)) == 1, tag
    levels = [int(tag[1]) for tag, _ in reader.elements if re.fullmatch(r"h\d", tag)]
    assert all(later <= before + 1 for before, later in pairwise(levels))
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in reader.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name) in (None, *ids)
    links = [attributes["href"] for attributes in reader.named("a")]
    assert all((link or "").removeprefix("#") in ids for link in links)
    tables_, captions = len(reader.named("table")), len(reader.named("caption"))
    assert tables_ == captions > 10
    assert all(attributes.get("scope") in ("col", "row") for attributes in reader.named("th"))
    assert all("aria-label" in a for a in reader.named("input"))
    figures = [a for a in reader.named("figure") if "data-chart" in a]
    summaries = [a for a in reader.named("details") if a.get("class") == "alt"]
    assert len(figures) == len(summaries) > 8
    assert reader.named("html")[0]["lang"] == "en"


def test_hostile_names_stay_text(attacked: Path) -> None:
    """No element, attribute or script but those of the page; and the text can still be read."""
    reader = _read(attacked)
    assert reader.named("img") == []
    assert len(reader.named("script")) == 3
    handlers = [
        name for _, attributes in reader.elements for name in attributes if name[:2] == "on"
    ]
    assert handlers == []
    said = "".join(reader.text)
    assert "</script><script>alert(1)</script><img src=x onerror=alert(2)>" in said
    assert "{{7*7}}${7*7}" in said
    text = attacked.read_text()
    for character in "\u202e\x07":
        assert character not in text
    assert "\\u202egnp.exe\\x07" in said


def test_hostile_names_are_data_of_charts_only(attacked: Path) -> None:
    """Specifications are ours: no field, expression or title comes from the capture."""
    text = attacked.read_text()
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert found is not None
    charts = json.loads(found[1])
    assert {"traffic", "latency-histogram", "heat-write", "group-0", "lag"} <= set(charts)
    attacks = 0
    for chart in charts.values():
        attacks += "alert(" in json.dumps(chart["data"])
        assert "alert" not in json.dumps(chart["spec"])
    assert attacks > 4


def test_csv_files_are_whole_and_start_no_formula(
    librdkafka: Tables, attacked_report: Report, page: Path
) -> None:
    """A value that begins like a formula has an apostrophe."""
    assert set(attacked_report.csv) == set(LISTS)
    escaped = 0
    for name, path in attacked_report.csv.items():
        assert path.name == f"hostile-{name}.csv"
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        cells = [cell or "" for row in rows for cell in row.values()]
        assert not [cell for cell in cells if cell[:1] in "=+@\t\r" and cell]
        escaped += sum(cell.startswith("'=cmd|") for cell in cells)
    assert escaped > 100
    with (page.parent / "orders-clients.csv").open(newline="") as file:
        clients = list(csv.DictReader(file))
    assert sum(int(row["exchanges"]) for row in clients) == librdkafka.exchanges.num_rows
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", clients[0]["first_time"])


def test_a_cut_list_counts_its_other_rows(tmp_path: Path) -> None:
    """The page shows the first rows, and names the CSV file."""
    rows = [exchange(i, client_id=f"client-{i:03}", connection_id=i) for i in range(1, 131)]
    made = tables(exchanges=rows, connections=[connection(i) for i in range(1, 131)])
    report = made.report(tmp_path / "many.html")
    assert report.document["clients"]["total"] == 130
    said = " ".join("".join(_read(report.html).text).split())
    assert "60 of 130 rows; all in many-clients.csv" in said
    assert len((tmp_path / "many-clients.csv").read_text().splitlines()) == 131


def test_requests_and_responses_alone_are_counted(tmp_path: Path) -> None:
    """Each request without an answer has a row; a response without its request is an answer."""
    alone = {"latency_us": None, "status": "connection_closed"}
    rows = [exchange(i, client_id=f"client-{i}", **alone) for i in range(210)]
    refused = exchange(210, api_name="Produce", status="request_missing", error_codes=[29])
    rows += [exchange(211), refused | dict.fromkeys(("request_time", "request_end_time"))]
    closed = connection(close_reason="fin", closed_by="broker")
    capture = {"capture_id": 7, "path": "x.pcap", "first_time": at(0), "last_time": at(60)}
    made = tables(exchanges=rows, connections=[closed], captures=[capture])
    report = made.report(tmp_path / "alone.html")
    said = " ".join("".join(_read(report.html).text).split())
    assert "60 of 210 rows" in said
    assert "50.0 % of answers" in said


def test_a_notebook_shows_the_paths_alone(report: Report) -> None:
    """The document is longer than a screen."""
    assert repr(report).startswith(f"Report(html={report.html!r}, csv=")


def test_the_document_is_json(document: dict[str, Any]) -> None:
    """All values are plain, without NaN."""
    text = json.dumps(document, allow_nan=False)
    assert document["format_version"] == 1

    def check(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)
        elif isinstance(value, int):
            assert abs(value) <= 1 << 53

    check(json.loads(text))
    assert re.fullmatch(r"[\dT:.-]+Z", document["overview"]["first_time"])


def test_a_report_of_some_exchanges_says_which(tmp_path: Path, librdkafka: Tables) -> None:
    """It finds nothing absent: that may be in the other exchanges."""
    chosen = selected(librdkafka, Selection(clients=("rd-admin*",), time_from_ns=10**18))
    report = chosen.report(tmp_path / "some.html", csv=False)
    assert report.document["selection"] == "clients rd-admin*; from 2001-09-09T01:46:40.000000000Z"
    assert report.document["clear"] == []
    text = " ".join(_read(report.html).text)
    assert "Only exchanges of:" in text
    assert "clients rd-admin*" in text
    assert librdkafka.report(tmp_path / "all.html", csv=False).document["selection"] == ""
