"""The secrets of a capture, by its manifest and its revealed tables."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tests.truth.material import Capture

SECRET_MIN = 6  # shorter ones are found by chance


def token_rows(capture: Capture) -> list[dict[str, Any]]:
    """Tokens within SaslAuthenticate, and the raw ones that follow a SaslHandshake v0."""
    raw = capture.rows("apis/SaslToken")
    assert len(raw) == capture.check.get("raw_sasl_tokens", 0)
    return capture.rows("apis/SaslAuthenticate") + raw


def secrets_of(capture: Capture) -> set[bytes]:
    """The secrets: passwords of the manifest, and the values of tokens and HMACs."""
    text = json.dumps(capture.manifest)
    found = set(re.findall(r'(?:password|user_\w+)=\\+"([^"\\]+)', text))
    found.update(re.findall(r'"delegation.token.secret.key": "([^"]+)', text))
    for row in token_rows(capture):
        for side in (row["request"], row["response"]):
            token = (side or {}).get("auth_bytes_decoded") or {}
            for name in ("password", "salt", "proof", "server_signature", "token"):
                if token.get(name):
                    found.update((token[name], *token[name].split(".")))
    raw = {text.encode() for text in found}
    for name, fields in (
        ("CreateDelegationToken", ("hmac",)),
        ("RenewDelegationToken", ("hmac",)),
        ("ExpireDelegationToken", ("hmac",)),
        ("AlterUserScramCredentials", ("salt", "salted_password")),
    ):
        raw.update(_named(capture.rows(f"apis/{name}"), fields))
    raw = {secret for secret in raw if len(secret) >= SECRET_MIN}
    return raw | {base64.b64encode(one) for one in raw} | {one.hex().encode() for one in raw}


def _named(value: Any, fields: tuple[str, ...]) -> Iterator[bytes]:
    if isinstance(value, list):
        for each in value:
            yield from _named(each, fields)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name in fields and isinstance(each, bytes):
                yield each
            else:
                yield from _named(each, fields)


def table_bytes(table: pa.Table) -> bytes:
    """The columns of a table, uncompressed."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue().to_pybytes()
