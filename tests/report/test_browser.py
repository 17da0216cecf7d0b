"""Reports in headless Chromium send no request and log no error."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kdissect
from kdissect.api import Tables
from kdissect.report import Report
from tests.builders.tables import HOSTILE, hostile
from tests.cases import cases
from tests.material import CAPTURES as SHARED
from tests.material import needed

READY_MS_MAX = 1000
DESK, PHONE = (1280, 900), (390, 800)


def _set(browser: Any, size: tuple[int, int], scheme: str) -> None:
    width, height = size
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )


def _load(browser: Any, page: Path, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
    """Load the page afresh; charts are drawn when they are scrolled to."""
    _set(browser, size, scheme)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())


def _open(browser: Any, page: Path, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
    """Load the page afresh and scroll through it until every chart is drawn."""
    _load(browser, page, size, scheme)
    wanted = browser.execute_script("return document.querySelectorAll('[data-chart]').length")
    assert wanted > 8
    script = (
        "const f = document.querySelector('[data-chart]:not([data-drawn])');"
        "if (f) f.scrollIntoView({block: 'center'}); return f === null"
    )
    _until(lambda: browser.execute_script(script))


def _open_at(browser: Any, page: Path, *charts: str) -> None:
    """Load the page afresh and scroll to these charts, until each is drawn."""
    _load(browser, page)
    for chart in charts:
        figure = browser.find_element("css selector", f"[data-chart={chart}]")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
        _until(lambda figure=figure: figure.get_attribute("data-drawn") is not None)


def _until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.05)


def _asked(browser: Any) -> list[str]:
    """The addresses that the page requested, except data URLs."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in asked if not url.startswith(("data:", "about:", "chrome"))]


@cases(
    ("which", "size", "scheme"),
    [("attacked", PHONE, "dark")],
    heavy=[("page", DESK, "light"), ("page", PHONE, "dark"), ("attacked", DESK, "light")],
)
def test_quiet_and_whole(
    browser: Any, which: str, size: tuple[int, int], scheme: str, request: pytest.FixtureRequest
) -> None:
    """All charts drawn; no console line, no request, no sideways scrolling, no script run."""
    page = request.getfixturevalue(which)
    _open(browser, page, size, scheme)
    assert browser.get_log("browser") == []
    assert _asked(browser) == [page.as_uri()]
    state = browser.execute_script(
        "const r = document.documentElement; return {over: r.scrollWidth - r.clientWidth,"
        "images: document.images.length, scripts: document.scripts.length,"
        "svg: document.querySelectorAll('.draw svg').length,"
        "charts: document.querySelectorAll('[data-chart]').length,"
        "background: getComputedStyle(document.body).backgroundColor}"
    )
    assert state["over"] <= 0
    assert (state["images"], state["scripts"]) == (0, 3)
    assert state["svg"] == state["charts"]
    dark = sum(int(part) for part in state["background"][4:-1].split(",")) < 3 * 128
    assert dark == (scheme == "dark")


