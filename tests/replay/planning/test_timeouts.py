"""Requests wait for sessions and transactions that had run out of time."""

import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange
from tests.builders.workloads import call, planned, step_of

SESSION_MS = 6000
EMPTY = ((("group", "g"), 11_000_000_000),)  # the session timeout, and five seconds
# the timeout, and more than the coordinator's interval
OVER = ((("transactional-id", "t"), 15_050_000_000),)


def join(connection: int, at_ms: int, member: str) -> Exchange:
    """A JoinGroup of group g that succeeded."""
    told = {"member_id": member, "generation_id": 1, "leader": member, "members": []}
    asked = {"group_id": "g", "session_timeout_ms": SESSION_MS, "protocols": []}
    return call(ApiKey.JOIN_GROUP, 5, at_ms, connection, told, **asked)


def heartbeat(at_ms: int, member: str) -> Exchange:
    return call(ApiKey.HEARTBEAT, 3, at_ms, group_id="g", generation_id=1, member_id=member)


def test_a_request_after_the_session_waits_for_it() -> None:
    """All members were silent for longer than their sessions: DescribeGroups and ListGroups wait
    for an empty group; not while one of them still sends heartbeats."""
    before = join(0, 0, "m"), heartbeat(1000, "m")
    for key, body in ((ApiKey.DESCRIBE_GROUPS, {"groups": ["g"]}), (ApiKey.LIST_GROUPS, {})):
        late, early = call(key, 3, 9000, 5, **body), call(key, 3, 5000, 5, **body)
        assert planned(*before, late).steps[-1].awaits == EMPTY
        assert planned(*before, early).steps[-1].awaits == ()
        other = join(1, 1, "n"), heartbeat(8000, "m")
        assert planned(*before, *other, late).steps[-1].awaits == ()


PRODUCER = {"transactional_id": "t", "producer_id": 1, "producer_epoch": 0}
BEGAN = call(
    ApiKey.INIT_PRODUCER_ID, 1, 0, told={"producer_id": 1},
    transactional_id="t", transaction_timeout_ms=50,
)  # fmt: skip


@pytest.mark.parametrize(("end_ms", "is_expired"), [(40, False), (60, True)])
def test_a_transaction_that_ran_out_of_time(end_ms: int, is_expired: bool) -> None:
    """An EndTxn that was refused when the producer's time was over waits for that at the target."""
    added = call(ApiKey.ADD_OFFSETS_TO_TXN, 1, 5, **PRODUCER, group_id="g")
    ended = call(ApiKey.END_TXN, 1, end_ms, told={"error_code": 48}, **PRODUCER, committed=True)
    plan = planned(BEGAN, added, ended)
    assert step_of(plan, ended).awaits == (OVER if is_expired else ())
    assert not step_of(plan, added).awaits


def test_a_transaction_of_a_broker_that_ran_out_of_time() -> None:
    """AddPartitionsToTxn v4 names transactions in a list."""
    asked = [{**PRODUCER, "verify_only": True, "topics": []}]
    checks = []
    for at_ms, code in ((5, 0), (60, 90)):
        part = {"partition_index": 0, "partition_error_code": code}
        topic = {"name": "t", "results_by_partition": [part]}
        result = {"transactional_id": "t", "topic_results": [topic]}
        told = {"results_by_transaction": [result]}
        checks.append(call(ApiKey.ADD_PARTITIONS_TO_TXN, 4, at_ms, 1, told, transactions=asked))
    plan = planned(BEGAN, *checks)
    first, second = (step_of(plan, each) for each in checks)
    assert (first.awaits, second.awaits) == ((), OVER)
