"""Lies that users would care about: a twin of the captured cluster tells them to a replay.

Any exchange that differs counts as the report of a lie. `PASSES` names the lies that no exchange
reports, with the reason.
"""

import copy
import functools
from pathlib import Path

import pytest

from kdissect.codec.message import Message
from kdissect.replay.model import ReplayPlan, Verdict, Workload
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.workload.messages import response_of
from kdissect.replay.workload.source import load_workload
from tests.material import CAPTURES as SHARED
from tests.material import needed
from tests.replay.lies import LIST, Liar, Lie, lies
from tests.replay.other_cluster import OtherCluster, Replayed, everything, replay

CAPTURES = Path(__file__).parents[2] / "captures"
NAMES = ("java_2_0_1.pcap", "librdkafka.pcap", "kafkajs.pcap.gz", "sarama.pcap.gz")
BESIDE = ("admin/admin.pcap", "transactions/transactions.pcap")
BROUGHT = "a later answer brings the records"
NOT_READY = "the captured leader was not ready, and the target may be"
MARKERS = "markers may come later than records, and the state after a run shows what they decide"
ALONE = "no other answer is about the partitions of this member"
PASSES = {
    "Fetch responses[].partitions[].records last batch lost once": BROUGHT,
    "Fetch responses[].partitions[].records markers lost once": BROUGHT,
    **{
        f"{place}.error_code no error{once}": NOT_READY
        for place in ("Fetch responses[].partitions[]", "Metadata topics[]")
        for once in ("", " once")
    },
    "Fetch responses[].partitions[].records markers lost": MARKERS,
    **{
        f"ConsumerGroupHeartbeat assignment.topic_partitions {kind}{once}": ALONE
        for kind in LIST
        for once in ("", " once")
    },
}
SHARE_FOUND = 0.95  # of each capture; 98 % of all


@functools.cache
def workload(name: str) -> Workload:
    path = needed(SHARED / name) if "/" in name else CAPTURES / name
    return load_workload([str(path)])


@functools.cache
def plan(name: str) -> ReplayPlan:
    return make_plan(workload(name), everything())


@functools.cache
def twin(name: str) -> OtherCluster:
    return OtherCluster(workload(name))


def has_room(name: str, lie: Lie) -> bool:
    """Whether any captured answer has a value that the lie changes."""
    liar = Liar(lie)
    return any(liar(copy.deepcopy(each)) for each in answers(name).get(lie.api, ()))


@functools.cache
def answers(name: str) -> dict[str, list[Message]]:
    """The captured answers that a replay compares, by API."""
    found: dict[str, list[Message]] = {}
    for step in plan(name).steps:
        response = response_of(step.exchange)
        if step.skipped is None and response is not None:
            found.setdefault(step.api_name, []).append(response)
    return found


def told(name: str, lie: Lie) -> tuple[Replayed, int]:
    """A replay against the twin of a capture, and how many answers lied."""
    liar = Liar(lie)
    done = replay(workload(name), twin(name), plan=plan(name), flip=lambda _, one: liar(one))
    return done, liar.count


def reports(done: Replayed) -> bool:
    return any(
        each.verdict in (Verdict.DIFFERENT, Verdict.ERROR) for each in done.judgements.values()
    )


def check(*told_to: tuple[str, Lie]) -> None:
    """All lies are reported, but for those that `PASSES` names."""
    passed = []
    for name, lie in told_to:
        done, count = told(name, lie)
        assert count, f"{lie} has room"
        if not reports(done):
            passed.append(str(lie))
    print(f"{len(told_to) - len(passed)} of {len(told_to)} lies are reported")
    assert set(passed) <= PASSES.keys()
    assert len(passed) <= (1 - SHARE_FOUND) * len(told_to)


def test_a_lie_is_reported() -> None:
    """Each one to the first of two captures that has room for it."""
    rooms = [[name for name in NAMES[:2] if has_room(name, lie)] for lie in lies()]
    check(*((names[0], lie) for names, lie in zip(rooms, lies(), strict=True) if names))


@pytest.mark.heavy
@pytest.mark.parametrize("name", [*NAMES, *BESIDE])
def test_lies_are_reported_in_every_capture(name: str) -> None:
    """All that have room there."""
    check(*((name, lie) for lie in lies() if has_room(name, lie)))
