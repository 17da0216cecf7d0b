"""Clients of connections: client ids, software, SASL mechanisms and users.

A client that authenticates with a delegation token sends the token id as its SCRAM user (KIP-48).
A broker logs the token's owner then.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from kdissect.arrays import Indices
from kdissect.capture.mapped_files import Sources
from kdissect.codec.sasl_tokens import read_token
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.frame_buffer import FrameBuffer, client_ids
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST
from kdissect.tables.connections import ConnectionClients

CLIENT_REQUESTS = frozenset((ApiKey.SASL_HANDSHAKE, ApiKey.API_VERSIONS, ApiKey.SASL_AUTHENTICATE))
TOKEN_RESPONSES = frozenset((ApiKey.CREATE_DELEGATION_TOKEN, ApiKey.DESCRIBE_DELEGATION_TOKEN))
_TOKEN_MAX = 1 << 16  # bytes of a SASL token without Kafka header
# bytes of a request header up to the end of its client id: of nearly all, and the most
_SHORT_HEADER, _LONG_HEADER = 10 + 64, 10 + 32767


def add_clients(
    clients: ConnectionClients, api_key: int, body: pa.StructArray, connection: Indices
) -> None:
    """Add client software, SASL mechanism and user of each connection, from its first such
    messages. api_key: of CLIENT_REQUESTS."""
    for row, value in zip(connection.tolist(), body.to_pylist(), strict=True):
        if value is None:
            continue
        if api_key == ApiKey.API_VERSIONS:
            if value["client_software_name"] is not None:
                software = (value["client_software_name"], value["client_software_version"])
                clients.software.setdefault(row, software)
        elif api_key == ApiKey.SASL_HANDSHAKE:
            clients.mechanism.setdefault(row, value["mechanism"])
        else:
            _add_user(clients.principal, row, value["auth_bytes"] or b"")


def _add_user(principals: dict[int, str], row: int, token: bytes) -> None:
    if row not in principals and (user := principal_of(token)) is not None:
        principals[row] = user


def principal_of(token: bytes) -> str | None:
    """The user in a client's first SASL token, as Kafka's principal ("User:alice"); None without
    one: the authentication id of PLAIN and SCRAM, the `sub` claim of OAUTHBEARER's JWT."""
    fields = read_token(token, REQUEST) or {}
    claims = {claim["name"]: claim["value"] for claim in fields.get("claims") or ()}
    user = fields.get("authcid") or claims.get("sub")
    return f"User:{user}" if user else None


def raw_token_users(assembly: Assembly, sources: Sources) -> dict[int, str]:
    """Users by connection row, from SASL tokens without Kafka headers, to which SaslHandshake v0
    leads."""
    exchanges = assembly.exchanges
    request = exchanges["request"]
    is_whole = (request["is_whole"] != 0) & (request["size"] < _TOKEN_MAX)
    rows = np.flatnonzero((exchanges["is_sasl_token"] != 0) & is_whole)
    users: dict[int, str] = {}
    if not len(rows):
        return users
    frames = FrameBuffer.gather(assembly, sources, rows, (REQUEST,))
    bounds = zip(frames.start[:, REQUEST].tolist(), frames.end[:, REQUEST].tolist(), strict=True)
    for row, (start, end) in zip(exchanges["connection"][rows].tolist(), bounds, strict=True):
        _add_user(users, row, frames.buf[start:end].tobytes())
    return users


def token_owners(api_key: int, body: pa.StructArray) -> Iterator[tuple[str, str]]:
    """(token id, owner such as "User:alice") from responses of TOKEN_RESPONSES (KIP-48)."""
    is_single = api_key == ApiKey.CREATE_DELEGATION_TOKEN
    for row in (body if is_single else body.field("tokens").flatten()).to_pylist():
        if row is not None and row["token_id"] and row["principal_name"]:
            yield row["token_id"], f"{row['principal_type']}:{row['principal_name']}"


def with_owners(connections: pa.Table, owners: dict[str, str]) -> pa.Table:
    """`connections` with token owners as principals. owners: by token id."""
    if not owners:
        return connections
    at = connections.schema.get_field_index("principal")
    mechanisms = connections["sasl_mechanism"].to_pylist()
    principals = [
        owners.get((principal or "").removeprefix("User:"), principal)
        if (mechanism or "").startswith("SCRAM")
        else principal
        for principal, mechanism in zip(
            connections["principal"].to_pylist(), mechanisms, strict=True
        )
    ]
    column = pa.array(principals, pa.string())
    return connections.set_column(at, connections.schema.field(at), column)


def add_client_ids(clients: ConnectionClients, assembly: Assembly, sources: Sources) -> None:
    """Add the distinct client ids of each connection, in order of appearance."""
    exchanges = assembly.exchanges
    rows = np.flatnonzero((exchanges["request"]["size"] >= 10) & (exchanges["api_key"] >= 0))
    found: list[tuple[int, int, str]] = []
    for prefix in (_SHORT_HEADER, _LONG_HEADER):
        if not len(rows):
            break
        frames = FrameBuffer.gather(assembly, sources, rows, (REQUEST,), prefix)
        texts = client_ids(frames)
        table = pa.table({"connection": exchanges["connection"][rows], "id": texts, "row": rows})
        distinct = table.filter(texts.is_valid()).group_by(["connection", "id"], use_threads=False)
        firsts = distinct.aggregate([("row", "min")])
        found += zip(
            *(firsts[name].to_pylist() for name in ("row_min", "connection", "id")), strict=True
        )
        rows = rows[texts.is_null().to_numpy(zero_copy_only=False)]
    for _, connection, text in sorted(found):
        clients.client_ids.setdefault(connection, []).append(text)
