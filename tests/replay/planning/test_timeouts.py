"""Requests wait for sessions and transactions that had run out of time."""

from __future__ import annotations

import pytest

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange, Step
from kdissect.replay.planning.plan import make_plan
from tests.builders.workloads import exchange, step_of, workload
from tests.replay.other_cluster import everything

SESSION_MS = 6000
EMPTY = ((("group", "g"), 11_000_000_000),)  # the session timeout, and five seconds
OVER = ((("txn", "t"), 15_050_000_000),)  # the timeout, and more than the coordinator's interval


def join(connection: int, at_ms: int, member: str) -> Exchange:
    """A JoinGroup of group g that succeeded."""
    asked = {"group_id": "g", "member_id": "", "group_instance_id": None,
             "session_timeout_ms": SESSION_MS, "protocol_type": "consumer",
             "protocols": []}  # fmt: skip
    told = {"error_code": 0, "member_id": member, "generation_id": 1, "leader": member,
            "protocol_name": "range", "members": []}  # fmt: skip
    key = ApiKey.JOIN_GROUP
    request = Message(key, 5, "request", {"client_id": "c"}, asked)
    answer = Message(key, 5, "response", {"correlation_id": 1}, told)
    return exchange(connection, request, at_ms, at_ms + 1, answer)


def ask(key: ApiKey, version: int, at_ms: int, connection: int = 5, **body: object) -> Exchange:
    """A request with an empty response."""
    request = Message(key, version, "request", {"client_id": "c"}, dict(body))
    answer = Message(key, version, "response", {"correlation_id": 1}, {})
    return exchange(connection, request, at_ms, at_ms + 1, answer)


def heartbeat(at_ms: int, member: str) -> Exchange:
    return ask(ApiKey.HEARTBEAT, 3, at_ms, 0, group_id="g", generation_id=1, member_id=member)


def last_step(*exchanges: Exchange) -> Step:
    by_connection: dict[int, list[Exchange]] = {}
    for each in exchanges:
        by_connection.setdefault(each.connection, []).append(each)
    made = workload(*by_connection.values())
    return make_plan(made, everything()).steps[-1]


def test_a_request_after_the_session_waits_for_it() -> None:
    """All members were silent for longer than their sessions: DescribeGroups and ListGroups wait
    for an empty group; not while one of them still sends heartbeats."""
    before = join(0, 0, "m"), heartbeat(1000, "m")
    for key, body in ((ApiKey.DESCRIBE_GROUPS, {"groups": ["g"]}), (ApiKey.LIST_GROUPS, {})):
        assert last_step(*before, ask(key, 3, 9000, **body)).awaits == EMPTY
        assert last_step(*before, ask(key, 3, 5000, **body)).awaits == ()
        other = join(1, 1, "n"), heartbeat(8000, "m")
        assert last_step(*before, *other, ask(key, 3, 9000, **body)).awaits == ()


@pytest.mark.parametrize(("end_ms", "is_expired"), [(40, False), (60, True)])
def test_a_transaction_that_ran_out_of_time(end_ms: int, is_expired: bool) -> None:
    """An EndTxn that was refused when the producer's time was over waits for that at the target."""
    body = {"transactional_id": "t", "transaction_timeout_ms": 50}
    result = {"error_code": 0, "producer_id": 1, "producer_epoch": 0}
    began = exchange(0, Message(ApiKey.INIT_PRODUCER_ID, 1, "request", {"client_id": "c"}, body), 0,
                     1, Message(ApiKey.INIT_PRODUCER_ID, 1, "response", {}, result))  # fmt: skip
    names = {"transactional_id": "t", "producer_id": 1, "producer_epoch": 0}
    offsets = Message(ApiKey.ADD_OFFSETS_TO_TXN, 1, "request", {"client_id": "c"},
                      {**names, "group_id": "g"})  # fmt: skip
    done = Message(ApiKey.ADD_OFFSETS_TO_TXN, 1, "response", {}, {"error_code": 0})
    added = exchange(0, offsets, 5, 6, done)
    end = Message(ApiKey.END_TXN, 1, "request", {"client_id": "c"}, {**names, "committed": True})
    refused = Message(ApiKey.END_TXN, 1, "response", {}, {"error_code": 48})
    ended = exchange(0, end, end_ms, end_ms + 1, refused)
    plan = make_plan(workload([began, added, ended]), everything())
    assert step_of(plan, ended).awaits == (OVER if is_expired else ())
    assert not step_of(plan, added).awaits


def test_a_transaction_of_a_broker_that_ran_out_of_time() -> None:
    """AddPartitionsToTxn v4 names transactions in a list."""
    body = {"transactional_id": "t", "transaction_timeout_ms": 50}
    result = {"error_code": 0, "producer_id": 1, "producer_epoch": 0}
    began = exchange(0, Message(ApiKey.INIT_PRODUCER_ID, 1, "request", {"client_id": "c"}, body), 0,
                     1, Message(ApiKey.INIT_PRODUCER_ID, 1, "response", {}, result))  # fmt: skip
    asked = {"transactions": [{"transactional_id": "t", "producer_id": 1, "producer_epoch": 0,
                               "verify_only": True, "topics": []}]}  # fmt: skip
    key = ApiKey.ADD_PARTITIONS_TO_TXN
    checks = []
    for at_ms, code in ((5, 0), (60, 90)):
        part = {"partition_index": 0, "partition_error_code": code}
        topic = {"name": "t", "results_by_partition": [part]}
        answer = {"error_code": 0, "results_by_transaction": [
            {"transactional_id": "t", "topic_results": [topic]}]}  # fmt: skip
        checks.append(
            exchange(1, Message(key, 4, "request", {"client_id": "b"}, asked), at_ms, at_ms + 1,
                     Message(key, 4, "response", {}, answer))
        )  # fmt: skip
    plan = make_plan(workload([began], checks), everything())
    first, second = (step_of(plan, each) for each in checks)
    assert (first.awaits, second.awaits) == ((), OVER)
