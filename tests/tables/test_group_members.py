"""Subscriptions and assignments inside records of __consumer_offsets."""

from typing import Any

import pyarrow as pa

import kdissect
from kdissect.tables.embedded import group_members
from tests.material import needs_material
from tests.truth.material import Capture

TEXT, BYTES = pa.string(), pa.binary()
MEMBER = pa.struct({"member_id": TEXT, "subscription": BYTES, "assignment": BYTES})
VALUE = pa.struct({"protocol_type": TEXT, "protocol": TEXT, "members": pa.list_(MEMBER)})
SUBSCRIPTION = bytes.fromhex("0000 00000001 0001 61 ffffffff")  # v0, the topic "a"
ASSIGNMENT = bytes.fromhex("0000 00000001 0001 61 00000002 00000000 00000003 ffffffff")


def _value(kind: str, *members: tuple[str, bytes, bytes]) -> dict[str, Any]:
    names = ("member_id", "subscription", "assignment")
    listed = [dict(zip(names, member, strict=True)) for member in members]
    return {"protocol_type": kind, "protocol": "range", "members": listed}


def test_members_of_consumer_groups_are_decoded() -> None:
    """Consumers have members; a tombstone has no member; other bytes give null."""
    values = [
        _value("consumer", ("m", SUBSCRIPTION, ASSIGNMENT), ("n", b"\1", b"")),
        None,
        _value("other", ("o", b"abc", b"xyz")),
        _value("consumer"),
        _value("consumer", ("p", SUBSCRIPTION, b"\0\0\xff")),
    ]
    first, tombstone, other, empty, last = group_members(pa.array(values, VALUE)).to_pylist()
    assert [member["member_id"] for member in first] == ["m", "n"]
    assert first[0]["subscription"]["topics"] == ["a"]
    assert first[0]["assignment"]["assigned_partitions"] == [{"topic": "a", "partitions": [0, 3]}]
    assert first[1]["subscription"] is None
    assert tombstone is None
    assert [member["member_id"] for member in other] == ["o"]
    assert other[0]["subscription"] is None
    assert empty == []
    assert last[0]["subscription"]["topics"] == ["a"]
    assert last[0]["assignment"] is None


@needs_material
def test_the_log_has_the_leaders_assignments() -> None:
    """Assignments in the records of a real cluster are those of the SyncGroup requests."""
    capture = Capture("cluster/cluster")
    given = {
        (row["request"]["group_id"], row["request"]["generation_id"], one["member_id"]): one[
            "assignment_decoded"
        ]
        for row in capture.rows("apis/SyncGroup")
        for one in row["request"]["assignments"]
    }
    checked = 0
    for row in capture.rows("internal/GroupMetadata"):
        for member in row["members_decoded"] or ():
            at = row["key"]["group"], row["value"]["generation"], member["member_id"]
            if at in given:
                assert member["assignment"] == given[at]
                checked += 1
    assert checked
    hidden = kdissect.read(capture.path, payload="keys").internal("GroupMetadata").to_arrow()
    assert hidden["members_decoded"].null_count == hidden.num_rows > 0
