"""Clients of connections: client ids, software, SASL mechanisms and users.

A client that authenticates with a delegation token sends the token id as its SCRAM user (KIP-48).
A broker logs the token's owner then.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.arrays import Indices, Ints
from kdissect.capture.mapped_files import Sources
from kdissect.codec.sasl_tokens import read_token
from kdissect.jit import kernel, load_u8, load_u16
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.frame_buffer import FrameBuffer, client_ids
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST
from kdissect.tables.connections import ConnectionClients

CLIENT_REQUESTS = frozenset((ApiKey.SASL_HANDSHAKE, ApiKey.API_VERSIONS, ApiKey.SASL_AUTHENTICATE))
TOKEN_RESPONSES = frozenset((ApiKey.CREATE_DELEGATION_TOKEN, ApiKey.DESCRIBE_DELEGATION_TOKEN))
TOKENS_READ = 8  # per connection; one of the first two holds the user name
_TOKEN_MAX = 1 << 16  # bytes of a SASL token without Kafka header


def add_clients(
    clients: ConnectionClients, api_key: int, body: pa.StructArray, connection: Indices
) -> None:
    """Add client software, SASL mechanism and user of each connection, from its first such
    messages. api_key: of CLIENT_REQUESTS."""
    rows = np.arange(len(connection))
    if api_key == ApiKey.API_VERSIONS:
        rows = np.flatnonzero(body.field("client_software_name").is_valid())
    order = rows[np.argsort(connection[rows], kind="stable")]
    rank = np.arange(len(order)) - np.searchsorted(connection[order], connection[order])
    first = np.sort(order[rank < (TOKENS_READ if api_key == ApiKey.SASL_AUTHENTICATE else 1)])
    values = body.take(pa.array(first)).to_pylist()
    for row, value in zip(connection[first].tolist(), values, strict=True):
        if value is None:
            continue
        if api_key == ApiKey.API_VERSIONS:
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


# -- client ids ---------------------------------------------------------------------------


@kernel
def _client_id_kernel(
    address: npt.NDArray[np.uint64],
    available: Ints,
    digest: Ints,
    length: Ints,
) -> None:
    """FNV-1a digest and length of each request's client id; length -1 for null, -2 for unreadable.

    A client id is unreadable here if the header is not within the `available` bytes of the first
    extent at `address`. This is rare: the header is split between two segments.
    """
    for row in range(address.size):
        length[row] = -2
        if available[row] < 10:
            continue
        # Request header v1: int16 api_key, int16 api_version, int32 correlation_id, then client_id
        # as int16 length and text. Header v2 keeps that encoding.
        size = load_u16(address[row] + np.uint64(8))
        if size > 32767:
            length[row] = -1
            continue
        if available[row] < 10 + size:
            continue
        value = np.int64(-3750763034362895579)
        for k in range(size):
            byte = load_u8(address[row] + np.uint64(10 + k))
            value = (value ^ byte) * np.int64(1099511628211)
        digest[row] = value
        length[row] = size


def _first_of_each(*columns: Ints) -> Ints:
    """Index of the first row of each distinct combination of column values.

    Most neighbours are equal, so runs are merged before sorting.
    """
    differs = np.ones(len(columns[0]), bool)
    differs[1:] = False
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    runs = np.flatnonzero(differs)
    order = runs[np.lexsort([column[runs] for column in columns])]
    differs = np.ones(len(order), bool)
    differs[1:] = False
    for column in columns:
        ordered = column[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    return order[differs]


def add_client_ids(clients: ConnectionClients, assembly: Assembly, sources: Sources) -> None:
    """Add the distinct client ids of each connection, in order of appearance."""
    exchanges, extents = assembly.exchanges, assembly.extents
    request = exchanges["request"]
    rows = np.flatnonzero(
        (request["size"] >= 10)
        & (exchanges["api_key"] >= 0)
        & (exchanges["is_sasl_token"] == 0)
        # ControlledShutdown v0 has request header v0, without client id
        & ~((exchanges["api_key"] == ApiKey.CONTROLLED_SHUTDOWN) & (exchanges["api_version"] == 0))
    )
    if not len(rows):
        return
    digest = np.zeros(len(rows), np.int64)
    length = np.zeros(len(rows), np.int64)
    has_bytes = request["extent_count"][rows] > 0
    first = extents[request["extent_start"][rows[has_bytes]]]
    available = np.zeros(len(rows), np.int64)
    available[has_bytes] = np.where(first["source"] < 0, 0, first["length"])
    address = np.zeros(len(rows), np.uint64)
    address[has_bytes] = sources.addresses(first["source"], first["pos"], first["length"])
    _client_id_kernel(address, available, digest, length)
    connection = exchanges["connection"][rows]
    far = length == -2
    digest[far] = rows[far]  # unreadable ones are all looked at below
    index = _first_of_each(connection, length, digest)
    index = np.sort(index[length[index] != -1])
    frames = FrameBuffer.gather(assembly, sources, rows[index], (REQUEST,), prefix=10 + 32767)
    texts = client_ids(frames).to_pylist()
    for row, text in zip(connection[index].tolist(), texts, strict=True):
        if text is not None and text not in clients.client_ids.setdefault(row, []):
            clients.client_ids[row].append(text)
