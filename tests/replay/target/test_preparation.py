"""Topics and groups of a run are deleted after it; what stays is named."""

from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.target.guard import delete_names
from tests.replay.made import answering, with_target

UNKNOWN_TOPIC, NON_EMPTY_GROUP = 3, 68


def test_names_are_deleted_and_the_rest_is_named() -> None:
    """A topic that is gone already needs no line; a group with members and a missing API do."""
    asked: list[tuple[int, Any]] = []

    def body_of(api_key: int, request: dict[str, Any]) -> dict[str, Any] | None:
        if api_key == ApiKey.DELETE_TOPICS:
            [topic] = request["topics"]
            asked.append((ApiKey.DELETE_TOPICS, topic["name"]))
            code = UNKNOWN_TOPIC if topic["name"] == "gone-1" else 0
            return {"responses": [{"name": topic["name"], "error_code": code}]}
        if api_key != ApiKey.DELETE_GROUPS:
            return None
        [name] = request["groups_names"]
        asked.append((ApiKey.DELETE_GROUPS, name))
        code = NON_EMPTY_GROUP if name == "busy\x1b" else 0
        return {"results": [{"group_id": name, "error_code": code}]}

    names = [("topic", "orders-1"), ("group", "idle"), ("group", "busy\x1b"),
             ("transactional-id", "ledger-1"), ("topic", "gone-1")]  # fmt: skip
    [line] = with_target(answering(body_of), lambda target: delete_names(target, names))
    assert asked == [
        (ApiKey.DELETE_GROUPS, "busy\x1b"),
        (ApiKey.DELETE_GROUPS, "idle"),
        (ApiKey.DELETE_TOPICS, "gone-1"),
        (ApiKey.DELETE_TOPICS, "orders-1"),
    ]
    assert "\x1b" not in line
    assert line.endswith("was not deleted: NON_EMPTY_GROUP")
