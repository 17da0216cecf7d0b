"""Compares the report's consumer lag with the request logs of brokers.

The truth of a group's partition comes from the request log alone. Its committed offset is the one
that OffsetCommit stored, or TxnOffsetCommit once EndTxn or a marker committed the transaction. Its
end is the highest one that a response or a written record shows. The brokers' responses to
OffsetFetch confirm both. A topic that was deleted, and not created again, has no lag.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdissect import Tables
from kdissect.protocol.api_keys import ApiKey
from kdissect.report import Options
from kdissect.report.sections import errors, lag, traffic
from kdissect.sql.requests import make_requests
from tests.truth.request_log import read_lines

LATEST = -1  # the timestamp in ListOffsets that asks for the end
Partition = tuple[str, int]
Commit = tuple[str, str, int]  # group, topic, partition


@dataclass
class LoggedOffsets:
    """The offsets at the end of a request log.

    A log has the requests of one broker in the order of their completion, then those of the next.
    A client numbers its requests over all brokers, so `commit` knows the later one.

    open: offsets of transactions whose end was not logged, by producer id. fetched: the answers to
    OffsetFetch that came after a group's last commit. names: of topics, by their ids.
    """

    committed: dict[Commit, int] = field(default_factory=dict)
    open: dict[int, dict[Commit, int]] = field(default_factory=dict)
    fetched: dict[Commit, int] = field(default_factory=dict)
    log_ends: dict[Partition, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    _numbers: dict[tuple[Commit, str], int] = field(default_factory=dict)

    def commit(self, offsets: dict[Commit, int], client_id: str = "", number: int = -1) -> None:
        for key, offset in offsets.items():
            if number >= self._numbers.get((key, client_id), -1):
                self._numbers[key, client_id] = number
                self.committed[key] = offset
                self.fetched.pop(key, None)

    def end_transaction(self, producer_id: int, is_committed: bool) -> None:
        offsets = self.open.pop(producer_id, {})
        if is_committed:
            self.commit(offsets)

    def extend(self, topic: str | None, partition: int, log_end: int) -> None:
        if topic and log_end >= 0:
            key = (topic, partition)
            self.log_ends[key] = max(self.log_ends.get(key, 0), log_end)

    def name(self, topic: dict[str, Any]) -> str | None:
        """The name of a topic in a message, which may have its id only."""
        return topic.get("name") or topic.get("topic") or self.names.get(topic.get("topicId", ""))


def read_logged_offsets(log: Path) -> LoggedOffsets:
    """The committed offsets and the ends of logs after the last request of a log."""
    found = LoggedOffsets()
    rows = [row for row in read_lines(log) if "request" in row]  # brokers before 2.6 log text
    for row in rows:
        if row["api_key"] == ApiKey.METADATA:
            for topic in row["response"].get("topics") or []:
                if topic.get("topicId"):
                    found.names[topic["topicId"]] = topic["name"]
    for row in rows:
        _apply(found, row)
    created_again = [name for name, count in Counter(found.names.values()).items() if count > 1]
    found.deleted -= set(created_again)
    produced = log.with_name(log.name.replace(".requests.", ".produced."))
    if produced.is_file():
        for row in read_lines(produced):
            if row.get("partition") is not None and row.get("offset") is not None:
                found.extend(row["topic"], row["partition"], row["offset"] + 1)
    return found


def _apply(found: LoggedOffsets, row: dict[str, Any]) -> None:
    api_key, request, response = row["api_key"], row["request"], row["response"]
    if api_key == ApiKey.OFFSET_COMMIT:
        offsets = _offsets(found, request, response)
        found.commit(offsets, row["client_id"], row["correlation_id"])
    elif api_key == ApiKey.TXN_OFFSET_COMMIT:
        offsets = _offsets(found, request, response)
        found.open.setdefault(request["producerId"], {}).update(offsets)
    elif api_key == ApiKey.END_TXN and response["errorCode"] == 0:
        found.end_transaction(request["producerId"], request["committed"])
    elif api_key == ApiKey.WRITE_TXN_MARKERS:
        for marker in request["markers"]:
            found.end_transaction(marker["producerId"], marker["transactionResult"])
    elif api_key == ApiKey.DELETE_TOPICS:
        topics = response["responses"]
        found.deleted |= {topic["name"] for topic in topics if not topic["errorCode"]}
    elif api_key == ApiKey.OFFSET_FETCH:
        for group in response.get("groups") or [{**response, "groupId": request.get("groupId")}]:
            for topic in group.get("topics") or []:
                for part in topic["partitions"]:
                    if part["errorCode"] == 0 and part["committedOffset"] >= 0:
                        key = (group["groupId"], found.name(topic) or "", part["partitionIndex"])
                        found.fetched[key] = part["committedOffset"]
    elif api_key == ApiKey.FETCH:
        for topic in response.get("responses") or []:
            for part in topic["partitions"]:
                found.extend(found.name(topic), part["partitionIndex"], part["highWatermark"])
    elif api_key == ApiKey.PRODUCE:
        for topic in (response or {}).get("responses") or []:
            for part in topic["partitionResponses"]:
                found.extend(found.name(topic), part["index"], part["baseOffset"] + 1)
    elif api_key == ApiKey.LIST_OFFSETS:
        latest = {
            (topic["name"], part["partitionIndex"])
            for topic in request["topics"]
            for part in topic["partitions"]
            if part["timestamp"] == LATEST
        }
        for topic in response["topics"]:
            for part in topic["partitions"]:
                if (topic["name"], part["partitionIndex"]) in latest:
                    found.extend(topic["name"], part["partitionIndex"], part.get("offset", -1))


def _offsets(found: LoggedOffsets, request: Any, response: Any) -> dict[Commit, int]:
    """The offsets of a commit that its broker accepted."""
    refused = {
        (found.name(topic), part["partitionIndex"])
        for topic in response["topics"]
        for part in topic["partitions"]
        if part["errorCode"]
    }
    return {
        (request["groupId"], name, part["partitionIndex"]): part["committedOffset"]
        for topic in request["topics"]
        if (name := found.name(topic)) is not None
        for part in topic["partitions"]
        if (name, part["partitionIndex"]) not in refused
    }


def lag_rows(tables: Tables) -> dict[Commit, dict[str, Any]]:
    """The rows of the report's table `lag` by group, topic and partition."""
    with tables.database() as database:
        make_requests(database)
        traffic.prepare(database)
        errors.prepare(database)
        if lag.collect(database, Options("4.0", None)) is None:
            return {}
        rows = database.rows("SELECT * FROM lag")
    return {(row["group_id"], row["topic"], row["partition"]): row for row in rows}


