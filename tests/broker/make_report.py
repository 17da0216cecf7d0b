"""Writes ``reports/replay.md``: captures of real clients replayed on empty brokers of two releases.

    python -m tests.broker.make_report [--release VERSION] [--pace PACE] [--runs N] [NAME ...]

Starts a broker for each run, with the settings of the captured one that its answers show. Results
are kept in ``reports/replay.json``: new runs of a capture replace those of their release and pace.
"""

from __future__ import annotations

import argparse
import json
import re
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
PACES = ("recorded", "max")
_RECORDS = re.compile(r"(\d+) records?\b")
Result = dict[str, Any]
Results = dict[str, dict[str, dict[str, list[Result]]]]  # capture, release, pace -> runs


def run(recorded: Recorded, kafka_version: str, pace: str, folder: Path) -> Result:
    """One capture on one empty broker."""
    began = time.perf_counter()
    with Broker(folder / "broker", kafka_version, **recorded.broker()) as broker:
        address = broker.address_of(recorded.listener)
        options = [*EVERYTHING, *recorded.options(), "--pace", pace]
        lines = folder / "replay.jsonl"
        done = replay(recorded.path, address, lines, *options, timeout=900, env=recorded.login())
    return {
        "date": time.strftime("%Y-%m-%d"),
        "took_s": round(time.perf_counter() - began),
        "verdicts": dict(done.verdicts),
        "skipped": dict(Counter(row["skipped"] for row in done.rows if row["skipped"])),
        "ended": done.summary["ended"],
        "findings": [_finding(each) for each in done.summary["findings"]],
        "records_missing": sum(map(_missing, done.summary["findings"])),
        "notes": done.run["notes"],
        "errors": dict(Counter(row["error"] for row in done.rows if row["error"])),
        "differences": _differences(done),
    }


def _finding(each: Result) -> str:
    return f"{each['kind']} of {each['subject']}: {each['expected']} -> {each['found']}"


def _missing(finding: Result) -> int:
    """Records that the end state of a log lacks."""
    counts = [_RECORDS.match(finding[side]) for side in ("expected", "found")]
    expected, found = (int(each[1]) if each else 0 for each in counts)
    return max(expected - found, 0)


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


def page(results: Results) -> str:
    parts = [HEAD]
    for version in (LATEST, BEFORE):
        rows = [
            _row(recorded, pace, runs)
            for recorded in RECORDED
            for pace in PACES
            if (runs := results.get(recorded.name, {}).get(version, {}).get(pace))
        ]
        parts += [f"## On {version}\n", _table(COLUMNS, rows)]
    parts += ["## What the differences are\n", WHAT]
    for version in (LATEST, BEFORE):
        parts += [f"### On {version}\n", _table(NOTES, _notes(results, version))]
    return "\n".join(parts).rstrip() + "\n"


HEAD = """# Captures of clients, replayed

Made by `python -m tests.broker.make_report`; do not edit. Each capture is replayed with everything
allowed (`--allow produce,groups,transactions,admin --create-topics --max-gap 2s`) on an empty
broker of its own, with the settings of the captured broker that answers show. Columns from *sent*
on are sums over all runs. *Records missing* are acknowledged records that the logs lack after the
run; a dash is a run from before logs were read back. *Explained* are differences beside which the
report says what they come from. Captures that are not in `captures/` are recorded material beside
the project.
"""
WHAT = """Each kind of difference that no rule allows, in how many places and captures it
is, and the note beside it.
"""
COLUMNS = (
    "capture", "clients", "recorded on", "pace", "last run", "runs", "sent", "same", "tolerated",
    "different", "error", "records missing", "kinds of differences", "of them not explained",
)  # fmt: skip
NOTES = ("API", "path", "captured", "answered", "places", "captures", "note")


def _row(recorded: Recorded, pace: str, runs: list[Result]) -> list[Any]:
    verdicts: Counter[str] = sum((Counter(one["verdicts"]) for one in runs), Counter())
    judged = [verdicts[name] for name in ("same", "tolerated", "different", "error")]
    kinds = {
        (each["api_name"], each["path"]): is_explained(each["note"])
        for one in runs
        for each in one["differences"]
    }
    missing = "-"
    if all(one["records_missing"] is not None for one in runs):
        missing = str(sum(one["records_missing"] for one in runs))
    return [
        recorded.name, recorded.clients, recorded.kafka_version, pace, runs[-1]["date"], len(runs),
        sum(judged),
        *judged, missing, len(kinds), sum(not explained for explained in kinds.values()),
    ]  # fmt: skip


def _notes(results: Results, version: str) -> list[list[Any]]:
    """Differences of all captures together, by API, path and note."""
    found: dict[tuple[str, str, str], list[tuple[str, Result]]] = defaultdict(list)
    for recorded in RECORDED:
        paces = results.get(recorded.name, {}).get(version, {})
        for each in (
            each for runs in paces.values() for one in runs for each in one["differences"]
        ):
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
    parser.add_argument("--pace", choices=PACES, action="append")
    parser.add_argument("--runs", type=int, default=1)
    given = parser.parse_args()
    unknown = set(given.names) - {each.name for each in RECORDED}
    if unknown:
        parser.error(f"no capture {min(unknown)}")
    for recorded in RECORDED:
        if given.names and recorded.name not in given.names:
            continue
        if not recorded.path.exists():
            sys.stderr.write(f"{recorded.name}: not here\n")
            continue
        for version in given.release or (LATEST, BEFORE):
            for pace in given.pace or PACES:
                measure(recorded, version, pace, given.runs)


def measure(recorded: Recorded, version: str, pace: str, count: int) -> None:
    """Run a capture `count` times, and write the results after each run."""
    runs: list[Result] = []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(recorded, version, pace, Path(folder)))
        row = _row(recorded, pace, runs)
        sys.stderr.write(f"{recorded.name} on {version}: {row[3:]}\n")
        results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results.setdefault(recorded.name, {}).setdefault(version, {})[pace] = runs
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
