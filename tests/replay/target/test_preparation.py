"""Topics and groups of a run are deleted after it; what stays is named."""

from __future__ import annotations

import asyncio
from typing import Any

from kdissect.codec.message import decode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.preparation import delete_names
from tests.replay.made import FakeBroker, empty_answer, response

UNKNOWN_TOPIC, NON_EMPTY_GROUP = 3, 68


def test_names_are_deleted_and_the_rest_is_named() -> None:
    """A topic that is gone already needs no line; a group with members and a missing API do."""
    asked: list[tuple[int, Any]] = []

    def answer(number: int, frame: bytes) -> bytes:
        request = decode_message(frame, side="request")
        body: dict[str, Any]
        if request.api_key == ApiKey.DELETE_TOPICS:
            names = [each["name"] for each in request.body["topics"]]
            asked.append((ApiKey.DELETE_TOPICS, names))
            codes = [0, UNKNOWN_TOPIC]
            body = {
                "responses": [
                    {"name": name, "error_code": code}
                    for name, code in zip(names, codes, strict=True)
                ]
            }
        elif request.api_key == ApiKey.DELETE_GROUPS:
            [name] = request.body["groups_names"]
            asked.append((ApiKey.DELETE_GROUPS, name))
            code = NON_EMPTY_GROUP if name == "busy\x1b" else 0
            body = {"results": [{"group_id": name, "error_code": code}]}
        else:
            return empty_answer(frame)
        correlation_id = int.from_bytes(frame[4:8], "big")
        return response(request.api_key, request.api_version, correlation_id, **body)

    async def run(port: int) -> list[str]:
        target = Target("127.0.0.1", port)
        await target.probe()
        names = [("topic", "orders-1"), ("group", "idle"), ("group", "busy\x1b"),
                 ("transactional-id", "ledger-1"), ("topic", "gone-1")]  # fmt: skip
        kept = await delete_names(target, names)
        target.close()
        return kept

    with FakeBroker(answer).running() as server:
        [line] = asyncio.run(run(server.port))
    assert asked == [
        (ApiKey.DELETE_GROUPS, "idle"),
        (ApiKey.DELETE_GROUPS, "busy\x1b"),
        (ApiKey.DELETE_TOPICS, ["orders-1", "gone-1"]),
    ]
    assert "\x1b" not in line
    assert line.endswith("was not deleted: NON_EMPTY_GROUP")
