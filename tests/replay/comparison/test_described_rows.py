"""Rows of describe answers that were not final: requests explain them, or they are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kdissect.codec.message import Message, encode_message
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.described_rows import DescribedRows
from kdissect.replay.model import EarlierAnswer, Exchange, Outcome, Step
from kdissect.replay.workload.messages import step_class

MS = 1_000_000
OWN_TIME_MS = 10
ALICE = [{"entity_type": "user", "entity_name": "alice"}]
DEFAULT = [{"entity_type": "user", "entity_name": None}]
Body = dict[str, Any]


def exchange(api_key: int, at_ms: int, request: Body, *answers: Body) -> Outcome:
    """A request with its answers, the last one final, each OWN_TIME_MS after its sending."""
    version = catalog.api(api_key).request.versions[1]
    sent = encode_message(Message(api_key, version, "request", {}, request))
    frames = [encode_message(Message(api_key, version, "response", {}, each)) for each in answers]
    times = [(at_ms + OWN_TIME_MS * at) * MS for at in range(len(frames) + 1)]
    captured = Exchange(0, 0, 0, api_key, version, 0, "c", sent, frames[-1], 0, 0)
    step = Step(0, 0, captured, catalog.api(api_key).name, step_class(api_key), 0, True)
    earlier = [
        EarlierAnswer(sent, frame, "because", times[at], times[at + 1])
        for at, frame in enumerate(frames[:-1])
    ]
    return Outcome(
        step, sent, frames[-1], times[-2], times[-1], api_version=version, earlier=earlier
    )


def wrong(*outcomes: Outcome, has_one_node: bool = True) -> list[tuple[str, str]]:
    """What is wrong with the first answer of the last request."""
    rows = DescribedRows(outcomes, has_one_node=has_one_node)
    return [(each.captured, each.answered) for each in rows.wrong(outcomes[-1], 0)]


def quotas(*values: float, entity: list[Body] = ALICE, key: str = "rate") -> Body:
    listed = [{"key": key, "value": each} for each in values]
    return {"entries": [{"entity": entity, "values": listed}]}


def alter(at_ms: int, value: float, *, remove: bool = False) -> Outcome:
    entry = {"entity": ALICE, "ops": [{"key": "rate", "value": value, "remove": remove}]}
    return exchange(ApiKey.ALTER_CLIENT_QUOTAS, at_ms, {"entries": [entry]}, {"entries": []})


def describe(at_ms: int, *answers: Body) -> Outcome:
    request = {"components": [], "strict": False}
    return exchange(ApiKey.DESCRIBE_CLIENT_QUOTAS, at_ms, request, *answers)


ROW = "(('user', 'alice'),), rate"


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ({"entries": []}, []),
        (quotas(1), []),
        (quotas(3), [("absent", f"{ROW} = 3.0")]),
        (quotas(0), [("absent", f"{ROW} = 0.0")]),
        (quotas(2, 2), [("once", f"{ROW} = 2.0")]),
        (quotas(), [("absent", "(('user', 'alice'),), nothing")]),
        (quotas(1, entity=DEFAULT), [("absent", "(('user', 'None'),), rate = 1.0")]),
        (quotas(2, key="other"), [("absent", "(('user', 'alice'),), other = 2.0")]),
    ],
)
def test_an_answer_just_after_a_change(first: Body, expected: list[tuple[str, str]]) -> None:
    """It may have the row of before, or none; never another value, and never a row twice."""
    changes = alter(0, 1), alter(5_000, 2)
    assert wrong(*changes, describe(5_100, first, quotas(2))) == expected


@pytest.mark.parametrize(("at_ms", "has_one_node", "is_right"), [
    (5_900, True, True), (6_100, True, False), (6_100, False, True), (10_100, False, False),
])  # fmt: skip
def test_a_change_explains_a_row_for_a_bounded_time(
    at_ms: int, has_one_node: bool, is_right: bool
) -> None:
    """A second after its answer with one broker, five with more."""
    outcomes = alter(0, 1), alter(5_000, 2), describe(at_ms, quotas(1), quotas(2))
    assert bool(wrong(*outcomes, has_one_node=has_one_node)) is not is_right


def test_a_value_of_an_answer_before_the_run_changed_it() -> None:
    """The target had the quota before; another request had read it."""
    before, change = describe(0, quotas(7)), alter(5_000, 2)
    assert wrong(before, change, describe(5_100, quotas(7), quotas(2))) == []
    assert wrong(change, describe(5_100, quotas(7), quotas(2))) != []


def test_a_removed_quota_is_still_there() -> None:
    """Only while its removal is under way."""
    answers = quotas(1), {"entries": []}
    removal = alter(5_000, 0, remove=True)
    assert wrong(alter(0, 1), removal, describe(5_100, *answers)) == []
    assert wrong(alter(0, 1), removal, describe(9_000, *answers)) != []


def acl(operation: int) -> Body:
    return {"principal": "User:a", "host": "*", "operation": operation, "permission_type": 3}


TOPIC = {"resource_type": 2, "resource_name": "t"}


def acls(*operations: int) -> Body:
    listed = [acl(each) for each in operations]
    return {"resources": [{**TOPIC, "pattern_type": 3, "acls": listed}]}


@pytest.mark.parametrize(
    ("first", "is_right"),
    [
        (acls(1), True),
        (acls(1, 2, 4), True),
        (acls(2), False),
        (acls(), False),
        (acls(1, 9), False),
    ],
)
def test_acls_that_are_created_and_deleted(first: Body, is_right: bool) -> None:
    """ACL 2 is new, ACL 4 just deleted; ACL 1 is an old one, and nothing makes ACL 9."""
    creations = [{**TOPIC, **acl(each), "resource_pattern_type": 3} for each in (1, 2, 4)]
    make = [
        exchange(ApiKey.CREATE_ACLS, at_ms, {"creations": [each]}, {"results": []})
        for at_ms, each in zip((0, 5_000, 0), creations, strict=True)
    ]
    matching = [{**TOPIC, "pattern_type": 3, **acl(4)}]
    results = {"filter_results": [{"matching_acls": matching}]}
    delete = exchange(ApiKey.DELETE_ACLS, 5_000, {"filters": []}, results)
    request = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1}
    read = exchange(
        ApiKey.DESCRIBE_ACLS, 5_100, {**request, "permission_type": 1}, first, acls(1, 2)
    )
    assert (wrong(*make, delete, read) == []) is is_right


def credentials(*infos: tuple[int, int]) -> Body:
    listed = [{"mechanism": mechanism, "iterations": count} for mechanism, count in infos]
    return {"results": [{"user": "a", "credential_infos": listed}]}


@pytest.mark.parametrize(
    ("first", "is_right"),
    [
        ({"results": []}, True),
        (credentials((1, 4096)), True),
        (credentials(), False),
        (credentials((1, 4096), (1, 4096), (2, 8192)), False),
        (credentials((1, 4096), (2, 8193)), False),
        (credentials((0, 4096), (2, 8192)), False),
    ],
)
def test_new_scram_credentials(first: Body, is_right: bool) -> None:
    """Two new credentials of a user; iterations and mechanisms are those of the request."""
    secret = {"name": "a", "salt": b"", "salted_password": b""}
    infos = (1, 4096), (2, 8192)
    upserts = [{**secret, "mechanism": each, "iterations": count} for each, count in infos]
    request = {"deletions": [], "upsertions": upserts}
    alter_users = exchange(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 5_000, request, {"results": []})
    final = credentials(*infos)
    read = exchange(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 5_100, {"users": None}, first, final)
    assert (wrong(alter_users, read) == []) is is_right


@pytest.mark.parametrize(("name", "is_right"), [("a", True), ("b", False)])
def test_a_user_without_credentials(name: str, is_right: bool) -> None:
    """User a may have none yet. No request is about user b, whom the final answer does not have."""
    secret = {"mechanism": 1, "iterations": 4096, "salt": b"", "salted_password": b""}
    request = {"deletions": [], "upsertions": [{"name": "a", **secret}]}
    alter_users = exchange(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 5_000, request, {"results": []})
    first = {"results": [{"user": name, "error_code": 91, "credential_infos": []}]}
    read = exchange(
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 5_100, {"users": None}, first,
        credentials((1, 4096)),
    )  # fmt: skip
    assert (wrong(alter_users, read) == []) is is_right


def resources(*names: str, resource_type: int = 2) -> Body:
    listed = [{"resource_type": resource_type, "resource_name": each} for each in names]
    return {"config_resources": listed}


@pytest.mark.parametrize(
    ("first", "is_right"),
    [
        (resources("t"), True),
        (resources("t", "__consumer_offsets", "u"), True),
        (resources("u"), False),
        (resources("t", "t", "u"), False),
        (resources("t", "u", resource_type=16), False),
    ],
)
@pytest.mark.parametrize("api_key", [ApiKey.CREATE_TOPICS, ApiKey.METADATA])
def test_resources_with_configs(api_key: ApiKey, first: Body, is_right: bool) -> None:
    """Topic u is just being created."""
    create = exchange(api_key, 5_000, {"topics": [{"name": "u"}]}, {"topics": [{"name": "u"}]})
    request: Body = {"resource_types": []}
    read = exchange(ApiKey.LIST_CONFIG_RESOURCES, 5_100, request, first, resources("t", "u"))
    assert (wrong(create, read) == []) is is_right
