"""The section on clients that would break on a release of Kafka, from `kdissect.readiness`."""

from __future__ import annotations

from typing import Any

from kdissect import text as f
from kdissect.protocol.releases import release_number, releases_accepting
from kdissect.readiness.assessment import BREAKS, OK, assess
from kdissect.report.document import LISTED_MAX, Block, Document, Listing, Options, Section
from kdissect.sql import Database


def collect(database: Database, options: Options) -> Document:
    """The assessment; its list of clients as other lists are, outdated ones first, then the worst.

    ``outdated_count``: clients that need what the release no longer takes.
    """
    assessed = assess(database, options.target)
    clients, release = assessed["clients"], assessed["release"]
    clients.sort(key=lambda client: not _is_outdated(client, release))
    return {
        **{name: assessed[name] for name in ("target", "release", "verdict", "counts", "unseen")},
        "outdated_count": sum(_is_outdated(client, release) for client in clients),
        "clients": {"total": len(clients), "rows": list(map(_client, clients[:LISTED_MAX]))},
    }


def _is_outdated(client: dict[str, Any], release: str) -> bool:
    """Return whether it needs what the release no longer takes, not what only newer ones have."""
    for each in (*client["findings"], *client["never_seen"]):
        if each["verdict"] == BREAKS:
            if each["taken"] is not None:
                return True
            accepting = releases_accepting(each["api_key"], each["api_version"])
            if accepting and release_number(accepting[0]) < release_number(release):
                return True
    return False


def _client(row: dict[str, Any]) -> dict[str, Any]:
    findings = row["findings"]
    software = " ".join(filter(None, (row["software_name"], row["software_version"])))
    unproven = [
        f"{each['api_name']} was never seen: {each['why']}"
        for each in row["never_seen"]
        if each["verdict"] != OK
    ]
    formats = [
        f"magic {each['magic']} ({f.plural(each['batch_count'], 'batch', 'batches')})"
        for each in row["formats"]
        if not each["is_taken"]
    ]
    return {
        **row,
        "client_ip": row["address"],
        "software": software or None,
        "requests": [f"{each['api_name']} v{each['api_version']}" for each in findings],
        "old_formats": formats,
        "why": "; ".join(dict.fromkeys([*(each["why"] for each in findings), *unproven])) or None,
    }


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["readiness"]
    blocks: list[Block] = [
        f"{_text(d)} Other releases: `kdissect readiness DIR --target R`.",
        Listing("readiness", d["clients"]),
    ]
    return Section(
        "readiness",
        f"Ready for Kafka {d['target']}?",
        blocks,
        name="Readiness",
        badge=d["counts"]["breaks"],
    )


def _text(d: Document) -> str:
    """A sentence with the counts of clients that break, work or are undecided."""
    counts, unseen = d["counts"], d["unseen"]
    said = (
        f"{f.plural(counts['breaks'], 'client')} would break on Kafka {d['release']}, "
        f"{f.count(counts['ok'])} would not, {f.count(counts['unknown'])} may or may not. "
        "Brokers' own connections are left out."
    )
    if unseen["tls_connection_count"]:
        closed = f.plural(unseen["tls_connection_count"], "TLS connection")
        said += f" {closed} could not be looked into."
    return said
