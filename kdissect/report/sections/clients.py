"""Clients: their identities, addresses, software and versions."""

from __future__ import annotations

from kdissect.report.document import Document, Listing, Options, Section, listed
from kdissect.sql import Database
from kdissect.sql.inventory import inventory

_SOFTWARE = "concat_ws(' ', c.client_software_name, c.client_software_version)"


def collect(database: Database, options: Options) -> Document:
    """Table `clients_all`: a row per client id and address, with its row of the inventory."""
    database.create("inventory", inventory(database, options.since_us))
    database.run(
        f"""
        CREATE TEMP TABLE speakers AS
        WITH spoken AS (
          SELECT client_id, client_ip, connection_id, count(*) AS exchanges,
            count(*) FILTER (failed) AS errors, min(time) AS first_time, max(time) AS last_time,
            sum(request_size) AS request_bytes, sum(response_size) AS response_bytes,
            count(*) FILTER (is_unanswered) AS unanswered,
            bool_or(is_broker) AS is_broker,
            list(DISTINCT transactional_id ORDER BY transactional_id) AS transactional_ids
          FROM requests GROUP BY ALL
        )
        SELECT s.client_id, s.client_ip,
          CASE WHEN bool_or(s.is_broker) THEN 'broker' ELSE 'client' END AS role,
          string_agg(DISTINCT {_SOFTWARE}, ', ' ORDER BY {_SOFTWARE})
            FILTER (c.client_software_name IS NOT NULL) AS software,
          string_agg(DISTINCT c.principal, ', ' ORDER BY c.principal) AS principal,
          string_agg(DISTINCT c.sasl_mechanism, ', ' ORDER BY c.sasl_mechanism) AS sasl_mechanism,
          string_agg(DISTINCT c.tls_version, ', ' ORDER BY c.tls_version) AS tls_version,
          count(*) AS connections, sum(s.exchanges)::BIGINT AS exchanges,
          sum(s.errors)::BIGINT AS errors, sum(s.unanswered)::BIGINT AS unanswered,
          sum(s.request_bytes)::BIGINT AS request_bytes,
            sum(s.response_bytes)::BIGINT AS response_bytes,
          min(s.first_time) AS first_time, max(s.last_time) AS last_time,
          list_sort(list_distinct(flatten(list(s.transactional_ids)))) AS transactional_ids
        FROM spoken s JOIN connections c USING (connection_id) GROUP BY ALL
        """
    )
    database.run(
        """
        CREATE TEMP TABLE clients_all AS
        SELECT c.*, l.p50, l.p95, l.p99, i.* EXCLUDE (client_id, client_ip, software, principals,
          role, first_time, last_time, connection_count, request_count)
        FROM speakers c
        LEFT JOIN latency_clients l ON c.client_id IS NOT DISTINCT FROM l.client_id
          AND c.client_ip IS NOT DISTINCT FROM l.client_ip
        LEFT JOIN inventory i ON c.client_id IS NOT DISTINCT FROM i.client_id
          AND c.client_ip IS NOT DISTINCT FROM i.client_ip
        """
    )
    return listed(database, "clients_all", "role DESC, exchanges DESC, client_id, client_ip")


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
