"""Outcomes in `transactions` beside the brokers' request logs.

A transaction ended as its EndTxn says, if the broker accepted it. An EndTxn that is sent again ends
no other transaction.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import kdissect
from kdissect import Tables
from kdissect.protocol.api_keys import ApiKey
from tools.truth.lag import read_lines
from tools.truth.latency import log_of
from tools.truth.loss import LOST, without_packets

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


def compare(tables: Tables, log: Path) -> tuple[Counter[str], list[str]]:
    """Counts of `right` and `undecided` transactions, and lines about wrong ones."""
    names = ["transactional_id", "producer_id", "producer_epoch", "outcome"]
    rows = tables.transactions.to_arrow(names).to_pylist()
    seen = Counter(tuple(row[name] for name in names) for row in rows)
    truth = read_ends(log)
    counts, wrong = Counter[str](), []
    for end, count in truth.items():
        right = min(count, seen[end])
        counts["right"] += right
        other = (*end[:3], "abort" if end[3] == "commit" else "commit")
        if right < count and seen[other] > truth[other]:
            wrong.append(f"{end[0]}, epoch {end[2]}: {other[3]} for {end[3]}")
        else:
            counts["undecided"] += count - right
    return counts, wrong


def section(captures: Path) -> str:
    """The section of the page."""
    lines, all_wrong = [], []
    for path in sorted(captures.glob("*/*.pcap")):
        log = log_of(path)
        if not log.is_file() or not read_ends(log):
            continue
        key_log = path.with_suffix(".keylog")
        cells = [f"{path.parent.name}/{path.stem}"]
        for share in (0.0, LOST):
            with without_packets(path, share) as capture:
                tables = kdissect.read(capture, keylog=key_log if key_log.is_file() else ())
                counts, wrong = compare(tables, log)
            all_wrong += [f"{cells[0]}: {line}" for line in wrong]
            cells += [str(counts["right"]), str(len(wrong)), str(counts["undecided"])]
        lines.append(f"| {' | '.join(cells)} |")
    heads = "right | wrong | undecided"
    return "\n".join(
        [
            "## Transaction",
            "",
            "Outcomes in `transactions` beside the EndTxn requests of the brokers' request logs. "
            f"The same with {LOST:.0%} of the packets removed.",
            *(["", f"Wrong: {'; '.join(all_wrong)}."] if all_wrong else []),
            "",
            f"| capture | {heads} | with loss: {heads} |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *lines,
        ]
    )
