"""The report's consumer lag beside the request logs of brokers."""

from collections import Counter
from pathlib import Path

from kdissect import Tables
from lab.truth.captures import log_of
from lab.truth.section import RIGHT, UNDECIDED, Judged, Section
from tests.truth import lag


def compare(_: str, tables: Tables, capture: Path) -> Judged:
    counts = lag.compare(tables, log_of(capture))
    columns = {RIGHT: counts.right, "too low": counts.low, UNDECIDED: counts.undecided}
    return Counter({**columns, "confirmed": counts.confirmed}), counts.wrong


SECTION = Section(
    "Lag",
    "The last committed offset and the lag at the end of each partition of a group, in the report's "
    "table `lag`, beside the brokers' request logs: offsets of transactions count once the "
    "transaction committed, and a deleted topic has no row. A lag is a lower bound: with the right "
    "offset, one below the truth is right, and counted as too low. Confirmed: a broker's last answer "
    "to OffsetFetch has the same offset.",
    compare,
    columns=(RIGHT, "too low", UNDECIDED, "confirmed"),
)
