"""Security: TLS versions and ciphers, certificates with their validity, logins by principal."""

from __future__ import annotations

from kdissect import text as f
from kdissect.report.document import Block, Document, Listing, Options, Section, listed
from kdissect.sql import Database
from kdissect.sql.sessions import EXPIRES_SOON_DAYS, certificates, logins


def collect(database: Database, _: Options) -> Document:
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
            database, "session_kinds", "connections DESC, tls_version, tls_cipher, sasl_mechanism"
        ),
        "certificates": listed(database, "certificates", "not_after, side, address, subject"),
        "unseen_certificates": database.value(
            "SELECT count(*) FROM connections WHERE is_tls AND tls_certificate_not_after IS NULL"
        ),
        "logins": listed(
            database, "logins", "refused DESC, connections DESC, principal, client_ip"
        ),
    }


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["security"]
    blocks: list[Block] = [
        _text(d),
        Listing("sessions", d["sessions"]),
        Listing("certificates", d["certificates"]),
        Listing("logins", d["logins"]),
    ]
    refused = sum(row["refused"] for row in d["logins"]["rows"])
    return Section("security", "Security", blocks, badge=refused)


def _text(d: Document) -> str:
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
