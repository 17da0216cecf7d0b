"""The state that the requests of a plan need, from captures and saved files, and at a target."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kdissect.cli import app
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange, Workload
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.target.state import LogContent, State, starting_state
from kdissect.replay.workload.saved_file import save
from kdissect.replay.workload.source import gather_facts, load_workload
from tests.builders.messages import numbered_batch as batch
from tests.builders.workloads import (
    call,
    exchange,
    fetch,
    fetched,
    produce,
    produced,
    time_of_first_records,
    workload,
)
from tests.conftest import CAPTURES
from tests.replay.made import NODE, FakeBroker, answering
from tests.replay.other_cluster import everything

SOURCE = CAPTURES / "sarama.pcap.gz"


def second_part() -> Workload:
    """The exchanges from the first Fetch with records on: topics and records were there before."""
    whole = load_workload([str(SOURCE)])
    assert state_of(whole) == State()
    only_read = starting_state(make_plan(whole))
    assert len(only_read.topics) == 4
    assert only_read.logs
    return load_workload([str(SOURCE)], from_ns=time_of_first_records(whole))


def state_of(made: Workload) -> State:
    made.facts = gather_facts(made.connections)
    return starting_state(make_plan(made, everything()))


def test_records_that_no_request_wrote_were_there_before() -> None:
    """A Fetch brings offsets 0 to 4; the capture wrote those from 3 on, or all. After a Produce
    with acks=0 the producer of fetched records is unknown."""
    read = exchange(1, fetch(0), 2, 3, fetched(0, batch(0, 3) + batch(3, 2)))
    for written, found in (
        ((produce(0, count=2), produced(0, 3)), {("t", 0): LogContent(0, 3)}),
        ((produce(0, count=5), produced(0, 0)), {}),
        ((produce(0, acks=0), None), {}),
    ):
        request, answer = written
        assert state_of(workload([exchange(0, request, 0, 1, answer)], [read])).logs == found


def test_offsets_that_no_request_committed_were_there_before() -> None:
    """Only an OffsetFetch before the first OffsetCommit shows an earlier commit."""
    part = {"partition_index": 0, "committed_offset": 7}
    topics = [{"name": "t", "partitions": [part]}]
    names = [{"name": "t", "partition_indexes": [0]}]

    def asked(at_ms: int) -> Exchange:
        told = {"topics": topics}
        return call(ApiKey.OFFSET_FETCH, 7, at_ms, told=told, group_id="g", topics=names)

    def commit(at_ms: int) -> Exchange:
        return call(ApiKey.OFFSET_COMMIT, 8, at_ms, group_id="g", topics=topics)

    assert state_of(workload([asked(0), commit(2)])).commits == {("g", "t", 0): 7}
    assert state_of(workload([commit(0), asked(2)])).commits == {}


def test_a_saved_file_began_with_the_same_state(tmp_path: Path) -> None:
    """The end of a capture began with topics and records of the first half."""
    part = second_part()
    found = state_of(part)
    assert found.topics
    assert found.logs
    path = tmp_path / "part.replay"
    save(part, str(path))
    assert state_of(load_workload([str(path)])) == found


def test_missing_state_is_listed_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--dry-run counts the topics that an empty broker lacks, and stderr names them."""
    monkeypatch.setattr("kdissect.replay.target.settling.WAIT_S", 0.0)
    part = second_part()
    path = str(tmp_path / "part.replay")
    save(part, path)
    plan = CliRunner().invoke(app, ["replay", path, "--dry-run"])
    assert f"the target needs {len(starting_state(make_plan(part)).topics)} topics" in plan.stdout

    def body_of(api_key: int, request: dict[str, Any]) -> dict[str, Any] | None:
        return {"brokers": [NODE]} if api_key == ApiKey.METADATA else None

    with FakeBroker(answering(body_of)).running() as server:
        done = CliRunner().invoke(
            app, ["replay", path, "--to", f"127.0.0.1:{server.port}", "--pace", "max",
                  "--api", "Metadata", "--api", "ListOffsets"],
        )  # fmt: skip
    [line, *_] = [each for each in done.stderr.splitlines() if "lacks" in each]
    assert line.startswith("kdissect: answers will differ: the target lacks topic sarama-")
    assert line.replace("kdissect: ", "note: ") in done.stdout
