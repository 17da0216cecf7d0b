"""Requests wait for sessions and transactions that had run out of time."""

from __future__ import annotations

from uuid import UUID

import pytest

from kdissect.codec.message import Message, encode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange, Step
from kdissect.replay.planning.plan import make_plan
from tests.builders.workloads import exchange, step_of, workload
from tests.replay.other_cluster import everything

SESSION_MS = 6000
ABORTED_NS = 11_050_000_000  # the timeout of the transaction, and the coordinator's interval
WAIT_NS = 7_000_000_000  # the session timeout, and a second


def join(connection: int, at_ms: int, member: str, instance: str | None = None) -> Exchange:
    """A JoinGroup of group g that succeeded."""
    asked = {"group_id": "g", "member_id": "", "group_instance_id": instance,
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


def test_a_read_after_the_session_waits_for_it() -> None:
    """The member was silent for longer than its session: DescribeGroups and ListGroups wait as
    long after its last heartbeat; without that heartbeat's session being over they do not."""
    before = join(0, 0, "m"), heartbeat(1000, "m")
    describe = ask(ApiKey.DESCRIBE_GROUPS, 3, 9000, groups=["g"])
    step = last_step(*before, describe)
    assert step.pauses == ((1, WAIT_NS),)
    assert 1 in step.depends_on
    listed = last_step(*before, ask(ApiKey.LIST_GROUPS, 3, 9000))
    assert listed.pauses == ((1, WAIT_NS),)
    early = last_step(*before, ask(ApiKey.DESCRIBE_GROUPS, 3, 5000, groups=["g"]))
    assert early.pauses == ()


def test_a_group_with_a_living_member_is_not_waited_for() -> None:
    """One member has gone, the other one still sends heartbeats."""
    describe = ask(ApiKey.DESCRIBE_GROUPS, 3, 9000, groups=["g"])
    exchanges = join(0, 0, "m"), join(1, 1, "n"), heartbeat(8000, "m"), describe
    assert last_step(*exchanges).pauses == ()


def test_members_that_left_or_came_back_have_no_session() -> None:
    """A LeaveGroup ends the session, and a static member that joins again replaces its old id."""
    leave = ask(ApiKey.LEAVE_GROUP, 3, 1000, 0, group_id="g",
                members=[{"member_id": "m", "group_instance_id": None}])  # fmt: skip
    describe = ask(ApiKey.DESCRIBE_GROUPS, 3, 9000, groups=["g"])
    assert last_step(join(0, 0, "m"), leave, describe).pauses == ()
    exchanges = join(0, 0, "m", "static"), join(1, 1000, "n", "static"), describe
    assert last_step(*exchanges).pauses == ((1, WAIT_NS),)


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
    pauses = ((step_of(plan, added).number, ABORTED_NS),)
    assert step_of(plan, ended).pauses == (pauses if is_expired else ())
    assert not step_of(plan, added).pauses


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
    assert (first.pauses, second.pauses) == ((), ((first.number, ABORTED_NS),))


def test_a_push_of_telemetry_waits_for_the_interval() -> None:
    """After the push before it, if that was taken and is not the last one of the client."""
    client = {"client_instance_id": UUID(int=7)}
    answered = {**client, "push_interval_ms": 500}
    got = ask(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, 0, 0)
    got.response = encode_message(Message(got.api_key, 0, "response", {}, answered))
    pushes = [ask(ApiKey.PUSH_TELEMETRY, 0, at_ms, **client) for at_ms in (1, 2)]
    last = ask(ApiKey.PUSH_TELEMETRY, 0, 3, **client, terminating=True)
    steps = make_plan(workload([got, *pushes, last]), everything()).steps
    assert [step.pauses for step in steps] == [(), (), ((1, 500_000_000),), ()]
