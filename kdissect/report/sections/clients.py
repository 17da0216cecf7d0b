"""Clients: who they are, how they log in, and which would break on a release of Kafka."""

from __future__ import annotations

from kdissect import text as f
from kdissect.protocol.releases import release_number, releases_accepting
from kdissect.readiness.assessment import BREAKS, OK, assess
from kdissect.report.document import (
    LISTED_MAX,
    LISTS,
    Block,
    Document,
    Listing,
    Options,
    Row,
    Section,
    listed,
)
from kdissect.sql import Database
from kdissect.sql.inventory import inventory
from kdissect.sql.sessions import EXPIRES_SOON_DAYS, certificates, logins


def collect(database: Database, options: Options) -> Document:
    """Table `clients_all`: a row per client id and address, with its row of the inventory."""
    database.create("inventory", inventory(database, options.since_us))
    database.run(
        """
        CREATE TEMP TABLE clients_all AS
        WITH spoken AS (
          SELECT client_id, client_ip, bool_or(is_broker) AS is_broker,
            count(DISTINCT connection_id) AS connections, count(*) AS exchanges,
            count(*) FILTER (failed) AS errors, count(*) FILTER (is_unanswered) AS unanswered,
            sum(request_size)::BIGINT AS request_bytes,
            sum(response_size)::BIGINT AS response_bytes,
            min(time) AS first_time, max(time) AS last_time,
            list_sort(list_distinct(list(transactional_id))) AS transactional_ids
          FROM requests GROUP BY client_id, client_ip
        ), secured AS (
          SELECT r.client_id, r.client_ip,
            string_agg(DISTINCT sasl_mechanism, ', ' ORDER BY sasl_mechanism) AS sasl_mechanism,
            string_agg(DISTINCT tls_version, ', ' ORDER BY tls_version) AS tls_version
          FROM (SELECT DISTINCT client_id, client_ip, connection_id FROM requests) r
          JOIN connections USING (connection_id) GROUP BY ALL
        )
        SELECT s.client_id, s.client_ip,
          CASE WHEN s.is_broker THEN 'broker' ELSE 'client' END AS role,
          array_to_string(i.software, ', ') AS software,
          array_to_string(i.principals, ', ') AS principal, c.sasl_mechanism, c.tls_version,
          s.* EXCLUDE (client_id, client_ip, is_broker),
          l.p50, l.p95, l.p99, i.* EXCLUDE (client_id, client_ip, software, principals, role,
            first_time, last_time, connection_count, request_count)
        FROM spoken s
        LEFT JOIN secured c ON (c.client_id, c.client_ip)
          IS NOT DISTINCT FROM (s.client_id, s.client_ip)
        LEFT JOIN latency_clients l ON (l.client_id, l.client_ip)
          IS NOT DISTINCT FROM (s.client_id, s.client_ip)
        LEFT JOIN inventory i ON (i.client_id, i.client_ip)
          IS NOT DISTINCT FROM (s.client_id, s.client_ip)
        """
    )
    return listed(database, LISTS["clients"])


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["clients"]
    listing = Listing("clients", d)
    return Section(
        "clients",
        "Clients",
        [listing] if d["total"] else [],
        "No Kafka client in this capture.",
        badge=d["total"],
    )


# -- security: TLS versions and ciphers, certificates with their validity, logins by principal


def collect_security(database: Database, _: Options) -> Document:
    """Tables `session_kinds`, `certificates` and `logins`."""
    database.run(
        """
        CREATE TEMP TABLE session_kinds AS
        SELECT CASE WHEN is_tls THEN coalesce(tls_version, 'unknown') ELSE 'none' END
            AS tls_version,
          tls_cipher, sasl_mechanism, count(*) AS connections,
          count(DISTINCT client_ip) AS client_hosts,
          list_sort(list(DISTINCT broker_port)) AS broker_ports,
          count(*) FILTER (coalesce(request_tls_alert, response_tls_alert) IS NOT NULL) AS alerts
        FROM connections WHERE is_kafka OR is_tls GROUP BY 1, 2, 3
        """
    )
    database.run(
        "CREATE TEMP TABLE certificates AS "
        f"SELECT * EXCLUDE (connection_ids) FROM ({certificates()})"
    )
    database.run(f"CREATE TEMP TABLE logins AS {logins()}")
    return {
        "sessions": listed(
            database,
            "FROM session_kinds ORDER BY connections DESC, tls_version, tls_cipher, sasl_mechanism",
        ),
        "certificates": listed(database, LISTS["certificates"]),
        "unseen_certificates": database.value(
            "SELECT count(*) FROM connections WHERE is_tls AND tls_certificate_not_after IS NULL"
        ),
        "logins": listed(database, LISTS["logins"]),
    }


def security_section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["security"]
    blocks: list[Block] = [
        _certificates_text(d),
        Listing("sessions", d["sessions"]),
        Listing("certificates", d["certificates"]),
        Listing("logins", d["logins"]),
    ]
    refused = sum(row["refused"] for row in d["logins"]["rows"])
    return Section("security", "Security", blocks, badge=refused)


def _certificates_text(d: Document) -> str:
    """Sentences on the certificates that the capture shows, and on those that it hides."""
    said = (
        f"A certificate expires soon if fewer than {EXPIRES_SOON_DAYS} days are left at its last "
        "connection."
    )
    if d["unseen_certificates"]:
        count = f.plural(d["unseen_certificates"], "TLS connection")
        said += (
            f" {count} without a readable certificate of the broker: TLS 1.3 encrypts it, and a "
            "resumed session has none. A key log decrypts it."
        )
    return said


# -- readiness, from `kdissect.readiness`


def collect_readiness(database: Database, options: Options) -> Document:
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


def _is_outdated(client: Row, release: str) -> bool:
    """Return whether it needs what the release no longer takes, not what only newer ones have."""
    for each in (*client["findings"], *client["never_seen"]):
        if each["verdict"] == BREAKS:
            if each["taken"] is not None:
                return True
            accepting = releases_accepting(each["api_key"], each["api_version"])
            if accepting and release_number(accepting[0]) < release_number(release):
                return True
    return False


def _client(row: Row) -> Row:
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


def readiness_section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["readiness"]
    blocks: list[Block] = [
        f"{_verdicts_text(d)} Other releases: `kdissect readiness DIR --target R`.",
        Listing("readiness", d["clients"]),
    ]
    return Section(
        "readiness",
        f"Ready for Kafka {d['target']}?",
        blocks,
        name="Readiness",
        badge=d["counts"]["breaks"],
    )


def _verdicts_text(d: Document) -> str:
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
