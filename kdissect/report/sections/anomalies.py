"""Anomalies: faults in the data, by kind and with examples."""

from __future__ import annotations

from kdissect.report.document import Document, Listing, Options, Section
from kdissect.sql import Database

_EXAMPLES = 8  # of each kind
_WORST_FIRST = "CASE severity WHEN 'error' THEN 0 WHEN 'warning' THEN 1 ELSE 2 END"


def collect(database: Database, _: Options) -> Document:
    """Make the table `anomalies_all`; return the kinds and examples of each."""
    database.run(
        """
        CREATE TEMP TABLE anomalies_all AS
        SELECT a.kind, a.severity, a.detail, a.packet, a.capture_id, a.direction, a.pos,
          a.byte_count, a.connection_id, a.exchange_id, h.client_address, h.broker, x.api,
          x.client_id, row_number() OVER (
            PARTITION BY a.kind, a.severity ORDER BY a.capture_id, a.packet, a.pos) AS number
        FROM anomalies a LEFT JOIN sessions h USING (connection_id)
        LEFT JOIN requests x ON x.exchange_id = a.exchange_id
        """
    )
    kinds = database.rows(
        f"""
        SELECT kind, severity, count(*) AS count, coalesce(sum(byte_count), 0)::BIGINT AS bytes,
          count(DISTINCT connection_id) AS connections
        FROM anomalies GROUP BY kind, severity ORDER BY {_WORST_FIRST}, count DESC, kind
        """
    )
    examples = database.rows(
        f"SELECT * EXCLUDE (number) FROM anomalies_all WHERE number <= {_EXAMPLES} "
        f"ORDER BY {_WORST_FIRST}, kind, number LIMIT 200"
    )
    return {"kinds": kinds, "examples": examples}


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["anomalies"]
    blocks = d["kinds"] and [
        "Faults in the data. The button of a packet copies Wireshark's display filter for it.",
        Listing("anomaly_kinds", d["kinds"]),
        Listing("anomalies", d["examples"]),
    ]
    return Section(
        "anomalies",
        "Anomalies",
        blocks,
        "No fault found in the data.",
        badge=sum(row["count"] for row in d["kinds"]),
    )
