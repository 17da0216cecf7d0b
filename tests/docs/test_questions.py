"""The answers of docs/questions.md against the request logs of the brokers in these captures."""

import csv
import functools
import gzip
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import console
from tests.conftest import ROOT
from tests.material import CAPTURES as LOGS
from tests.material import needs_material

PAGE = (ROOT / "docs" / "questions.md").read_text()
SECTIONS = dict(re.findall(r"^## (\d+)\. .*?\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))

pytestmark = needs_material

Row = dict[str, Any]


@functools.cache
def log(name: str) -> list[Row]:
    """The requests that the brokers of a capture logged."""
    with gzip.open(LOGS / f"{name}.requests.jsonl.gz", "rt") as stream:
        return [json.loads(line) for line in stream]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The output of a question's command, which the page shows as a terminal of 100 columns has it;
    on a wide one, where `show` cuts nothing."""
    folder = tmp_path_factory.mktemp("questions")
    console.prepare(folder, PAGE)

    def run(number: int) -> str:
        ((command, shown),) = console.commands(SECTIONS[str(number)])
        assert console.run_here(command, folder) == shown
        return console.run_here(command, folder, width=250) if "…" in shown else shown

    return run


def table(text: str) -> Iterator[Row]:
    """Rows of the text that `kdissect sql` prints."""
    head, dashes, *lines = text.splitlines()
    spans = [(found.start(), found.end()) for found in re.finditer("-+", dashes)]
    names = [head[start:end].strip() for start, end in spans]
    for line in lines:
        yield dict(zip(names, [line[start:end].strip() for start, end in spans], strict=True))


def every(value: Any, name: str) -> Iterator[Any]:
    """All values of a field, however deep."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == name:
                yield each
            else:
                yield from every(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from every(each, name)


def test_each_question_has_one_command() -> None:
    """Ten, and one command each."""
    assert list(SECTIONS) == [str(number) for number in range(1, 11)]
    for number, text in SECTIONS.items():
        assert len(list(console.commands(text))) == 1, number


def test_versions_that_kafka_4_removed(answer: Callable[[int], str]) -> None:
    """1: the clients in the log that used Produce below 3 or Fetch below 4, with their counts."""
    wanted: Counter[tuple[str, str, int]] = Counter()
    for row in log("old_clients/java_0_10_2_2"):
        lowest = {0: 3, 1: 4}.get(row["api_key"], 0)
        if row["api_version"] < lowest:
            api = row["api_name"].title()
            wanted[row["client_id"], api, row["api_version"]] += 1
    found: dict[tuple[str, str, int], int] = {}
    client = ""
    for line in answer(1).splitlines():
        if match := re.match(r"breaks +\S+  (\S+)", line):
            client = match[1]
        elif match := re.match(r" +(\w+) (\d+), (\d+) times: 4.0 takes", line):
            found[client, match[1], int(match[2])] = int(match[3])
    assert found == wanted
    assert len({client for client, _, _ in found}) == 6


def test_no_version_vanishes(answer: Callable[[int], str]) -> None:
    """2: versions and counts of the log; all decoded."""
    versions: dict[str, set[int]] = defaultdict(set)
    counts: Counter[str] = Counter()
    for row in log("other_clients/sarama"):
        name = row["api_name"].replace("_", "").lower()
        versions[name].add(row["api_version"])
        counts[name] += 1
    rows = list(table(answer(2)))
    assert len(rows) == 6
    for row in rows:
        name = row["api_name"].lower()
        assert set(json.loads(row["versions"])) == versions[name]
        assert int(row["n"]) == counts[name]
        assert row["undecoded"] == "0"


def test_topics_of_new_fetches(answer: Callable[[int], str]) -> None:
    """3: the log's ids of requests and responses, with the names that Metadata answers gave."""
    rows = log("other_clients/librdkafka")
    names: dict[str, str] = {}
    for row in rows:
        for topics in every(row["response"], "topics"):
            for topic in topics or ():
                if topic.get("name") and topic.get("topicId"):
                    names[topic["topicId"]] = topic["name"]
    asked: Counter[tuple[str, int, str]] = Counter()
    for row in rows:
        if row["api_key"] == 1 and row["api_version"] >= 13:
            ids = {*every(row["request"], "topicId"), *every(row["response"], "topicId")}
            asked.update((row["client_id"], row["api_version"], names[each]) for each in ids)
    found = {
        (row["client_id"], int(row["api_version"]), row["topic"]): int(row["n"])
        for row in table(answer(3))
    }
    assert found.keys() == asked.keys()
    for place, count in found.items():  # an incremental Fetch names only what it changes
        assert count >= asked[place]


def produced(rows: list[Row]) -> Counter[tuple[str, str]]:
    """Bytes of record data by client and topic in the log's Produce requests."""
    sizes: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row["api_key"] == 0:
            for topic in row["request"]["topicData"]:
                for part in topic["partitionData"]:
                    sizes[row["client_id"], topic["name"]] += part["recordsSizeInBytes"]
    return sizes


def test_writers_of_a_topic_are_those_of_the_log(answer: Callable[[int], str]) -> None:
    """4: clients, addresses and bytes of the log."""
    rows = log("other_clients/librdkafka")
    wanted = {
        (client, size) for (client, topic), size in produced(rows).items() if topic == "rd-events"
    }
    found = list(table(answer(4)))
    assert {(row["client_id"], int(row["bytes"])) for row in found} == wanted
    addresses = {row["client_id"]: row["client"][0] for row in rows}
    assert all(row["client_ip"] == addresses[row["client_id"]] for row in found)


def test_requests_inside_tls_are_those_of_the_log(answer: Callable[[int], str]) -> None:
    """5: each OffsetFetch of the log on the TLS listener: port, version, client, group."""
    wanted = Counter(
        (row["client"][1], row["api_version"], row["client_id"], row["request"]["groupId"])
        for row in log("tls/tls13")
        if row["api_key"] == 9 and row["broker"][1] == 9095
    )
    found: Counter[tuple[int, int, str, str]] = Counter()
    for line in answer(5).splitlines():
        port = re.search(r":(\d+) +→ +127.0.0.1:9095", line)
        said = re.search(r"(\S+) +OffsetFetch v(\d+) .*group (\S+)", line)
        assert port
        assert said
        found[int(port[1]), int(said[2]), said[1], said[3]] += 1
    assert found == wanted
    assert wanted.total() == 10


def test_long_polls_are_those_of_the_log(answer: Callable[[int], str]) -> None:
    """6: long polls are those of the log; answers take as long as the broker says."""
    polls: Counter[str] = Counter()
    times: dict[str, list[float]] = defaultdict(list)
    for row in log("other_clients/librdkafka"):
        empty = row["api_key"] == 1 and not sum(every(row["response"], "recordsSizeInBytes"))
        if empty and row["total_time_ms"] >= 0.5 * row["request"]["maxWaitMs"]:
            polls[row["client_id"]] += 1
        elif row["api_key"] not in (11, 14) and not row["forwarded"]:
            times[row["client_id"]].append(row["total_time_ms"])
    rows = list(csv.DictReader(answer(6).splitlines()))
    assert {
        row["client_id"]: int(row["long_polls"]) for row in rows if int(row["long_polls"])
    } == polls
    checked = 0
    for row in rows:
        known = times[row["client_id"]]
        if len(known) >= 20 and row["client_id"].startswith("rd"):
            assert float(row["p50"]) == pytest.approx(statistics.median(known), rel=0.3, abs=1)
            checked += 1
    assert checked >= 3


def test_errors_are_those_of_the_log(answer: Callable[[int], str]) -> None:
    """7: every answer of the log with a code other than 0 anywhere."""
    wanted = Counter(
        (row["client"][1], row["api_name"].replace("_", "").lower(), row["api_version"])
        for row in log("other_clients/librdkafka")
        if not row["forwarded"]
        and any(any(every(row["response"], name)) for name in ("errorCode", "partitionErrorCode"))
    )
    found: Counter[tuple[int, str, int]] = Counter()
    for line in answer(7).splitlines():
        port = re.search(r":(\d+) +→", line)
        said = re.search(r" (\w+) v(\d+) .*! [A-Z_]{5}", line)
        assert port
        assert said
        found[int(port[1]), said[1].lower(), int(said[2])] += 1
    assert found == wanted


def test_rebalances_are_those_of_the_log(answer: Callable[[int], str]) -> None:
    """8: generations, members and joins of the log, in their order."""
    rows = [
        row
        for row in log("other_clients/librdkafka")
        if row["request"].get("groupId") == "rd-classic"
    ]
    joins = [row for row in rows if row["api_key"] == 11]
    members = {
        join["response"]["generationId"]: len(join["response"]["members"])
        for join in joins
        if join["response"]["members"]
    }
    found = list(table(answer(8)))
    rebalances = [row for row in found if row["event"] == "rebalance"]
    assert {
        int(row["generation"]): int(re.findall(r"of (\d+) member", row["detail"])[0])
        for row in rebalances
    } == members
    assert sum(row["event"] == "join" for row in found) == len(joins)
    assert sum(row["event"] == "sync" for row in found) == sum(row["api_key"] == 14 for row in rows)
    assert "rd-c0 joined" in rebalances[1]["detail"]


def test_transactions_end_as_in_the_log(answer: Callable[[int], str]) -> None:
    """9: each EndTxn of the log, in its order, with the producer's id."""
    ends = [row["request"] for row in log("old_clients/java_2_0_1") if row["api_key"] == 26]
    wanted = [
        (
            end["transactionalId"],
            str(end["producerId"]),
            str(end["producerEpoch"]),
            "commit" if end["committed"] else "abort",
        )
        for end in ends
    ]
    columns = ("transactional_id", "producer_id", "producer_epoch", "outcome")
    assert [tuple(row[name] for name in columns) for row in table(answer(9))] == wanted
    assert len(wanted) == 4


def test_bytes_by_codec_are_those_of_the_log(answer: Callable[[int], str]) -> None:
    """10: bytes of the log by client and topic; the clients were named after their codecs."""
    found = list(table(answer(10)))
    sizes = {(row["client_id"], row["topic"]): int(row["bytes"]) for row in found}
    assert sizes == produced(log("old_clients/java_2_0_1"))
    for row in found:
        if row["client_id"].startswith("java"):
            assert row["client_id"] == f"java-2.0.1-{row['codec']}"


def test_the_page_is_in_the_readme() -> None:
    """A newcomer finds it."""
    assert "docs/questions.md" in Path(ROOT, "README.md").read_text()
