"""Writes ``messages.jsonl``: a few messages of every API, as the project itself encodes them.

    python -m tests.golden.make_messages

Made when the encoder agreed with Kafka's own classes on every API and version; kept so that tests
can tell a change of the encoding on a machine that has nothing but the checkout. Per API and side:
the oldest version, the first flexible one, and the newest.
"""

import json
from pathlib import Path

from kdissect import Message, encode_message
from kdissect.protocol import catalog
from tests.codec.message_values import sample, to_json

HERE = Path(__file__).resolve().parent


def lines():
    for key, api in catalog.apis().items():
        first, last = api.request.versions
        versions = sorted({first, max(first, min(api.request.flexible.first, last)), last})
        for version in versions:
            for side in ("request", "response"):
                header = {"correlation_id": 1000 * key + version}
                if side == "request" and api.request_header_version(version) > 0:
                    header["client_id"] = f"client-{key}"
                body = sample(api.side(side), version, "golden")
                message = Message(key, version, side, header, body)
                yield {
                    "api": api.name,
                    "api_key": key,
                    "api_version": version,
                    "side": side,
                    "frame": encode_message(message).hex(),
                    "header": to_json(message.header),
                    "body": to_json(message.body),
                }


if __name__ == "__main__":
    with (HERE / "messages.jsonl").open("w", encoding="utf-8") as file:
        for line in lines():
            file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