@pytest.fixture(scope="module")
def long_names(librdkafka: Tables, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names of 250 characters without a space, with markup and characters that reorder text."""
    tables_of = hostile(librdkafka, "W" * 60 + "x" * 180 + HOSTILE)
    return tables_of.report(tmp_path_factory.mktemp("long") / "x.html", csv=False).html


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster of three brokers: all sections have rows."""
    capture = needed(SHARED / "cluster" / "cluster.pcap")
    out = tmp_path_factory.mktemp("large") / "x.html"
    return kdissect.read(capture).report(out, csv=False).html


# the page and the tables that are wider than their room
_SIDEWAYS = """
const wide = (e) => e.scrollWidth > e.clientWidth;
return [...(wide(document.documentElement) ? ["page"] : []),
  ...[...document.querySelectorAll(".scroll")].filter(wide)
  .map((e) => e.querySelector("table").id || e.textContent.slice(0, 40))]
"""


PAGES, SIZES = ("long_names", "large", "page"), ((420, "dark"), (1000, "dark"), (1400, "light"))
QUICK = (("long_names", *SIZES[0]), ("page", *SIZES[2]))


@cases(
    ("which", "width", "scheme"),
    QUICK,
    heavy=sorted({(page, *size) for page in PAGES for size in SIZES} - {*QUICK}),
)
def test_nothing_scrolls_sideways(
    browser: Any, which: str, width: int, scheme: str, request: pytest.FixtureRequest
) -> None:
    """Neither the page nor a table, with the details of rows open too; each cell is in one."""
    page = request.getfixturevalue(which)
    _open(browser, page, (width, 900), scheme)
    assert browser.execute_script(_SIDEWAYS) == []
    opened = browser.execute_script(
        "const buttons = [...document.querySelectorAll('tbody tr:first-child .more')]"
        ".filter((b) => b.offsetParent !== null);"
        "for (const b of buttons) b.click();"
        "return buttons.length"
    )
    assert opened >= (1 if width == 1400 else 10)
    assert browser.execute_script(_SIDEWAYS) == []
    hidden = browser.execute_script(
        "return [...document.querySelectorAll('tr.detail')].filter((detail) => {"
        "const cells = [...detail.previousElementSibling.cells]"
        ".filter((c) => getComputedStyle(c).display === 'none')"
        ".filter((c) => !['–', ''].includes(c.textContent));"
        "return cells.length !== detail.querySelectorAll('dd').length}).length"
    )
    assert hidden == 0


@cases(
    ("which", "width", "media"),
    [("page", 1400, ""), ("long_names", 718, "print")],
    heavy=[
        *(("long_names", 420, ""), ("long_names", 1400, "")),
        *(("page", 420, ""), ("page", 718, "print")),
    ],
)
def test_paper_and_pages_without_scripts_have_all_columns(
    browser: Any, which: str, width: int, media: str, request: pytest.FixtureRequest
) -> None:
    """No cell is hidden, and nothing scrolls sideways."""
    _set(browser, (width, 900), "light")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not media})
    try:
        browser.get("about:blank")
        browser.get(request.getfixturevalue(which).as_uri())
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        assert browser.execute_script(_SIDEWAYS) == []
        hidden = (
            "return [...document.querySelectorAll('tbody tr > *')]"
            ".filter((cell) => getComputedStyle(cell).display === 'none').length"
        )
        assert browser.execute_script(hidden) == 0
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_each_heading_has_its_meaning(browser: Any, page: Path) -> None:
    """A sentence; the same for the same column wherever its tables mean the same."""
    _load(browser, page)
    titles = browser.execute_script(
        "return [...document.querySelectorAll('thead button')].map((b) => b.title)"
    )
    assert len(titles) > 100
    assert all(title.endswith(".") and len(title) > 10 for title in titles)


def test_a_capture_without_kafka_opens_too(browser: Any, empty_report: Report) -> None:
    """Without an incident, it says so."""
    _load(browser, empty_report.html)
    assert browser.find_element("css selector", "#overview .lead").text == "Nothing stands out."
    assert browser.get_log("browser") == []


@pytest.mark.heavy
def test_interactive_within_a_second(browser: Any, page: Path) -> None:
    """The best of three loads is ready in time."""
    _set(browser, DESK, "light")
    found = []
    for _ in range(3):
        browser.get("about:blank")
        browser.get(page.as_uri())
        found.append(float(browser.execute_script("return document.documentElement.dataset.ready")))
    print(f"ready after {', '.join(f'{ms:.0f}' for ms in found)} ms")
    assert min(found) < READY_MS_MAX


def test_the_theme_switch_stays_and_redraws(browser: Any, page: Path) -> None:
    """The switch changes the page and its charts, and back."""
    _open_at(browser, page, "latency-histogram")
    button = browser.find_element("id", "theme")
    axis = "return getComputedStyle(document.querySelector('.role-axis-label text')).fill"
    before = browser.execute_script(axis)
    assert button.text == "Dark theme"
    browser.execute_script("arguments[0].click()", button)
    assert button.text == "Light theme"
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    _until(lambda: browser.execute_script(axis) != before)
    browser.execute_script("arguments[0].click()", button)
    _until(lambda: browser.execute_script(axis) == before)
    browser.execute_script("localStorage.clear()")  # all pages of the browser share it
    assert browser.get_log("browser") == []


def test_tables_sort_and_narrow_by_keyboard(browser: Any, page: Path) -> None:
    """Enter and space sort by a column; a text filters rows."""
    _load(browser, page)
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    heading = browser.find_element("css selector", "#t-latency-apis thead th:nth-child(2) button")
    values = (
        "return [...document.querySelectorAll('#t-latency-apis tbody tr')].filter(r => !r.hidden)"
        ".map(r => Number(r.cells[1].dataset.v))"
    )
    heading.send_keys(keys.ENTER)
    assert browser.execute_script(values) == sorted(browser.execute_script(values), reverse=True)
    heading.send_keys(keys.SPACE)
    assert browser.execute_script(values) == sorted(browser.execute_script(values))
    sorted_by = heading.find_element("xpath", "..").get_attribute("aria-sort")
    assert sorted_by == "ascending"
    box = browser.find_element("css selector", "input[data-table='t-latency-apis']")
    box.send_keys("produce")
    names = browser.execute_script(
        "return [...document.querySelectorAll('#t-latency-apis tbody tr')].filter(r => !r.hidden)"
        ".map(r => r.cells[0].textContent)"
    )
    assert names
    assert all("produce" in name.lower() for name in names)


