"""Compares the state of a target after a run with the claims of its answers, and of other runs.

An answer claims something about the end: an acknowledged batch is in its log with its records, a
committed offset is the group's, an ended transaction has ended and its records are visible or not,
a created topic exists with its configs. Later requests to the same resource may change that, and a
request without an answer leaves it unknown. Only claims that nothing later touches are checked.

The claims also say what an answer in the middle of the run may show: a transaction that the run has
ended is not described as Ongoing. A config that the run has set is right as it was set, although
the captured broker showed it later.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.batch_headers import headers
from kdissect.replay.comparison.records import RecordCount, content_digest
from kdissect.replay.model import Difference, Outcome, RunFinding
from kdissect.replay.target.end_state import EndState, Log, LogContent
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import TOPIC_RESOURCE, decoded, entries

_KIND = "end state"
_BY_ANSWERS = "by the answers of this run"
_BY_REFERENCE = "by the reference"
_MANY = 1 << 40  # messages before magic 2 do not say how many they wrap
# The leader appended the batch, or may have: a timeout, too few replicas after it, a repetition.
MAYBE_APPENDED = frozenset(
    {
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
    }
)
_MARKER_NS = 5_000_000_000  # until offsets of a committed transaction are visible
_SHRINKING = ("cleanup.policy", "retention.bytes", "retention.ms", "local.retention.")
_SET = 0  # operation of IncrementalAlterConfigs
_ENDED = ("Empty", "CompleteCommit", "CompleteAbort")

Body = dict[str, Any]
Commit = tuple[str, str, int]  # group, topic, partition


@dataclass(slots=True)
class _Acknowledged:
    """A batch that the target acknowledged. digest: of its records, None if unknown. is_aborted:
    whether its transaction was aborted, None if that is unknown."""

    records: int
    digest: int | None
    is_aborted: bool | None = False


@dataclass(slots=True)
class _LogClaim:
    """Acknowledged batches of a log by base offset. unknown: records that may be there besides.
    start: offset by DeleteRecords, -1 none."""

    batches: dict[int, _Acknowledged] = field(default_factory=dict)
    unknown: int = 0
    start: int = -1


@dataclass(slots=True)
class _TopicClaim:
    """A topic: exists, partition count (-1 unknown), configs (None for an unknown value)."""

    exists: bool
    partitions: int = -1
    configs: dict[str, str | None] = field(default_factory=dict)


class Claims:
    """Claims of a run's answers about the state after it, by the target's names.

    By step: answers that contradict earlier claims; and (resource, config) by the capture's names
    of the configs that answers show as the run has set them.
    """

    def __init__(self, ids: IdMap, outcomes: Iterable[Outcome]) -> None:
        self._ids = ids
        self.contradicted: dict[int, list[Difference]] = defaultdict(list)
        self.shown_configs: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        self._logs: dict[Log, _LogClaim] = defaultdict(_LogClaim)
        self._topics: dict[str, _TopicClaim] = {}
        # sent_ns, last time at which it took effect, offset, transactional id
        self._commits: dict[Commit, list[tuple[int, int, int, str]]] = defaultdict(list)
        self._open_groups: set[str] = set()  # with commits whose effect is unknown
        self._deleted_groups: set[str] = set()
        self._commits_of: dict[str, list[tuple[Commit, int]]] = defaultdict(list)  # transactions
        self._batches_of: dict[str, list[_Acknowledged]] = defaultdict(list)
        self._transactions: dict[str, str] = {}  # "" unknown
        self._ended_ns: dict[str, int] = {}  # when the state in `_transactions` was answered
        collect: dict[int, Callable[[Outcome, Body, Body | None], None]] = {
            ApiKey.PRODUCE: self._produce,
            ApiKey.DELETE_RECORDS: self._delete_records,
            ApiKey.METADATA: self._metadata,
            ApiKey.CREATE_TOPICS: self._create_topics,
            ApiKey.DELETE_TOPICS: self._delete_topics,
            ApiKey.CREATE_PARTITIONS: self._create_partitions,
            ApiKey.ALTER_CONFIGS: self._alter_configs,
            ApiKey.INCREMENTAL_ALTER_CONFIGS: self._alter_configs,
            ApiKey.DESCRIBE_CONFIGS: self._describe_configs,
            ApiKey.OFFSET_COMMIT: self._offset_commit,
            ApiKey.TXN_OFFSET_COMMIT: self._txn_offset_commit,
            ApiKey.OFFSET_DELETE: self._forget_group,
            ApiKey.DELETE_GROUPS: self._forget_group,
            ApiKey.INIT_PRODUCER_ID: self._init_producer_id,
            ApiKey.ADD_PARTITIONS_TO_TXN: self._begin,
            ApiKey.ADD_OFFSETS_TO_TXN: self._begin,
            ApiKey.END_TXN: self._end_txn,
            ApiKey.DESCRIBE_TRANSACTIONS: self._describe_transactions,
        }
        for outcome in sorted(outcomes, key=_completed_ns):
            api_key = outcome.step.exchange.api_key
            if outcome.sent is None or api_key not in collect:
                continue
            request = decoded(outcome.sent, "request", api_key, outcome.api_version)
            answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
            if request is not None:
                collect[api_key](outcome, request.body, None if answer is None else answer.body)

    @property
    def gone(self) -> set[str]:
        """Topics that the run deleted at last."""
        return {name for name, claim in self._topics.items() if not claim.exists}

    @property
    def groups(self) -> set[str]:
        """Groups with committed offsets."""
        return {commit[0] for commit in self._commits}

    @property
    def transactional_ids(self) -> set[str]:
        """Transactional ids whose state the answers decide."""
        return {name for name, state in self._transactions.items() if state}

    # -- logs and topics ------------------------------------------------------------------------

    def _results(self, body: Body | None, topics: str, inner: str) -> dict[Log, Body]:
        """The partitions of an answer."""
        return {
            (self._ids.target.topic_name(topic), _number(each)): each
            for topic in entries(None if body is None else body.get(topics))
            for each in entries(topic[inner])
        }

    def _produce(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        results = self._results(answer, "responses", "partition_responses")
        owner = request.get("transactional_id") or ""
        if owner:
            self._transactions[owner] = ""
        for topic in entries(request["topic_data"]):
            for partition in entries(topic["partition_data"]):
                log = self._ids.target.topic_name(topic), partition["index"]
                data, claim, result = partition["records"] or b"", self._logs[log], results.get(log)
                batches = list(headers(data))
                count = sum(max(each.record_count, 0) for each in batches)
                if any(each.magic != 2 for each in batches):
                    count = _MANY
                code = None if result is None else result["error_code"]
                if code is None or code in MAYBE_APPENDED or (code == 0 and count == _MANY):
                    claim.unknown += count
                elif code == 0 and result is not None:
                    if result["base_offset"] < 0:
                        claim.unknown += count
                        continue
                    digest = content_digest(data) if len(batches) == 1 else None
                    made = _Acknowledged(count, digest, None if owner else False)
                    claim.batches[result["base_offset"]] = made
                    if owner:
                        self._batches_of[owner].append(made)

    def _delete_records(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for log, result in self._results(answer, "topics", "partitions").items():
            if result["error_code"] == 0:
                self._logs[log].start = result["low_watermark"]
        for topic in entries(request["topics"]) if answer is None else ():
            for each in entries(topic["partitions"]):
                self._logs.pop((topic["name"], each["partition_index"]), None)

    def _metadata(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        """A request that creates topics may bring back one that was deleted."""
        if request.get("allow_auto_topic_creation", True):
            for topic in entries(request["topics"]):
                name = self._ids.target.topic_name(topic)
                if name in self._topics and not self._topics[name].exists:
                    del self._topics[name]

    def _create_topics(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        if request.get("validate_only"):
            return
        results = {} if answer is None else {each["name"]: each for each in answer["topics"]}
        for topic in entries(request["topics"]):
            result = results.get(topic["name"])
            if result is None:
                self._topics.pop(topic["name"], None)
            elif result["error_code"] == 0:
                count = len(entries(topic["assignments"])) or topic["num_partitions"]
                configs = {each["name"]: each["value"] for each in entries(topic["configs"])}
                self._topics[topic["name"]] = _TopicClaim(True, count, configs)

    def _delete_topics(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for result in entries(None if answer is None else answer["responses"]):
            name = self._ids.target.topic_name(result)
            if result["error_code"] == 0 and name:
                self._topics[name] = _TopicClaim(False)
                self._forget_topic(name)
        if answer is None:
            for name in [
                *entries(request.get("topic_names")),
                *map(self._ids.target.topic_name, entries(request.get("topics"))),
            ]:
                self._topics.pop(name, None)
                self._forget_topic(name)

    def _forget_topic(self, name: str) -> None:
        for log in [log for log in self._logs if log[0] == name]:
            del self._logs[log]
        for commit in [commit for commit in self._commits if commit[1] == name]:
            del self._commits[commit]  # the group's offsets go with the topic

    def _create_partitions(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        if request["validate_only"]:
            return
        results = {} if answer is None else {each["name"]: each for each in answer["results"]}
        for topic in entries(request["topics"]):
            claim, result = self._topics.get(topic["name"]), results.get(topic["name"])
            if claim is not None and (result is None or result["error_code"] == 0):
                claim.partitions = -1 if result is None else topic["count"]

    def _alter_configs(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        if request["validate_only"]:
            return
        refused = {
            each["resource_name"]
            for each in entries(None if answer is None else answer["responses"])
            if each["error_code"]
        }
        is_incremental = outcome.step.exchange.api_key == ApiKey.INCREMENTAL_ALTER_CONFIGS
        for resource in entries(request["resources"]):
            name = resource["resource_name"]
            if resource["resource_type"] != TOPIC_RESOURCE or name in refused:
                continue
            claim = self._topics.setdefault(name, _TopicClaim(True))
            if not is_incremental:
                claim.configs = dict.fromkeys(claim.configs)
            for each in entries(resource["configs"]):
                is_set = each.get("config_operation", _SET) == _SET and answer is not None
                claim.configs[each["name"]] = each["value"] if is_set else None

    def _describe_configs(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for result in entries(None if answer is None else answer["results"]):
            name, is_topic = result["resource_name"], result["resource_type"] == TOPIC_RESOURCE
            claim = self._topics.get(name) if is_topic else None
            resource = f"topic {self._ids.captured_topic_name(name)}"
            self.shown_configs[outcome.step.number].update(
                (resource, each["name"])
                for each in entries(result["configs"])
                if claim is not None
                and claim.configs.get(each["name"]) == each["value"] is not None
            )

    # -- groups and transactions ----------------------------------------------------------------

    def _committed(self, request: Body, answer: Body | None) -> Iterator[tuple[Commit, int]]:
        """Offsets that a response accepted."""
        group = request["group_id"]
        self._deleted_groups.discard(group)
        results = self._results(answer, "topics", "partitions")
        for topic in entries(request["topics"]):
            for partition in entries(topic["partitions"]):
                log = self._ids.target.topic_name(topic), partition["partition_index"]
                result = results.get(log)
                if result is None:
                    self._open_groups.add(group)
                elif result["error_code"] == 0:
                    yield (group, *log), partition["committed_offset"]

    def _offset_commit(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for commit, offset in self._committed(request, answer):
            self._commits[commit].append((outcome.sent_ns, outcome.answered_ns, offset, ""))

    def _txn_offset_commit(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        name = request["transactional_id"]
        self._transactions[name] = ""
        self._commits_of[name] += self._committed(request, answer)

    def _forget_group(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        groups = set(entries(request.get("groups_names"))) or {request.get("group_id")}
        for commit in [commit for commit in self._commits if commit[0] in groups]:
            del self._commits[commit]
        if "groups_names" in request:
            results = entries(None if answer is None else answer["results"])
            self._deleted_groups.update(
                each["group_id"] for each in results if not each["error_code"]
            )

    def _init_producer_id(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        name = request["transactional_id"]
        if name:
            is_done = answer is not None and answer["error_code"] == 0
            self._end(outcome, name, "Empty" if is_done else "")

    def _begin(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        name = request.get("transactional_id") or request.get("v3_and_below_transactional_id")
        several = [one["transactional_id"] for one in entries(request.get("transactions"))]
        self._transactions |= dict.fromkeys([each for each in (name, *several) if each], "")

    def _end_txn(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        name, is_commit = request["transactional_id"], request["committed"]
        commits = self._commits_of.get(name, [])
        if answer is None or answer["error_code"]:
            self._open_groups.update(commit[0] for commit, _ in commits)
            self._end(outcome, name, "")
            return
        for commit, offset in commits if is_commit else ():
            times = outcome.sent_ns, outcome.answered_ns + _MARKER_NS
            self._commits[commit].append((*times, offset, name))
        self._end(outcome, name, "CompleteCommit" if is_commit else "CompleteAbort")

    def _end(self, outcome: Outcome, name: str, state: str) -> None:
        """Note the end of a transaction; "" if it is not known how it ends."""
        is_aborted = None if not state else state != "CompleteCommit"
        for batch in self._batches_of.pop(name, []):
            batch.is_aborted = is_aborted
        self._commits_of.pop(name, None)
        self._transactions[name], self._ended_ns[name] = state, outcome.answered_ns

    def _describe_transactions(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        """A transaction that the run has ended before is not Ongoing."""
        for each in entries(None if answer is None else answer["transaction_states"]):
            name, state = each["transactional_id"], each["transaction_state"]
            known = self._transactions.get(name)
            is_before = self._ended_ns.get(name, outcome.sent_ns) < outcome.sent_ns
            if not each["error_code"] and known in _ENDED and is_before and state == "Ongoing":
                place, note = "transaction_states[].transaction_state", "the run has ended it"
                self.contradicted[outcome.step.number].append(
                    Difference(place, (name,), known, state, note=note)
                )

    # -- the check ------------------------------------------------------------------------------

    def check(self, state: EndState, held: set[str]) -> list[RunFinding]:
        """Findings where the state is not as claimed. held: topics that had records before."""
        return [
            *self._check_logs(state, held),
            *self._check_commits(state),
            *self._check_transactions(state),
            *self._check_topics(state),
        ]

    def _check_logs(self, state: EndState, held: set[str]) -> Iterator[RunFinding]:
        for log, claim in sorted(self._logs.items()):
            content = state.logs.get(log)
            if not claim.batches and claim.start < 0:
                continue
            subject = f"log {log[0]}-{log[1]}"
            if content is None:
                if log[0] in state.topics and not state.unread:
                    yield RunFinding(_KIND, subject, "a log", "none", _BY_ANSWERS)
                continue
            may_shrink = any(name.startswith(_SHRINKING) for name in state.configs.get(log[0], ()))
            yield from _check_extent(subject, claim, content, may_shrink)
            if content.batches is not None and not may_shrink:
                yield from _check_records(subject, claim, content, log[0] in held)

    def _check_commits(self, state: EndState) -> Iterator[RunFinding]:
        for commit, commits in sorted(self._commits.items()):
            group, topic, partition = commit
            if group in self._open_groups or f"group {group}" in state.unread:
                continue
            newest_ns = max(sent_ns for sent_ns, *_ in commits)
            # Transactions of one id follow each other: the markers of earlier ones are written.
            newest_of: dict[str, int] = {}
            for sent_ns, _, _, owner in commits:
                newest_of[owner] = max(sent_ns, newest_of.get(owner, sent_ns))
            last = [
                offset
                for sent_ns, last_ns, offset, owner in commits
                if newest_ns < last_ns and (not owner or newest_of[owner] == sent_ns)
            ]
            if state.commits.get(commit) not in last:
                yield RunFinding(
                    _KIND, f"committed offset of {group} in {topic}-{partition}",
                    _either(last), str(state.commits.get(commit, "none")), _BY_ANSWERS,
                )  # fmt: skip
        for group in sorted(self._deleted_groups & state.groups):
            yield RunFinding(_KIND, f"group {group}", "deleted", "there", _BY_ANSWERS)

    def _check_transactions(self, state: EndState) -> Iterator[RunFinding]:
        for name, expected in sorted(self._transactions.items()):
            subject = f"transactional id {name}"
            found = state.transactions.get(name, "unknown id")
            if expected and subject not in state.unread and found != expected:
                yield RunFinding(_KIND, subject, expected, found, _BY_ANSWERS)

    def _check_topics(self, state: EndState) -> Iterator[RunFinding]:
        if "topics" in state.unread:
            return
        for name, claim in sorted(self._topics.items()):
            count = state.topics.get(name)
            subject = f"topic {name}"
            if claim.exists != (count is not None):
                words = ("deleted", "there") if count is not None else ("created", "not there")
                yield RunFinding(_KIND, subject, *words, _BY_ANSWERS)
            elif claim.exists and claim.partitions > 0 and count != claim.partitions:
                expected = f"{claim.partitions} partitions"
                yield RunFinding(_KIND, subject, expected, str(count), _BY_ANSWERS)
            configs = state.configs.get(name)
            for config, value in claim.configs.items() if configs is not None else ():
                if value is not None and configs is not None and configs.get(config) != value:
                    found = configs.get(config, "not set")
                    subject = f"config {config} of {name}"
                    yield RunFinding(_KIND, subject, value, found, _BY_ANSWERS, config)


def _number(partition: Body) -> int:
    number: int = partition["index"] if "index" in partition else partition["partition_index"]
    return number


def _completed_ns(outcome: Outcome) -> int:
    return outcome.answered_ns if outcome.answered_ns >= 0 else outcome.sent_ns


def _either(values: Iterable[Any]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))


def _check_extent(
    subject: str, claim: _LogClaim, content: LogContent, may_shrink: bool
) -> Iterator[RunFinding]:
    """The start and end of a log against acknowledged batches and deleted records."""
    end = max((base + batch.records for base, batch in claim.batches.items()), default=-1)
    if content.end < end:
        expected, actual = f"ends at {end} or later", f"ends at {content.end}"
        yield RunFinding(_KIND, subject, expected, actual, _BY_ANSWERS)
    start = claim.start if claim.start >= 0 else min(claim.batches, default=content.start)
    is_early = claim.start >= 0 and content.start < claim.start
    is_late = not may_shrink and content.start > start
    if is_early or is_late:
        expected, actual = f"starts at {start}", f"starts at {content.start}"
        yield RunFinding(_KIND, subject, expected, actual, _BY_ANSWERS)


def _check_records(
    subject: str, claim: _LogClaim, content: LogContent, is_held: bool
) -> Iterator[RunFinding]:
    """The records of a log against those that were acknowledged. is_held: it had some before."""
    assert content.batches is not None
    kept = {
        base: batch for base, batch in claim.batches.items() if base + batch.records > content.start
    }
    wanted, found = sum(batch.records for batch in kept.values()), content.records or 0
    if found < wanted or (not is_held and found > wanted + claim.unknown):
        maybe = f" to {wanted + claim.unknown}" if 0 < claim.unknown < _MANY else ""
        text = f"{wanted}{maybe} records"
        yield RunFinding(_KIND, subject, text, f"{found} records", _BY_ANSWERS)
    stored = {each.base_offset: each for each in content.batches}
    for name, is_right in (
        ("other records", lambda mine, theirs: mine.digest in (None, theirs.digest)),
        ("aborted records are visible, or committed ones are not",
         lambda mine, theirs: mine.is_aborted in (None, theirs.is_aborted)),
    ):  # fmt: skip
        wrong = [
            base
            for base, batch in sorted(kept.items())
            if base in stored and not is_right(batch, stored[base])
        ]
        lost = [base for base in sorted(kept) if base >= content.start and base not in stored]
        for bases, text in ((wrong, name), (lost if name == "other records" else [], "none")):
            if bases:
                count = RecordCount(sum(kept[base].records for base in bases), bases[0])
                yield RunFinding(_KIND, subject, str(count), text, _BY_ANSWERS)


def compare_states(state: EndState, references: Sequence[EndState]) -> list[RunFinding]:
    """Findings where a state is like none of the reference's, all by the capture's names."""
    findings = []
    facts, others = _facts(state), [_facts(each) for each in references]
    for subject in sorted(facts.keys() | {name for each in others for name in each}):
        expected = [each.get(subject, ("none", None)) for each in others]
        found = facts.get(subject, ("none", None))
        if found not in expected:
            config = subject.partition(" ")[2].partition(" ")[0] * subject.startswith("config ")
            text = found[0]
            if text in [each[0] for each in expected]:
                text = f"{text}, but other ones"
            wanted = _either(each[0] for each in expected)
            findings.append(RunFinding(_KIND, subject, wanted, text, _BY_REFERENCE, config))
    return findings


def _facts(state: EndState) -> dict[str, tuple[str, Any]]:
    """Values of a state that runs must have in common, by subject, each with what it stands for.
    Offsets count from the start of the log; parts that could not be read are left out."""
    facts: dict[str, tuple[str, Any]] = {
        f"partitions of topic {name}": (str(count), None) for name, count in state.topics.items()
    }
    for (topic, partition), content in state.logs.items():
        if content.batches is not None:
            counts = Counter(each.has_append_time for each in content.batches)
            rows = tuple((each.digest, each.is_aborted) for each in content.batches)
            times = " with LogAppendTime" if counts[True] else ""
            facts[f"log {topic}-{partition}"] = f"{content.records} records{times}", rows
    for (group, topic, partition), offset in state.commits.items():
        content = state.logs.get((topic, partition), LogContent(0, 0))
        facts[f"committed offset of {group} in {topic}-{partition}"] = (
            f"{offset - content.start} after the start", None,
        )  # fmt: skip
    facts |= {f"transactional id {name}": (each, None) for name, each in state.transactions.items()}
    for topic, configs in state.configs.items():
        facts |= {f"config {name} of {topic}": (each, None) for name, each in configs.items()}
    return facts
