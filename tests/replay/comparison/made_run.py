"""Answers of one connection with one target, and what contradicts in them."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay import model
from kdissect.replay.comparison.judge import RunFacts
from kdissect.replay.planning.resources import ResourceAccesses
from kdissect.replay.translation.id_map import IdMap
from tests.builders.messages import exchange, response_frame

S = 1_000_000_000
Body = dict[str, Any]
Said = list[tuple[int, str, str]]  # exchange, path, answered


class Run:
    """Exchanges of one connection. policy: of topic t. topics: name, id and number of partitions of
    those that the target's Metadata has."""

    topics: Sequence[tuple[str, UUID, int]] = ()

    def __init__(self, policy: str = "delete") -> None:
        self.connection = model.Connection(0, ("10.0.0.1", 1000), ("10.0.0.2", 9092))
        self.outcomes: list[model.Outcome] = []
        topic = model.TopicFacts("t", configs={"cleanup.policy": policy})
        facts = model.WorkloadFacts(topics={"t": topic})
        self.plan = model.ReplayPlan(
            model.Workload("made", "capture", [self.connection], facts),
            model.PlanOptions(),
            [],
            [[]],
        )
        self.accesses = ResourceAccesses(self.plan.workload)

    def add(self, at_s: float, api_key: int, version: int, sent: Body, answered: Body,
            captured: Body | None = None, node: int = 1) -> int:  # fmt: skip
        """An exchange that takes a millisecond; its number."""
        number = len(self.outcomes)
        frames = exchange(number, api_key, version, sent, answered)
        before = frames[1] if captured is None else response_frame(api_key, version, **captured)
        one = model.Exchange(
            number, 0, number, api_key, version, "c", frames[0], before, 0, 0, 0, 0
        )
        self.connection.exchanges.append(one)
        step = model.Step(number, 0, one, ApiKey(api_key).name, "read", number, True)
        step.accesses = self.accesses.of(one)
        one.decoded.clear()  # tests replace the response
        begin = int(at_s * S)
        self.outcomes.append(
            model.Outcome(
                step, *frames, begin, begin + S // 1000, node_id=node, api_version=version
            )
        )
        return number

    def ids(self) -> IdMap:
        """The target's facts, as answers have shown them."""
        ids = IdMap(self.plan)
        for topic, topic_id, partitions in self.topics:
            ids.names.by_id[topic_id] = ids.target.names[topic_id] = topic
            ids.target.topic_ids[topic] = topic_id
            ids.target.topics[topic] = partitions
            ids.target.leaders |= {(topic, number): (1, 0) for number in range(partitions)}
        return ids

    def said(self) -> Said:
        """The contradictions of all answers: exchange, path, answered value as text."""
        answers = RunFacts(self.ids(), self.outcomes)
        found = [*answers.logs.contradictions(), *answers.groups.contradictions()]
        return [(number, one.path, str(one.answered)) for number, one in found]

    # -- logs -------------------------------------------------------------------------------

    def produce(self, at_s: float, base: int, records: bytes, code: int = 0) -> int:
        partition = {"index": 0, "records": records}
        answered = {"index": 0, "error_code": code, "base_offset": base}
        return self.add(
            at_s, ApiKey.PRODUCE, 8,
            {"acks": -1, "topic_data": [{"name": "t", "partition_data": [partition]}]},
            {"responses": [{"name": "t", "partition_responses": [answered]}]},
        )  # fmt: skip

    def list_offsets(self, at_s: float, timestamp: int, offset: int) -> int:
        partition = {"partition_index": 0, "timestamp": timestamp}
        answered = {"partition_index": 0, "offset": offset}
        return self.add(
            at_s, ApiKey.LIST_OFFSETS, 4, {"topics": [{"name": "t", "partitions": [partition]}]},
            {"topics": [{"name": "t", "partitions": [answered]}]},
        )  # fmt: skip

    def fetch(
        self, at_s: float, offset: int, records: bytes, high: int, node: int = 1,
        size: int = 1 << 21, records_beside: bytes = b"", **more: Any,
    ) -> int:  # fmt: skip
        """A Fetch of a read_committed consumer. size: most bytes of the partition. records_beside:
        of partition 1. more: fields of the partition's answer."""
        asked = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": size}
        answered = {
            "partition_index": 0, "error_code": 0, "high_watermark": high,
            "last_stable_offset": high, "records": records, **more,
        }  # fmt: skip
        beside = {**answered, "partition_index": 1, "records": records_beside}
        answers = [answered, beside] if records_beside else [answered]
        return self.add(
            at_s, ApiKey.FETCH, 11,
            {"max_bytes": 1 << 25, "isolation_level": 1, "session_epoch": -1,
             "topics": [{"topic": "t", "partitions": [asked]}]},
            {"responses": [{"topic": "t", "partitions": answers}]}, {"responses": []}, node,
        )  # fmt: skip
