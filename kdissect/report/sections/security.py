"""Security: TLS versions and ciphers, certificates with their validity, logins by principal."""

from __future__ import annotations

from typing import Any

from kdissect import text as f
from kdissect.report.database import ReportDatabase, listed
from kdissect.sql.sessions import EXPIRES_SOON_DAYS, certificates, logins


def collect(database: ReportDatabase) -> dict[str, Any]:
    """Tables `session_kinds`, `certificates` and `logins`."""
    database.run(
        """
        CREATE TABLE session_kinds AS
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
        f"CREATE TABLE certificates AS SELECT * EXCLUDE (connection_ids) FROM ({certificates()})"
    )
    database.run(f"CREATE TABLE logins AS {logins()}")
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


def text(section: dict[str, Any]) -> str:
    """Sentences on the certificates that the capture shows, and on those that it hides."""
    said = (
        f"A certificate expires soon if fewer than {EXPIRES_SOON_DAYS} days are left at its last "
        "connection."
    )
    if section["unseen_certificates"]:
        count = f.plural(section["unseen_certificates"], "TLS connection")
        said += (
            f" {count} without a readable certificate of the broker: TLS 1.3 encrypts it, and a "
            "resumed session has none. A key log decrypts it."
        )
    return said
