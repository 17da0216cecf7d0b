"""Lies that users would care about: a twin of the captured cluster tells them to a replay.

Each lie changes one field, or the records, of one API, in all of its answers or in the first one
that has room for it. Any exchange that differs counts as the report. `PASSES` names the lies that
no exchange reports, with the reason.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kdissect.codec.message import Message
from kdissect.replay.model import Step, Verdict, Workload
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.workload.messages import response_of
from kdissect.replay.workload.source import load_workload
from tests.material import ABSENT
from tests.material import CAPTURES as SHARED
from tests.oracles.message_fields import holders
from tests.replay.other_cluster import OtherCluster, Replayed, everything, replay
from tests.replay.record_lies import RECORD_KINDS

CAPTURES = Path(__file__).parents[2] / "captures"
NAMES = ("librdkafka.pcap", "java_2_0_1.pcap", "kafkajs.pcap.gz", "sarama.pcap.gz")
BESIDE = ("admin/admin.pcap", "transactions/transactions.pcap")
UNKNOWN_SERVER_ERROR, REBALANCE_IN_PROGRESS, NOT_LEADER = -1, 27, 6


class Lie(NamedTuple):
    """One change of an API's answers. is_once: in the first answer with room only."""

    api: str
    path: str
    kind: str
    is_once: bool

    def __str__(self) -> str:
        return f"{self.api} {self.path} {self.kind}{' once' * self.is_once}"


def refused(value: Any) -> Any:
    return UNKNOWN_SERVER_ERROR if value == 0 else value


CHANGES: dict[str, Callable[[Any], Any]] = {
    "error": refused,
    "rebalance": lambda value: REBALANCE_IN_PROGRESS if value == 0 else value,
    "not leader": lambda value: NOT_LEADER if value == 0 else value,
    "no error": lambda value: 0,
    "plus 1": lambda value: value + 1 if value >= 0 else value,
    "plus 5000": lambda value: value + 5000 if value >= 0 else value,
    "zero": lambda value: min(value, 0),
    "shortened": lambda value: value[:-1],
    "emptied": lambda value: value[:0],
    "doubled": lambda value: value + value[-1:],
    "other text": lambda value: f"{value}-x" if value else value,
    "Ongoing": lambda value: "Ongoing" if value else value,
}

OFFSET, LIST = ("plus 1", "plus 5000", "zero"), ("shortened", "emptied")
CODE = ("error", "no error")
CARED: dict[str, dict[str, tuple[str, ...]]] = {
    "Produce": {
        "responses[].partition_responses[].error_code": (*CODE, "not leader"),
        "responses[].partition_responses[].base_offset": OFFSET,
        "responses[].partition_responses": LIST,
    },
    "Fetch": {
        "responses[].partitions[].records": tuple(RECORD_KINDS),
        "responses[].partitions[].error_code": (*CODE, "not leader"),
        "responses[].partitions[].high_watermark": OFFSET,
        "error_code": CODE,
    },
    "ListOffsets": {
        "topics[].partitions[].offset": OFFSET,
        "topics[].partitions[].error_code": CODE,
        "topics[].partitions": LIST,
    },
    "Metadata": {
        "topics[].error_code": CODE,
        "topics[].partitions[].error_code": CODE,
        "topics": LIST,
        "topics[].partitions": LIST,
    },
    "OffsetCommit": {"topics[].partitions[].error_code": (*CODE, "rebalance")},
    "OffsetFetch": {
        "topics[].partitions[].committed_offset": OFFSET,
        "topics[].partitions[].metadata": ("other text",),
        "groups[].topics[].partitions[].committed_offset": OFFSET,
        "groups[].topics": LIST,
        "error_code": CODE,
    },
    "FindCoordinator": {"error_code": ("error",), "coordinators[].error_code": ("error",)},
    "JoinGroup": {
        "error_code": CODE, "protocol_name": ("other text",), "members": ("shortened",),
    },
    "SyncGroup": {"error_code": CODE, "assignment": ("emptied",)},
    "Heartbeat": {"error_code": ("error", "rebalance")},
    "LeaveGroup": {"error_code": CODE, "members[].error_code": CODE},
    "ConsumerGroupHeartbeat": {"error_code": CODE, "assignment.topic_partitions": LIST},
    "DescribeGroups": {
        "groups[].error_code": CODE, "groups[].group_state": ("other text",),
        "groups[].members": LIST,
    },
    "ListGroups": {"error_code": CODE, "groups": LIST},
    "DeleteGroups": {"results[].error_code": CODE},
    "CreateTopics": {"topics[].error_code": CODE, "topics[].num_partitions": ("plus 1",)},
    "DeleteTopics": {"responses[].error_code": CODE},
    "CreatePartitions": {"results[].error_code": CODE},
    "DeleteRecords": {
        "topics[].partitions[].error_code": CODE, "topics[].partitions[].low_watermark": OFFSET,
    },
    "InitProducerId": {"error_code": CODE},
    "AddPartitionsToTxn": {
        "results_by_topic_v3_and_below[].results_by_partition[].partition_error_code": CODE,
    },
    "AddOffsetsToTxn": {"error_code": CODE},
    "EndTxn": {"error_code": CODE},
    "TxnOffsetCommit": {"topics[].partitions[].error_code": CODE},
    "DescribeTransactions": {"transaction_states[].transaction_state": ("Ongoing",)},
    "DescribeConfigs": {
        "results[].error_code": CODE, "results[].configs[].value": ("other text",),
        "results[].configs": LIST,
    },
    "AlterConfigs": {"responses[].error_code": CODE},
    "IncrementalAlterConfigs": {"responses[].error_code": CODE},
    "DescribeAcls": {"error_code": CODE, "resources": LIST},
    "CreateAcls": {"results[].error_code": CODE},
    "ShareFetch": {
        "responses[].partitions[].records": tuple(RECORD_KINDS),
        "responses[].partitions[].error_code": CODE,
        "responses[].partitions[].acknowledge_error_code": CODE,
    },
    "ShareAcknowledge": {"responses[].partitions[].error_code": CODE},
    "ShareGroupHeartbeat": {"error_code": CODE, "assignment.topic_partitions": LIST},
}  # fmt: skip
DELETED = "the run deletes records or the topic, so its log may have had this end before"
BROUGHT = "a later answer brings the records"
LAGGING = "a broker may show a change of topics five seconds later"
ALONE = "no other answer is about the partitions of this member"
PASSES = {
    **{
        f"Fetch responses[].partitions[].high_watermark {kind}{once}": DELETED
        for kind in OFFSET
        for once in ("", " once")
    },
    **{
        f"Fetch responses[].partitions[].records {kind} once": BROUGHT
        for kind in RECORD_KINDS
        if kind.endswith("lost")
    },
    "Metadata topics emptied once": LAGGING,
    "Metadata topics shortened once": LAGGING,
    "Metadata topics[].partitions shortened once": LAGGING,
    **{
        f"ConsumerGroupHeartbeat assignment.topic_partitions {kind}{once}": ALONE
        for kind in LIST
        for once in ("", " once")
    },
}
SHARE_FOUND = 0.92  # of each capture; 97 % of all shipped ones together


