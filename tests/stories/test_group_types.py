"""The type of groups of which only refused commits were captured."""

import json
from typing import Any

import pyarrow as pa
import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.stories.events import GROUP_STEPS, NO_TIME
from kdissect.stories.groups import group_events_table

STALE_MEMBER_EPOCH, ILLEGAL_GENERATION = 113, 22


def _event(api_key: int, error_code: int, member: str, **data: Any) -> dict[str, Any]:
    return dict.fromkeys(GROUP_STEPS.names) | {
        "group_id": "g",
        "api_key": api_key,
        "time_ns": 0,
        "end_ns": NO_TIME,
        "exchange_id": 1,
        "member_id": member,
        "error_code": error_code,
        "data": json.dumps(data),
    }


def _types(*events: dict[str, Any]) -> list[str]:
    table = group_events_table(pa.Table.from_pylist(list(events), schema=GROUP_STEPS))
    kept = [row for row in table.to_pylist() if row["event"] == "commit_error"]
    return [row["group_type"] for row in kept]


@pytest.mark.parametrize(
    ("error_code", "expected"), [(STALE_MEMBER_EPOCH, "consumer"), (ILLEGAL_GENERATION, "classic")]
)
def test_commits_alone(error_code: int, expected: str) -> None:
    """Epochs belong to the consumer protocol (KIP-848), generations to the classic one."""
    assert _types(_event(ApiKey.OFFSET_COMMIT, error_code, "m", refused="")) == [expected]


def test_the_type_comes_from_other_members() -> None:
    """A refused commit gets the type that another member's request shows."""
    heartbeat = _event(ApiKey.CONSUMER_GROUP_HEARTBEAT, 0, "n", epoch=5)
    assert _types(_event(ApiKey.OFFSET_COMMIT, 22, "m", refused=""), heartbeat) == ["consumer"]
