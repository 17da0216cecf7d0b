"""Writes ``reports/replay.md``: captures of real clients replayed on empty brokers of two releases.

    python -m tests.broker.make_report [--release VERSION] [NAME ...]

Starts a broker for each, with the settings of the captured one that its answers show. What is run
is kept in ``reports/replay.json``, so that one capture may be run again alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.broker.clients import RECORDED, Recorded
from tests.broker.kafka_broker import BEFORE, LATEST, Broker
from tests.broker.replaying import EVERYTHING, Replayed, is_explained, replay

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "reports" / "replay.json"
PAGE = ROOT / "reports" / "replay.md"
Result = dict[str, Any]


def run(recorded: Recorded, kafka_version: str, folder: Path) -> Result:
    """One capture on one empty broker."""
    began = time.perf_counter()
    with Broker(folder / "broker", kafka_version, **recorded.broker()) as broker:
        address = broker.address_of(recorded.listener)
        options = [*EVERYTHING, *recorded.options()]
        lines = folder / "replay.jsonl"
        done = replay(recorded.path, address, lines, *options, timeout=900, env=recorded.login())
    return {
        "date": time.strftime("%Y-%m-%d"),
        "took_s": round(time.perf_counter() - began),
        "verdicts": dict(done.verdicts),
        "skipped": dict(Counter(row["skipped"] for row in done.rows if row["skipped"])),
        "ended": done.summary["ended"],
        "notes": done.run["notes"],
        "errors": dict(Counter(row["error"] for row in done.rows if row["error"])),
        "differences": _differences(done),
    }


def _differences(done: Replayed) -> list[Result]:
    """Grouped as the summary does; long values are cut."""
    return [
        {
            **{name: each[name] for name in ("api_name", "path", "note", "count", "exchanges")},
            **{side: _short(each[side]) for side in ("captured", "answered")},
        }
        for each in done.summary["differences"]
        if not each["rule"]
    ]


# -- the page -------------------------------------------------------------------------------


def page(results: dict[str, dict[str, Result]]) -> str:
    parts = [HEAD]
    for version in (LATEST, BEFORE):
        rows = [
            _row(recorded, results[recorded.name][version])
            for recorded in RECORDED
            if version in results.get(recorded.name, {})
        ]
        parts += [f"## On {version}\n", _table(COLUMNS, rows)]
    parts += ["## What the differences are\n", WHAT]
    for version in (LATEST, BEFORE):
        parts += [f"### On {version}\n", _table(NOTES, _notes(results, version))]
    return "\n".join(parts).rstrip() + "\n"


HEAD = """# Captures of clients, replayed

Made by `python -m tests.broker.make_report`; do not edit. Each capture is replayed with everything
allowed (`--allow produce,groups,transactions,admin --create-topics --max-gap 2s`) on an empty
broker of its own, with the settings of the captured broker that answers show. *Explained* are
differences beside which the report says what they come from. Captures that are not in `captures/`
are recorded material beside the project.
"""
WHAT = """Each kind of difference that no rule allows, in how many places and captures it
is, and the note beside it.
"""
COLUMNS = ("capture", "clients", "recorded on", "sent", "same", "tolerated", "different", "error",
           "differences", "of them not explained")  # fmt: skip
NOTES = ("API", "path", "captured", "answered", "places", "captures", "note")


def _row(recorded: Recorded, one: Result) -> list[Any]:
    verdicts = one["verdicts"]
    judged = [verdicts.get(name, 0) for name in ("same", "tolerated", "different", "error")]
    unexplained = sum(not is_explained(each["note"]) for each in one["differences"])
    return [
        recorded.name, recorded.clients, recorded.kafka_version, sum(judged), *judged,
        len(one["differences"]), unexplained,
    ]  # fmt: skip


def _notes(results: dict[str, dict[str, Result]], version: str) -> list[list[Any]]:
    """Differences of all captures together, by API, path and note."""
    found: dict[tuple[str, str, str], list[tuple[str, Result]]] = defaultdict(list)
    for recorded in RECORDED:
        one = results.get(recorded.name, {}).get(version)
        for each in one["differences"] if one else ():
            note = each["note"] or ""
            if "may follow from" in note:  # of one capture: which exchange does not matter here
                note = "may follow from a request before, which the target did not take as then"
            found[each["api_name"], each["path"], note].append((recorded.name, each))
    return [
        [
            api_name, f"`{path}`", _value(group, "captured"), _value(group, "answered"),
            sum(each["count"] for _, each in group), len({name for name, _ in group}),
            note or "**none**",
        ]
        for (api_name, path, note), group in sorted(found.items())
    ]  # fmt: skip


def _value(group: list[tuple[str, Result]], side: str) -> str:
    values = {each[side] for _, each in group}
    text = values.pop() if len(values) == 1 else "various"
    return f"`{text}`" if text else ""


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _table(head: tuple[str, ...], rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n" if rows else "None.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="captures; all, where left out")
    parser.add_argument("--release", choices=(LATEST, BEFORE), action="append")
    given = parser.parse_args()
    unknown = set(given.names) - {each.name for each in RECORDED}
    if unknown:
        parser.error(f"no capture {min(unknown)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for recorded in RECORDED:
        if given.names and recorded.name not in given.names:
            continue
        if not recorded.path.exists():
            sys.stderr.write(f"{recorded.name}: not here\n")
            continue
        for version in given.release or (LATEST, BEFORE):
            with tempfile.TemporaryDirectory() as folder:
                one = run(recorded, version, Path(folder))
            results.setdefault(recorded.name, {})[version] = one
            sys.stderr.write(f"{recorded.name} on {version}: {_row(recorded, one)[3:]}\n")
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