def lies() -> Iterator[Lie]:
    for api, fields in CARED.items():
        for path, kinds in fields.items():
            for kind in kinds:
                yield Lie(api, path, kind, False)
                if kind != "rebalance":  # once, it is what clients expect
                    yield Lie(api, path, kind, True)


@functools.cache
def workload(name: str) -> Workload:
    path = SHARED / name if "/" in name else CAPTURES / name
    return load_workload([str(path)])


class Liar:
    """Changes the answers of a twin. count: changed answers."""

    def __init__(self, lie: Lie) -> None:
        self.lie, self.count = lie, 0

    def __call__(self, step: Step, message: Message) -> None:
        if step.api_name != self.lie.api or (self.lie.is_once and self.count):
            return
        before = copy.deepcopy(message.body)
        for holder, name in holders(message.body, self.lie.path.replace("[]", "")):
            value = holder.get(name)
            if value is None:
                continue
            try:
                if self.lie.kind in RECORD_KINDS:
                    holder[name] = RECORD_KINDS[self.lie.kind](value)
                else:
                    holder[name] = CHANGES[self.lie.kind](value)
            except ValueError:
                continue  # no room in these records
            if self.lie.is_once and holder[name] != value:
                break
        self.count += message.body != before


def has_room(name: str, lie: Lie) -> bool:
    """Whether any captured answer has a value that the lie changes."""
    liar = Liar(lie)
    for step, response in answers(name).get(lie.api, ()):
        liar(step, copy.deepcopy(response))
        if liar.count:
            return True
    return False


@functools.cache
def answers(name: str) -> dict[str, list[tuple[Step, Message]]]:
    """The captured answers that a replay compares, by API."""
    found: dict[str, list[tuple[Step, Message]]] = {}
    for step in make_plan(workload(name), everything()).steps:
        response = response_of(step.exchange)
        if step.skipped is None and response is not None:
            found.setdefault(step.api_name, []).append((step, response))
    return found


def told(name: str, lie: Lie | None = None) -> tuple[Replayed, int]:
    """A replay against the twin of a capture, and how many answers lied."""
    liar = None if lie is None else Liar(lie)
    done = replay(workload(name), OtherCluster(workload(name)), flip=liar, is_run=True)
    return done, 0 if liar is None else liar.count


def reports(done: Replayed) -> bool:
    return any(
        each.verdict in (Verdict.DIFFERENT, Verdict.ERROR) for each in done.judgements.values()
    )


def captures(*, are_heavy: bool) -> list[Any]:
    """Shipped captures, and those beside the project; the larger ones may be heavy."""
    found = []
    for name in (*NAMES, *BESIDE):
        marks = []
        if "/" in name and not (SHARED / name).is_file():
            marks = [pytest.mark.skip(reason=ABSENT)]
        elif are_heavy and (name in NAMES[3:] or "/" in name):
            marks = [pytest.mark.heavy]
        found.append(pytest.param(name, marks=marks))
    return found


@pytest.mark.parametrize("name", captures(are_heavy=False))
def test_an_honest_twin_is_the_same(name: str) -> None:
    """Nothing differs."""
    done, _ = told(name)
    assert not reports(done)


@pytest.mark.parametrize("name", captures(are_heavy=True))
def test_lies_are_reported(name: str) -> None:
    """All that have room, but for those that `PASSES` names."""
    found, passed = 0, []
    for lie in lies():
        if not has_room(name, lie):
            continue
        done, count = told(name, lie)
        assert count, f"{lie} has room"
        if reports(done):
            found += 1
        else:
            passed.append(str(lie))
    print(f"{name}: {found} of {found + len(passed)} lies are reported")
    assert set(passed) <= PASSES.keys()
    assert found >= SHARE_FOUND * (found + len(passed))
