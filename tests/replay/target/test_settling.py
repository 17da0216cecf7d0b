"""Waits for a target that is not ready, and for what requests have changed there."""

from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.settling import SHORT_WAIT_S, WAIT_S, Patience, SettlingWaits
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.source import gather_facts
from tests.builders.messages import a_request, a_response
from tests.builders.workloads import exchange, workload
from tests.replay.made import NODE, answering, with_target
from tests.replay.other_cluster import everything

ONE, OTHER, THIRD = (("log", "t", number) for number in (1, 2, 3))


def test_a_partition_that_keeps_failing_is_given_up() -> None:
    """After one wait, for all requests; another partition in the same answer has its own."""
    patience = Patience()
    assert patience.lasts([ONE], 0)
    assert patience.lasts([ONE, OTHER], WAIT_S - 1)
    assert not patience.lasts([ONE], WAIT_S)
    assert not patience.lasts([ONE], 0)
    assert patience.lasts([ONE, OTHER], 0)
    assert not patience.lasts([], 0)


def test_waits_in_vain_share_their_time() -> None:
    """Whatever fails after a long wait in vain is given a short one."""
    patience = Patience()
    patience.lasts([ONE], WAIT_S)
    assert patience.lasts([THIRD], SHORT_WAIT_S - 0.1)
    assert not patience.lasts([THIRD], SHORT_WAIT_S)


def test_a_topic_that_metadata_makes_is_awaited() -> None:
    """A target may show it, and lead its partitions, some time after it answered the request."""
    asked = a_request(3, 9, topics=[{"name": "new"}])
    missing, there = (
        a_response(3, 9, topics=[{"name": "new", "error_code": code}]) for code in (3, 0)
    )
    made = workload([exchange(0, asked, 0, 1, missing), exchange(0, asked, 2, 3, there)])
    made.facts = gather_facts(made.connections)
    plan, asks = make_plan(made, everything()), 0

    def body_of(api_key: int, request: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal asks
        part = {"error_code": 0, "partition_index": 0, "leader_id": 1}
        if api_key == ApiKey.LIST_OFFSETS:
            return {"topics": [{"name": "new", "partitions": [part]}]}
        if api_key != ApiKey.METADATA:
            return None
        asks += 1
        topic = {"error_code": 0, "name": "new", "partitions": [part]}
        return {"brokers": [NODE], "topics": [topic] * (asks > 3)}

    async def settle(target: Target) -> None:
        ids = IdMap(plan, target=target.cluster)
        await SettlingWaits(target, ids, Patience()).after(Outcome(plan.steps[0]))
        assert ids.target.topics == {"new": 1}

    with_target(answering(body_of), settle)
    assert asks == 4