def test_focus_is_seen_and_the_first_stop_skips_the_navigation(browser: Any, page: Path) -> None:
    """Tab reaches the skip link, with an outline."""
    _load(browser, page)
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    browser.execute_script("scrollTo(0, 0); document.activeElement.blur()")
    browser.find_element("tag name", "body").send_keys(keys.TAB)
    focused = browser.switch_to.active_element
    assert focused.get_attribute("class") == "skip"
    assert focused.rect["x"] >= 0
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert browser.execute_script(outline) == "solid"


def test_a_charts_data_is_a_table(browser: Any, page: Path) -> None:
    """Below the chart its data are a table with a caption."""
    _open_at(browser, page, "latency-histogram")
    rows = browser.execute_script(
        "const d = document.querySelector('[data-chart=latency-histogram] details'); d.open = true;"
        "return new Promise(r => setTimeout(() => r("
        "[d.querySelectorAll('tbody tr').length, d.querySelector('caption').textContent,"
        "[...d.querySelectorAll('th')].map((h) => h.textContent)]), 100))"
    )
    charts = json.loads(
        browser.execute_script("return document.getElementById('charts').textContent")
    )
    assert rows[0] == len(charts["latency-histogram"]["data"]["count"])
    assert "Service time" in rows[1]
    assert rows[2] == ["API", "kind", "from", "below", "exchanges"]


def test_one_api_can_be_chosen(browser: Any, page: Path) -> None:
    """The histogram of one API has fewer bars."""
    _open_at(browser, page, "latency-histogram")
    bars = (
        "return document.querySelectorAll('[data-chart=latency-histogram] .mark-rect path').length"
    )
    before = browser.execute_script(bars)
    browser.execute_script(
        "const s = document.querySelector('[data-chart=latency-histogram] select');"
        "s.value = 'Metadata'; s.dispatchEvent(new Event('change'))"
    )
    _until(lambda: 0 < browser.execute_script(bars) < before)


def test_a_chart_tells_values_under_the_pointer(browser: Any, attacked: Path) -> None:
    """As text, also where a name is an element: nothing in the tip but divs and spans."""
    _open_at(browser, attacked, "traffic", "heat-write")
    chains = pytest.importorskip("selenium.webdriver.common.action_chains").ActionChains
    tip = browser.find_element("id", "tip")
    for chart, selector in (("traffic", "svg"), ("heat-write", ".mark-rect path")):
        figure = browser.find_element("css selector", f"[data-chart={chart}]")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
        target = figure.find_element("css selector", selector)
        chains(browser).move_to_element(target).move_by_offset(3, 3).perform()
        _until(tip.is_displayed)
        tags = browser.execute_script(
            "return [...new Set([...arguments[0].querySelectorAll('*')].map(e => e.tagName))]", tip
        )
        assert sorted(tags) == ["DIV", "SPAN"]
        words = {
            "traffic": ["Metadata", "from", "02:15:"],
            "heat-write": ["<img src=x onerror=alert(2)>", "bytes"],
        }
        assert all(word in tip.text for word in words[chart]), tip.text
        chains(browser).move_to_element(browser.find_element("tag name", "h1")).perform()


def test_a_packets_filter_is_copied(browser: Any, page: Path) -> None:
    """A click copies Wireshark's filter and says so."""
    _load(browser, page)
    browser.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    button = browser.find_element("css selector", "#t-error-codes button.packet")
    browser.execute_script("arguments[0].click()", button)
    text = button.get_attribute("textContent")
    assert text.startswith("frame.number == ")
    said = browser.find_element("id", "said")
    _until(lambda: said.get_attribute("textContent") == f"Copied: {text}")


def test_text_has_contrast_in_both_themes(browser: Any, page: Path) -> None:
    """All text has a contrast of 4.5 to 1 with its background (WCAG 2 AA)."""
    for scheme in ("light", "dark"):
        _load(browser, page, scheme=scheme)
        worst = browser.execute_script(_CONTRAST)
        print(scheme, worst)
        assert worst[0] >= 4.5, worst


_CONTRAST = """
const lum = (c) => { const [r, g, b] = c.map((v) => { v /= 255;
  return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const parse = (s) => s.match(/[\\d.]+/g).map(Number);
const behind = (e) => { for (; e; e = e.parentElement) {
  const c = parse(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
let worst = [99, ""];
for (const e of document.querySelectorAll("body *")) {
  if (e.closest("script, style, svg, #tip, #said, .quiet, [hidden]")) continue;
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
  const a = lum(parse(getComputedStyle(e).color).slice(0, 3)), b = lum(behind(e));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < worst[0]) worst = [ratio, `${e.tagName}.${e.className}: ${e.textContent}`];
}
return worst;
"""
