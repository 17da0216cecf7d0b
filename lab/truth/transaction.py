"""Outcomes in `transactions` beside the brokers' request logs.

A transaction ended as its EndTxn says, if the broker accepted it. An EndTxn that is sent again ends
no other transaction.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from kdissect import Tables
from kdissect.protocol.api_keys import ApiKey
from lab.truth.captures import log_of
from lab.truth.section import RIGHT, UNDECIDED, Judged, Section, captures_with_logs
from tests.truth.request_log import read_lines

End = tuple[str, int, int, str]  # transactional ID, producer ID, epoch, outcome


def read_ends(log: Path) -> Counter[End]:
    """The transactions that EndTxn ended, by a log."""
    ends = Counter[End]()
    for row in read_lines(log):
        if row["api_key"] != ApiKey.END_TXN or "request" not in row:
            continue
        request = row["request"]
        if row["response"]["errorCode"] == 0 and not row["forwarded"]:
            outcome = "commit" if request["committed"] else "abort"
            producer = (request["producerId"], request["producerEpoch"])
            ends[request["transactionalId"], *producer, outcome] += 1
    return ends


def compare(_: str, tables: Tables, capture: Path) -> Judged:
    """Transactions by their outcome."""
    names = ["transactional_id", "producer_id", "producer_epoch", "outcome"]
    rows = tables.transactions.to_arrow(names).to_pylist()
    seen = Counter(tuple(row[name] for name in names) for row in rows)
    truth = read_ends(log_of(capture))
    counts, wrong = Counter[str](), []
    for end, count in truth.items():
        right = min(count, seen[end])
        counts[RIGHT] += right
        other = (*end[:3], "abort" if end[3] == "commit" else "commit")
        if right < count and seen[other] > truth[other]:
            wrong.append(f"{end[0]}, epoch {end[2]}: {other[3]} for {end[3]}")
        else:
            counts[UNDECIDED] += count - right
    return counts, wrong


def sources(captures: Path) -> Iterable[tuple[str, Path]]:
    """Captures whose log has the end of a transaction."""
    return (each for each in captures_with_logs(captures) if read_ends(log_of(each[1])))


SECTION = Section(
    "Transaction",
    "Outcomes in `transactions` beside the EndTxn requests of the brokers' request logs.",
    compare,
    sources,
)
