"""Finds committed offsets, and their metadata, that differ from what the run has committed.

A group's committed offset of a partition is the one of the last OffsetCommit that the target
accepted. While commits are in flight, each of them may be the last one. A transaction commits its
offsets some time after EndTxn, so an offset of TxnOffsetCommit is possible from then on. Before the
first commit, two answers in a row say the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import FOREVER_NS, Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_Key = tuple[str, str, int]  # group, topic, partition, in the target's terms
_COMMITS = frozenset({ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT})
_REMOVALS = frozenset({ApiKey.OFFSET_DELETE, ApiKey.DELETE_GROUPS, ApiKey.DELETE_TOPICS})
_APIS = _COMMITS | _REMOVALS | {ApiKey.OFFSET_FETCH}


class _Commit(NamedTuple):
    """end_ns: when it was answered; far away if it may take effect later, or never."""

    sent_ns: int
    end_ns: int
    offset: int
    metadata: str


class _FetchedCommit(NamedTuple):
    """partition: the struct of an answer, at path."""

    outcome: Outcome
    path: str
    partition: Body

    @property
    def offset(self) -> int:
        return int(self.partition["committed_offset"])

    @property
    def metadata(self) -> str:
        return self.partition["metadata"] or ""


class CommittedOffsets:
    """Commits and answers to OffsetFetch of a run."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._commits: dict[_Key, list[_Commit]] = defaultdict(list)
        self._fetched: dict[_Key, list[_FetchedCommit]] = defaultdict(list)
        self._has_removals = False

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is None or api_key not in _APIS:
            return
        if api_key in _REMOVALS:
            self._has_removals = True
            return
        request = decoded(outcome.sent, "request", api_key, outcome.api_version)
        answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
        if request is None:
            return
        body = {} if answer is None else answer.body
        if api_key in _COMMITS:
            self._commit(outcome, api_key, request.body, body)
        else:
            self._fetch(outcome, request.body, body)

    def _commit(self, outcome: Outcome, api_key: int, request: Body, answer: Body) -> None:
        codes = {
            (self._ids.target.topic_name(topic), partition["partition_index"]): partition[
                "error_code"
            ]
            for topic in entries(answer.get("topics"))
            for partition in entries(topic["partitions"])
        }
        for topic in entries(request["topics"]):
            for partition in entries(topic["partitions"]):
                log = self._ids.target.topic_name(topic), partition["partition_index"]
                commits = self._commits[request["group_id"], *log]
                code = codes.get(log, -1)  # -1: no answer, so the commit may have taken effect
                is_done = code == 0 and api_key == ApiKey.OFFSET_COMMIT
                end_ns = outcome.answered_ns if is_done else FOREVER_NS
                if code <= 0:
                    offset, metadata = partition["committed_offset"], _metadata_of(partition)
                    commits.append(_Commit(outcome.sent_ns, end_ns, offset, metadata))
                times = partition.get("commit_timestamp", -1), request.get("retention_time_ms", -1)
                if max(times) >= 0:  # it expires by its own times
                    commits.append(_Commit(outcome.sent_ns, FOREVER_NS, -1, ""))

    def _fetch(self, outcome: Outcome, request: Body, answer: Body) -> None:
        groups = [("", request.get("group_id") or "", answer)]
        if "groups" in answer:
            groups = [
                (f"groups[{at}].", each["group_id"], each)
                for at, each in enumerate(entries(answer["groups"]))
            ]
        for start, group, body in groups:
            for i, topic in enumerate(entries(body.get("topics"))):
                for j, partition in enumerate(entries(topic["partitions"])):
                    if not partition["error_code"]:
                        path = f"{start}topics[{i}].partitions[{j}]"
                        key = (
                            group,
                            self._ids.target.topic_name(topic),
                            partition["partition_index"],
                        )
                        self._fetched[key].append(_FetchedCommit(outcome, path, partition))

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for key, fetched in self._fetched.items():
            commits = self._commits.get(key, [])
            first_ns = min((commit.end_ns for commit in commits), default=FOREVER_NS)
            for fetch in fetched:
                is_known = first_ns <= fetch.outcome.sent_ns  # no commit from before the run counts
                possible = set(_possible(commits, fetch.outcome))
                if self._has_removals:
                    possible.add(-1)
                if is_known and fetch.offset not in possible:
                    wanted = " or ".join(map(str, sorted(possible)))
                    note = "the last offset that the run has committed"
                    path = f"{fetch.path}.committed_offset"
                    add(fetch.outcome, path, wanted, fetch.offset, note)
                _check_metadata(fetch, commits, add)
            for first, second in pairwise(fetched):
                if not self._has_removals and second.outcome.sent_ns < first_ns:
                    _check_same(first, second, commits, add)


def _metadata_of(committed: Body) -> str:
    """The metadata in a request: brokers take null for an empty text."""
    return committed.get("committed_metadata") or ""


def _check_metadata(fetch: _FetchedCommit, commits: list[_Commit], add: Add) -> None:
    texts = {
        each.metadata
        for each in commits
        if each.offset == fetch.offset >= 0 and each.sent_ns <= fetch.outcome.answered_ns
    }
    if texts and fetch.metadata not in texts:
        note = "the run has committed this offset with other metadata"
        wanted = " or ".join(sorted(texts))
        add(fetch.outcome, f"{fetch.path}.metadata", wanted, fetch.metadata, note)


def _check_same(
    first: _FetchedCommit, second: _FetchedCommit, commits: list[_Commit], add: Add
) -> None:
    begin_ns, end_ns = first.outcome.sent_ns, second.outcome.answered_ns
    is_later = 0 <= first.outcome.answered_ns <= second.outcome.sent_ns
    if not is_later or any(each.sent_ns <= end_ns and begin_ns <= each.end_ns for each in commits):
        return
    for name, value in first.partition.items():
        later = second.partition.get(name, value)
        if value != later:
            note = "the next answer says so, and nothing was committed in between"
            add(first.outcome, f"{first.path}.{name}", later, value, note)


def _possible(commits: list[_Commit], fetch: Outcome) -> Iterator[int]:
    """Offsets of the commits that may be the last one when a fetch is answered."""
    done = [each for each in commits if each.end_ns <= fetch.sent_ns]
    last_ns = max((each.sent_ns for each in done), default=-1)
    for each in commits:
        if each.sent_ns <= fetch.answered_ns and each.end_ns >= last_ns:
            yield each.offset
