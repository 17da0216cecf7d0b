"""`advertised_address_unreachable`: clients were sent to an address that they never reached.

A broker writes `advertised.listeners` into its Metadata responses, and clients connect to that.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.attempts import FAILED, PROVEN
from kdissect.incidents.facts import Facts, follow
from kdissect.incidents.model import BAD, EVIDENCE_MAX, Incident
from kdissect.text import duration, plural


def find(facts: Facts) -> Iterator[Incident]:
    """Yield the advertised addresses that clients tried, and none reached."""
    rows = facts.rows(
        f"""
        WITH advertised AS (
          SELECT DISTINCT node_id, host, ip, port FROM brokers WHERE ip IS NOT NULL
        ), tried AS (
          SELECT broker, broker_ip, broker_port, bool_or(handshake_seen) AS is_reached,
            bool_or(({FAILED}) AND {PROVEN}) AS is_proven,
            bool_or(coalesce(refused, false)) AS is_refused,
            min(first_time) AS start, max(last_time) AS stop, count(*) AS attempts,
            list(DISTINCT client_ip) AS hosts,
            list(connection_id ORDER BY first_time)[:{EVIDENCE_MAX}] AS connection_ids
          FROM sessions WHERE syn_count > 0 GROUP BY ALL
        )
        SELECT t.*, a.host, list(DISTINCT a.node_id) AS nodes
        FROM tried t JOIN advertised a ON a.ip = t.broker_ip AND a.port = t.broker_port
        WHERE is_proven AND NOT is_reached GROUP BY ALL ORDER BY start, broker
        """
    )
    for row in rows:
        length = duration((row["stop"] - row["start"]).total_seconds() * 1000)
        how = "refused each (RST)" if row["is_refused"] else "did not answer (no SYN-ACK)"
        named = "" if row["broker"].startswith(row["host"]) else f" ({row['host']})"
        yield Incident(
            "advertised_address_unreachable",
            BAD,
            row["start"],
            row["stop"],
            row["broker"],
            f"Metadata sends clients to {row['broker']}{named} for "
            f"{'node' if len(row['nodes']) == 1 else 'nodes'} "
            f"{', '.join(map(str, sorted(row['nodes'])))}. "
            f"{', '.join(row['hosts'][:3])} tried {plural(row['attempts'], 'connection')} in "
            f"{length}; the address {how}. Look at advertised.listeners of the broker.",
            connection_ids=row["connection_ids"],
            next_command=facts.command("show", *follow(row["connection_ids"])),
            brokers=frozenset((row["broker"],)),
        )
