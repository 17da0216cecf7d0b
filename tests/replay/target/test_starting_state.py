"""The state that the requests of a plan need, from captures and saved files, and at a target."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange, Workload
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.target.state import starting_facts
from kdissect.replay.workload.saved_file import save
from kdissect.replay.workload.source import gather_facts, load_workload
from tests.builders import workloads
from tests.builders.messages import numbered_batch as batch
from tests.conftest import CAPTURES
from tests.processes import Run
from tests.replay.made import NODE, FakeBroker, answering
from tests.replay.other_cluster import everything

SOURCE = CAPTURES / "sarama.pcap.gz"


def second_part() -> Workload:
    """The exchanges from the first Fetch with records on: topics and records were there before."""
    whole = load_workload([str(SOURCE)])
    assert facts_of(whole) == {}
    kinds = Counter(kind for kind, *_ in starting_facts(make_plan(whole)))
    assert kinds["topic"] == 4
    assert kinds["log"]
    return load_workload([str(SOURCE)], from_ns=workloads.time_of_first_records(whole))


def facts_of(made: Workload) -> dict[tuple[Any, ...], int]:
    made.facts = gather_facts(made.connections)
    return starting_facts(make_plan(made, everything()))


def test_records_that_no_request_wrote_were_there_before() -> None:
    """A Fetch brings offsets 0 to 4; the capture wrote those from 3 on, or all. After a Produce
    with acks=0 the producer of fetched records is unknown."""
    read = workloads.exchange(
        1, workloads.fetch(0), 2, 3, workloads.fetched(0, batch(0, 3) + batch(3, 2))
    )
    for written, found in (
        ((workloads.produce(0, count=2), workloads.produced(0, 3)), {("log", "t", 0): 3}),
        ((workloads.produce(0, count=5), workloads.produced(0, 0)), {}),
        ((workloads.produce(0, acks=0), None), {}),
    ):
        request, answer = written
        facts = facts_of(workloads.workload([workloads.exchange(0, request, 0, 1, answer)], [read]))
        assert {each: count for each, count in facts.items() if each[0] == "log"} == found


def test_offsets_that_no_request_committed_were_there_before() -> None:
    """Only an OffsetFetch before the first OffsetCommit shows an earlier commit."""
    part = {"partition_index": 0, "committed_offset": 7}
    topics = [{"name": "t", "partitions": [part]}]
    names = [{"name": "t", "partition_indexes": [0]}]

    def asked(at_ms: int) -> Exchange:
        told = {"topics": topics}
        return workloads.call(ApiKey.OFFSET_FETCH, 7, at_ms, told=told, group_id="g", topics=names)

    def commit(at_ms: int) -> Exchange:
        return workloads.call(ApiKey.OFFSET_COMMIT, 8, at_ms, group_id="g", topics=topics)

    wanted = "commit", "g", "t", 0
    assert facts_of(workloads.workload([asked(0), commit(2)]))[wanted] == 7
    assert wanted not in facts_of(workloads.workload([commit(0), asked(2)]))


def test_a_saved_file_began_with_the_same_state(tmp_path: Path) -> None:
    """The end of a capture began with topics and records of the first half."""
    part = second_part()
    found = facts_of(part)
    assert {kind for kind, *_ in found} >= {"topic", "log"}
    path = tmp_path / "part.replay"
    save(part, str(path))
    assert facts_of(load_workload([str(path)])) == found


def test_missing_state_is_listed_before_the_first_request(
    kdissect: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--dry-run counts the topics that an empty broker lacks, and stderr names them."""
    monkeypatch.setattr("kdissect.replay.target.settling.WAIT_S", 0.0)
    part = second_part()
    path = str(tmp_path / "part.replay")
    save(part, path)
    plan = kdissect("replay", path, "--dry-run")
    count = sum(kind == "topic" for kind, *_ in starting_facts(make_plan(part)))
    assert f"the target needs {count} topics" in plan.stdout

    def body_of(api_key: int, request: dict[str, Any]) -> dict[str, Any] | None:
        return {"brokers": [NODE]} if api_key == ApiKey.METADATA else None

    with FakeBroker(answering(body_of)).running() as server:
        to = ("--to", f"127.0.0.1:{server.port}", "--pace", "max")
        done = kdissect("replay", path, *to, "--api", "Metadata", "--api", "ListOffsets")
    [line, *_] = [each for each in done.stderr.splitlines() if "lacks" in each]
    assert line.startswith("kdissect: answers will differ: the target lacks topic sarama-")
    assert line.replace("kdissect: ", "note: ") in done.stdout
