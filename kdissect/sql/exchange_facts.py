"""SQL of facts about exchanges that the report and the incidents share."""

from __future__ import annotations

from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.protocol.error_codes import ROUTINE, ErrorCode
from kdissect.tables.message_facts import METADATA_TOPIC, METADATA_TOPIC_ID, ZERO_UUID_TEXT


def is_fault(api: str, codes: str) -> str:
    """SQL: a list column has a code that is no routine step of the API in another column."""
    steps = " OR ".join(
        f"code = {ErrorCode[error]:d}" + (f" AND {api} = '{name}'" if name else "")
        for name, error in ROUTINE
    )
    return f"coalesce(len(list_filter({codes}, lambda code: NOT ({steps}))), 0) > 0"


def broker_connections(has_fetch: bool) -> str:
    """SQL of `connection_id` of the connections whose client is a broker or a controller.

    has_fetch: the view `api_fetch` exists.
    """
    keys = ", ".join(f"{key:d}" for key in sorted(INTER_BROKER_APIS | {ApiKey.WRITE_TXN_MARKERS}))
    query = (
        f"SELECT DISTINCT connection_id FROM exchanges WHERE api_key IN ({keys}) "
        # since version 4 brokers send it for their clients (KIP-890)
        "OR (api_name = 'AddPartitionsToTxn' AND api_version >= 4)"
    )
    if has_fetch:
        query += (
            " UNION SELECT DISTINCT connection_id FROM api_fetch "
            "WHERE greatest(coalesce(request.replica_id, -1), "
            "coalesce(request.replica_state.replica_id, -1)) >= 0"
        )
    return query


def topic_names() -> str:
    """SQL of `topic_id` and `topic`: the name of each topic id, as `CaptureFacts.names_by_id`."""
    return f"""
        SELECT topic_id, any_value(topic ORDER BY first_time, source, topic) AS topic FROM topics
        WHERE topic IS NOT NULL AND topic_id NOT IN ('{METADATA_TOPIC_ID}', '{ZERO_UUID_TEXT}')
        GROUP BY topic_id UNION ALL SELECT '{METADATA_TOPIC_ID}', '{METADATA_TOPIC}'
        """


def endpoint(ip: str, port: str) -> str:
    """SQL of ``10.0.0.1:9092`` or ``[::1]:9092`` of two columns."""
    return f"CASE WHEN contains({ip}, ':') THEN '[' || {ip} || ']:' ELSE {ip} || ':' END || {port}"
