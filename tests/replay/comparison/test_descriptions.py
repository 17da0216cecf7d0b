"""Descriptions and lists of groups and transactions that contradict themselves or others."""

from __future__ import annotations

from typing import Any

import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.descriptions import Descriptions
from tests.replay.comparison.test_run_state import Run

NOT_FOUND = 69
GROUP_DESCRIPTIONS = [
    ApiKey.DESCRIBE_GROUPS,
    ApiKey.CONSUMER_GROUP_DESCRIBE,
    ApiKey.SHARE_GROUP_DESCRIBE,
    ApiKey.STREAMS_GROUP_DESCRIBE,
]


def describe(run: Run, at_s: float, api_key: ApiKey = ApiKey.CONSUMER_GROUP_DESCRIBE,
             state: str = "Stable", **more: Any) -> int:  # fmt: skip
    """A description of group g. more: its fields."""
    version = 6 if api_key == ApiKey.DESCRIBE_GROUPS else 1
    version = 0 if api_key == ApiKey.STREAMS_GROUP_DESCRIBE else version
    names = {"groups": ["g"]} if api_key == ApiKey.DESCRIBE_GROUPS else {"group_ids": ["g"]}
    group = {"group_id": "g", "group_state": state, **more}
    return run.add(at_s, api_key, version, names, {"groups": [group]})


def heartbeat(run: Run, at_s: float, epoch: int) -> int:
    request = {"group_id": "g", "member_id": "m", "member_epoch": epoch}
    answer = {"member_id": "m", "member_epoch": 1, "heartbeat_interval_ms": 5}
    return run.add(at_s, ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request, answer)


def list_groups(run: Run, at_s: float, *states: tuple[str, str], kinds: list[str] | None = None,
                ) -> int:  # fmt: skip
    """states: of the listed groups, by their names. kinds: a filter."""
    groups = [{"group_id": name, "group_state": state} for name, state in states]
    request = {"states_filter": [], "types_filter": kinds or []}
    return run.add(at_s, ApiKey.LIST_GROUPS, 5, request, {"groups": groups})


@pytest.mark.parametrize("api_key", GROUP_DESCRIPTIONS)
def test_a_group_without_an_error_has_a_state(api_key: ApiKey) -> None:
    run = Run()
    describe(run, 1, api_key, "Empty")
    describe(run, 2, api_key, "", error_code=NOT_FOUND)
    assert run.said(Descriptions) == []
    number = describe(run, 3, api_key, "")
    assert run.said(Descriptions) == [(number, "groups[0].error_code", "0")]


def test_a_dead_group_has_an_error() -> None:
    run = Run()
    describe(run, 1, ApiKey.DESCRIBE_GROUPS, "Dead", error_code=NOT_FOUND)
    number = describe(run, 2, ApiKey.DESCRIBE_GROUPS, "Dead")
    assert run.said(Descriptions) == [(number, "groups[0].error_code", "0")]


def test_the_epoch_of_a_producer_does_not_fall() -> None:
    run = Run()
    for at_s, producer_id, epoch in (1, 7, 5_003), (2, 7, 3), (3, 8, 0):
        state = {"transactional_id": "x", "transaction_state": "Empty",
                 "producer_id": producer_id, "producer_epoch": epoch}  # fmt: skip
        request = {"transactional_ids": ["x"]}
        run.add(at_s, ApiKey.DESCRIBE_TRANSACTIONS, 0, request, {"transaction_states": [state]})
    path = "transaction_states[0].producer_epoch"
    assert run.said(Descriptions) == [(0, path, "5003")]


def test_a_state_is_missing_if_the_group_has_an_epoch() -> None:
    run = Run()
    number = describe(run, 1, state="", group_epoch=3)
    assert run.said(Descriptions) == [(number, "groups[0].group_state", '""')]


def test_a_transaction_without_an_error_has_a_state() -> None:
    run, path = Run(), "transaction_states[0].error_code"
    for at_s, code in (1, 105), (2, 0):
        state = {"transactional_id": "x", "transaction_state": "", "error_code": code}
        request = {"transactional_ids": ["x"]}
        run.add(at_s, ApiKey.DESCRIBE_TRANSACTIONS, 0, request, {"transaction_states": [state]})
    assert run.said(Descriptions) == [(1, path, "0")]


@pytest.mark.parametrize("name", ["group_epoch", "assignment_epoch"])
def test_a_group_has_no_epoch_beside_an_error(name: str) -> None:
    run = Run()
    describe(run, 1, state="", error_code=NOT_FOUND, **{name: 0})
    assert run.said(Descriptions) == []
    number = describe(run, 2, state="", error_code=NOT_FOUND, **{name: 1})
    assert run.said(Descriptions) == [(number, f"groups[0].{name}", "1")]


@pytest.mark.parametrize("name", ["group_epoch", "assignment_epoch"])
def test_epochs_of_a_group_do_not_fall(name: str) -> None:
    run = Run()
    describe(run, 1, **{name: 3})
    number = describe(run, 2, **{name: 4})
    describe(run, 3, **{name: 3})
    assert run.said(Descriptions) == [(number, f"groups[0].{name}", "4")]


@pytest.mark.parametrize(("epoch", "said"), [(0, []), (5, [(0, "groups[0].group_epoch", "5")])])
def test_a_group_that_a_member_joins_may_be_a_new_one(epoch: int, said: list[Any]) -> None:
    """A heartbeat of a member that is in the group makes no new one."""
    run = Run()
    describe(run, 1, group_epoch=5)
    heartbeat(run, 2, epoch)
    describe(run, 3, group_epoch=1)
    assert run.said(Descriptions) == said


def test_a_list_has_groups_with_members() -> None:
    run = Run()
    heartbeat(run, 0, 0)
    number = list_groups(run, 1, ("a", "Stable"))
    list_groups(run, 2, ("a", "Stable"), ("g", "Stable"))
    assert run.said(Descriptions) == [(number, "groups", "not listed")]


def test_a_list_lacks_groups_that_members_join_later() -> None:
    """The join is answered after the list was requested."""
    run = Run()
    heartbeat(run, 1, 0)
    list_groups(run, 1.0005)
    list_groups(run, 2, ("g", "Stable"))
    assert run.said(Descriptions) == []


def test_a_list_may_lack_groups_without_members() -> None:
    run = Run()
    heartbeat(run, 0, 0)
    list_groups(run, 1)
    list_groups(run, 2, ("g", "Empty"))
    assert run.said(Descriptions) == []


def test_a_list_with_a_filter_lacks_other_groups() -> None:
    run = Run()
    heartbeat(run, 0, 0)
    list_groups(run, 1, kinds=["classic"])
    list_groups(run, 2, ("g", "Stable"))
    assert run.said(Descriptions) == []


def test_brokers_of_a_cluster_list_their_own_groups() -> None:
    run = Run()
    heartbeat(run, 0, 0)
    list_groups(run, 1)
    list_groups(run, 2, ("g", "Stable"))
    assert run.said(Descriptions, brokers=2) == []


def test_a_broker_that_was_restarted_loads_its_groups() -> None:
    """A request had no answer."""
    run = Run()
    heartbeat(run, 0, 0)
    list_groups(run, 1)
    list_groups(run, 2, ("g", "Stable"))
    run.outcomes[0].error = "the connection was closed"
    assert run.said(Descriptions) == []


def test_a_list_may_lack_groups_that_no_member_of_the_run_has_joined() -> None:
    run = Run()
    list_groups(run, 1)
    list_groups(run, 2, ("g", "Stable"))
    assert run.said(Descriptions) == []
