"""Requests without an answer in captures of which packets were taken out, or that end early.

The whole capture knows whether an answer came. An answer that was taken out must not be called
missing: such a request could not be judged.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

from kdissect import Tables
from kdissect.sql import Database
from kdissect.sql.requests import unanswered
from lab.truth.captures import read_capture
from lab.truth.section import UNDECIDED, Judged, Section
from tests.builders.captures import lose_packets, split_capture

SHARE = 0.02  # of the packets
SEEDS = (1, 2)
ENDS = (0.25, 0.5, 0.75)  # of the packets, after which a capture ends
LITTLE_ENDIAN = (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1")
KEY = ("client_ip", "client_port", "correlation_id", "api_key", "request_time_ns")


def cut_capture(capture: Path, path: Path, share: float) -> None:
    """Write the first packets of a pcap, a share of all."""
    head, packets = split_capture(capture.read_bytes())
    path.write_bytes(head + b"".join(packets[: int(len(packets) * share)]))


def _statuses(tables: Tables) -> dict[tuple[object, ...], tuple[int, str]]:
    rows = tables.exchanges.to_arrow(["exchange_id", "status", *KEY]).to_pylist()
    return {tuple(row[name] for name in KEY): (row["exchange_id"], row["status"]) for row in rows}


@cache
def _truth(capture: Path) -> dict[tuple[object, ...], tuple[int, str]]:
    return _statuses(read_capture(capture))


def compare(_: str, damaged: Tables, capture: Path) -> Judged:
    """Unanswered requests of the damaged capture."""
    names = ("captures", "exchanges", "connections", "anomalies")
    with Database({name: damaged[name].dataset for name in names}) as database:
        rows = database.rows(unanswered())
    may_be_lost = {row["exchange_id"]: row["may_be_lost"] for row in rows}
    truth = _truth(capture)
    counts, wrong = Counter[str](), []
    for key, (ident, _) in _statuses(damaged).items():
        if ident in may_be_lost and key in truth:
            was_answered = truth[key][1] == "paired"
            if may_be_lost[ident]:
                counts["lost" if was_answered else UNDECIDED] += 1
            elif was_answered:
                wrong.append(f"{key} was answered")
            else:
                counts["missing"] += 1
    return counts, wrong


def sources(captures: Path) -> Iterable[tuple[str, Path]]:
    """Captures that are not damaged already."""
    for path in sorted(captures.glob("*/*.pcap")):
        if path.parent.name != "shapes" and path.read_bytes()[:4] in LITTLE_ENDIAN:
            yield f"{path.parent.name}/{path.stem}", path


SECTION = Section(
    "Loss",
    f"Requests without an answer once {SHARE:.0%} of the packets are taken out of a capture, "
    f"{len(SEEDS)} times, and if it ends after {', '.join(f'{share:.0%}' for share in ENDS)} of "
    "them. The whole capture knows whether an answer came. Right: *lost*, it came and could not be "
    "judged; *missing*, it never came and is said to be missing. *Undecided*: it never came and "
    "could not be judged. *Wrong*: it came and is said to be missing.",
    compare,
    sources,
    ("lost", "missing", UNDECIDED),
    (
        ("", [partial(lose_packets, share=SHARE, seed=seed) for seed in SEEDS]),
        ("ends early: ", [partial(cut_capture, share=share) for share in ENDS]),
    ),
)
