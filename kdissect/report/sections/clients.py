"""Clients: their identities, addresses, software and versions."""

from __future__ import annotations

from kdissect.report.document import Document, Listing, Options, Section, listed
from kdissect.sql import Database
from kdissect.sql.inventory import inventory


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