@dataclass
class Counts:
    """Partitions of groups: by what the report says of them, and how many OffsetFetch confirms.

    low: of those that are right, the ones whose lag is a lower bound below the truth.
    """

    right: int = 0
    low: int = 0
    undecided: int = 0
    confirmed: int = 0
    wrong: list[str] = field(default_factory=list)


def compare(tables: Tables, log: Path) -> Counts:
    """The lag of each partition that a group committed to, beside the log."""
    logged = read_logged_offsets(log)
    rows = lag_rows(tables)
    counts = Counts()
    for key, offset in logged.committed.items():
        row = rows.get(key)
        log_end = logged.log_ends.get(key[1:])
        if log_end is None:
            continue
        truth = max(log_end - offset, 0)
        if logged.fetched.get(key, offset) != offset:
            counts.wrong.append(f"{key}: the truth itself, {offset}, OffsetFetch said otherwise")
        counts.confirmed += key in logged.fetched
        if key[1] in logged.deleted and row is None:
            counts.right += 1
        elif key[1] in logged.deleted:
            counts.wrong.append(f"{'/'.join(map(str, key))}: a row of a deleted topic")
        elif row is None or row["lag_at_end"] is None:
            counts.undecided += 1
        elif row["last_committed"] == offset and row["lag_at_end"] <= truth:
            counts.right += 1
            counts.low += row["lag_at_end"] < truth
        else:
            told = f"{row['last_committed']}, lag {row['lag_at_end']}"
            counts.wrong.append(f"{'/'.join(map(str, key))}: {told} for {offset}, lag {truth}")
    return counts
