"""Requests without an answer in captures of which packets were taken out, or that end early.

The whole capture knows whether an answer came. An answer that was taken out must not be called
missing: such a request could not be judged.
"""

import tempfile
from collections import Counter
from pathlib import Path

from kdissect import Tables
from kdissect.sql import Database
from kdissect.sql.unanswered import unanswered
from lab.truth.captures import read_capture
from lab.truth.section import table
from tests.builders.captures import cut_capture, lose_packets

SHARE = 0.02  # of the packets
SEEDS = (1, 2)
ENDS = (0.25, 0.5, 0.75)  # of the packets, after which a capture ends
OUTCOMES = ("lost", "missing", "undecided", "wrong")
LITTLE_ENDIAN = (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1")
KEY = ("client_ip", "client_port", "correlation_id", "api_key", "request_time_ns")


def _statuses(tables: Tables) -> dict[tuple[object, ...], tuple[int, str]]:
    rows = tables.exchanges.to_arrow(["exchange_id", "status", *KEY]).to_pylist()
    return {tuple(row[name] for name in KEY): (row["exchange_id"], row["status"]) for row in rows}


def judge(whole: Tables, damaged: Tables) -> Counter[str]:
    """Unanswered requests of the damaged capture: `lost`, `missing`, `undecided`, `wrong`."""
    names = ("captures", "exchanges", "connections", "anomalies")
    with Database({name: damaged[name].dataset for name in names}) as database:
        rows = database.rows(unanswered())
    may_be_lost = {row["exchange_id"]: row["may_be_lost"] for row in rows}
    truth = _statuses(whole)
    found: Counter[str] = Counter()
    for key, (ident, _) in _statuses(damaged).items():
        if ident in may_be_lost and key in truth:
            was_answered = truth[key][1] == "paired"
            if may_be_lost[ident]:
                found["lost" if was_answered else "undecided"] += 1
            else:
                found["wrong" if was_answered else "missing"] += 1
    return found


def section(captures: Path) -> str:
    """The section of the page."""
    lines = []
    totals = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        damaged = Path(folder) / "damaged.pcap"
        for path in sorted(captures.glob("*/*.pcap")):
            data = path.read_bytes()
            if path.parent.name == "shapes" or data[:4] not in LITTLE_ENDIAN:
                continue
            whole, found = read_capture(path), (Counter[str](), Counter[str]())
            for seed in SEEDS:
                lose_packets(data, damaged, SHARE, seed)
                found[0].update(judge(whole, read_capture(damaged, path)))
            for share in ENDS:
                cut_capture(data, damaged, share)
                found[1].update(judge(whole, read_capture(damaged, path)))
            for total, counts in zip(totals, found, strict=True):
                total.update(counts)
            lines.append((f"{path.parent.name}/{path.stem}", *_cells(found)))
    ends = " and ".join([", ".join(f"{share:.0%}" for share in ENDS[:-1]), f"{ENDS[-1]:.0%}"])
    return "\n".join(
        [
            "## Loss",
            "",
            f"Requests without an answer once {SHARE:.0%} of the packets are taken out of a "
            f"capture, {len(SEEDS)} times, and if it ends after {ends} of them. The whole "
            "capture knows whether an answer came. Right: *lost*, it came and could not be judged; "
            "*missing*, it never came and is said to be missing. *Undecided*: it never came and "
            "could not be judged. *Wrong*: it came and is said to be missing.",
            "",
            table(
                ("capture", *OUTCOMES, f"ends early: {OUTCOMES[0]}", *OUTCOMES[1:]),
                [*lines, ("all", *_cells(totals))],
            ),
        ]
    )


def _cells(counts: tuple[Counter[str], ...]) -> list[int]:
    return [one[outcome] for one in counts for outcome in OUTCOMES]
