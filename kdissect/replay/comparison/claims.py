"""What a run's answers claim about the state after it, and the comparison with that state.

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
from kdissect.replay.comparison.groups import CLASSIC_APIS, Groups
from kdissect.replay.comparison.logs import MANY, LogFacts, Logs, Produced, deleted_topics
from kdissect.replay.comparison.records import RecordCount, content_digest
from kdissect.replay.comparison.terms import Terms
from kdissect.replay.model import END_STATE, Difference, Outcome, RunFinding
from kdissect.replay.target.end_state import EndState, LogContent
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import TOPIC_RESOURCE, decoded, entries

_BY_ANSWERS = "by the answers of this run"
_BY_REFERENCE = "by the reference"
_MARKER_NS = 5_000_000_000  # until offsets of a committed transaction are visible
_SHRINKING = ("cleanup.policy", "retention.bytes", "retention.ms", "local.retention.")
_SET = 0  # operation of IncrementalAlterConfigs
_ENDED = ("Empty", "CompleteCommit", "CompleteAbort")

Body = dict[str, Any]
Commit = tuple[str, str, int]  # group, topic, partition


@dataclass(slots=True)
class _Topic:
    """A topic: exists, partition count (-1 unknown), configs (None for an unknown value)."""

    exists: bool
    partitions: int = -1
    configs: dict[str, str | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Transaction:
    """A transactional id. state: "" unknown, as answered at `ended_ns`. commits: offsets of the
    open transaction."""

    state: str = ""
    ended_ns: int = 1 << 62
    commits: list[tuple[Commit, int]] = field(default_factory=list)


class Claims:
    """Claims of a run's answers about the state after it, by the capture's names.

    By step: answers that contradict earlier claims; and (resource, config) of the configs that
    answers show as the run has set them.
    """

    def __init__(self, ids: IdMap, outcomes: Iterable[Outcome]) -> None:
        self._terms = Terms.of_target(ids)
        self.logs = Logs(self._terms)
        self.groups = Groups(Terms.of_capture(ids), self._terms)
        self.contradicted: dict[int, list[Difference]] = defaultdict(list)
        self.shown_configs: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        self._topics: dict[str, _Topic] = {}
        # sent_ns, last time at which it took effect, offset, transactional id
        self._commits: dict[Commit, list[tuple[int, int, int, str]]] = defaultdict(list)
        self._open_groups: set[str] = set()  # with commits whose effect is unknown
        self._deleted_groups: set[str] = set()
        self._transactions: dict[str, _Transaction] = defaultdict(_Transaction)
        readers: dict[int, Callable[[Outcome, Body, Body | None], None]] = {
            ApiKey.PRODUCE: self._begin,
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
            **dict.fromkeys(CLASSIC_APIS, self.groups.add_classic),
        }
        for outcome in sorted(outcomes, key=_completed_ns):
            api_key = outcome.step.exchange.api_key
            # Claims follow from final answers alone; no answer may contradict others.
            of_all = [self.logs.readers.get(api_key), self.groups.readers.get(api_key)]
            of_final = readers.get(api_key)
            if not any(of_all) and of_final is None:
                continue
            for each in outcome.tries():
                request = decoded(each.sent or b"", "request", api_key, each.api_version)
                answer = decoded(each.answer or b"", "response", api_key, each.api_version)
                for reader in [*of_all, of_final if each is outcome else None]:
                    if request is not None and reader is not None:
                        reader(each, request.body, None if answer is None else answer.body)

    @property
    def gone(self) -> set[str]:
        """Topics that the run deleted at last."""
        return {name for name, claim in self._topics.items() if not claim.exists}

    @property
    def committed_groups(self) -> set[str]:
        """Groups with committed offsets."""
        return {commit[0] for commit in self._commits}

    @property
    def transactional_ids(self) -> set[str]:
        """Transactional ids whose state the answers decide."""
        return {name for name, each in self._transactions.items() if each.state}

    # -- topics ---------------------------------------------------------------------------------

    def _metadata(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        """A request that creates topics may bring back one that was deleted."""
        if request.get("allow_auto_topic_creation", True):
            for name in [self._terms.topic_in(each) for each in entries(request["topics"])]:
                if name in self._topics and not self._topics[name].exists:
                    del self._topics[name]

    def _created(
        self, request: Body, answer: Body | None, results: str
    ) -> Iterator[tuple[str, Body, int | None]]:
        """The name, struct and error code of each topic that a request creates or enlarges; None
        for a code that no answer brought."""
        codes = {each["name"]: each["error_code"] for each in entries((answer or {}).get(results))}
        for topic in entries(request["topics"]) if not request.get("validate_only") else ():
            yield self._terms.topic(topic["name"]), topic, codes.get(topic["name"])

    def _create_topics(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for name, topic, code in self._created(request, answer, "topics"):
            if code is None:
                self._topics.pop(name, None)
            elif code == 0:
                count = len(entries(topic["assignments"])) or topic["num_partitions"]
                configs = {each["name"]: each["value"] for each in entries(topic["configs"])}
                self._topics[name] = _Topic(True, count, configs)

    def _delete_topics(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        if answer is None:
            for name in deleted_topics(self._terms, request):
                self._topics.pop(name, None)
                self._forget_topic(name)
        for result in entries((answer or {}).get("responses")):
            name = self._terms.topic_in(result)
            if result["error_code"] == 0 and name:
                self._topics[name] = _Topic(False)
                self._forget_topic(name)

    def _forget_topic(self, name: str) -> None:
        self.logs.forget_topic(name)
        for commit in [commit for commit in self._commits if commit[1] == name]:
            del self._commits[commit]  # the group's offsets go with the topic

    def _create_partitions(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for name, topic, code in self._created(request, answer, "results"):
            if name in self._topics and not code:
                self._topics[name].partitions = -1 if code is None else topic["count"]

    def _alter_configs(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        if request["validate_only"]:
            return
        refused = {
            each["resource_name"]
            for each in entries((answer or {}).get("responses"))
            if each["error_code"]
        }
        is_incremental = outcome.step.exchange.api_key == ApiKey.INCREMENTAL_ALTER_CONFIGS
        for resource in entries(request["resources"]):
            name = resource["resource_name"]
            if resource["resource_type"] != TOPIC_RESOURCE or name in refused:
                continue
            claim = self._topics.setdefault(self._terms.topic(name), _Topic(True))
            if not is_incremental:
                claim.configs = dict.fromkeys(claim.configs)
            for each in entries(resource["configs"]):
                is_set = each.get("config_operation", _SET) == _SET and answer is not None
                claim.configs[each["name"]] = each["value"] if is_set else None

    def _describe_configs(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for result in entries((answer or {}).get("results")):
            name = self._terms.topic(result["resource_name"])
            is_topic = result["resource_type"] == TOPIC_RESOURCE
            known = self._topics[name].configs if is_topic and name in self._topics else {}
            self.shown_configs[outcome.step.number].update(
                (f"topic {name}", each["name"])
                for each in entries(result["configs"])
                if known.get(each["name"]) == each["value"] is not None
            )

    # -- groups and transactions ----------------------------------------------------------------

    def _committed(self, request: Body, answer: Body | None) -> Iterator[tuple[Commit, int]]:
        """Offsets that a response accepted."""
        group = self._terms.group(request["group_id"])
        self._deleted_groups.discard(group)
        results = dict(self._terms.logs(answer))
        for log, partition in self._terms.logs(request):
            if log not in results:
                self._open_groups.add(group)
            elif results[log]["error_code"] == 0:
                yield (group, *log), partition["committed_offset"]

    def _offset_commit(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for commit, offset in self._committed(request, answer):
            self._commits[commit].append((outcome.sent_ns, outcome.answered_ns, offset, ""))

    def _forget_group(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        named = set(entries(request.get("groups_names"))) or {request.get("group_id")}
        groups = set(map(self._terms.group, named))
        for commit in [commit for commit in self._commits if commit[0] in groups]:
            del self._commits[commit]
        for each in entries((answer or {}).get("results")):  # of DeleteGroups
            if not each["error_code"]:
                self._deleted_groups.add(self._terms.group(each["group_id"]))

    def _begin(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        """A request that is part of a transaction."""
        name = request.get("transactional_id") or request.get("v3_and_below_transactional_id")
        several = [one["transactional_id"] for one in entries(request.get("transactions"))]
        for each in filter(None, (name, *several)):
            self._transaction(each).state = ""

    def _transaction(self, name: str) -> _Transaction:
        return self._transactions[self._terms.transactional_id(name)]

    def _txn_offset_commit(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        self._begin(outcome, request, answer)
        transaction = self._transaction(request["transactional_id"])
        transaction.commits += self._committed(request, answer)

    def _init_producer_id(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        if request["transactional_id"]:
            is_done = answer is not None and answer["error_code"] == 0
            self._end(outcome, request["transactional_id"], "Empty" if is_done else "")

    def _end_txn(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        name, is_commit = request["transactional_id"], request["committed"]
        commits = self._transaction(name).commits
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
        self.logs.end_transaction(name, is_aborted=is_aborted)
        key = self._terms.transactional_id(name)
        self._transactions[key] = _Transaction(state, outcome.answered_ns)

    def _describe_transactions(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        """A transaction that the run has ended before is not Ongoing."""
        for each in entries((answer or {}).get("transaction_states")):
            name, state = each["transactional_id"], each["transaction_state"]
            known = self._transaction(name)
            is_over = known.state in _ENDED and known.ended_ns < outcome.sent_ns
            if not each["error_code"] and is_over and state == "Ongoing":
                place, note = "transaction_states[].transaction_state", "the run has ended it"
                self.contradicted[outcome.step.number].append(
                    Difference(place, (name,), known.state, state, note=note)
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
        for log, facts in sorted(self.logs.items(), key=lambda each: each[0]):
            content = state.logs.get(log)
            if not facts.produced and facts.deleted_to < 0:
                continue
            subject = f"log {log[0]}-{log[1]}"
            if content is None:
                if log[0] in state.topics and not state.unread:
                    yield RunFinding(END_STATE, subject, "a log", "none", _BY_ANSWERS)
                continue
            may_shrink = any(name.startswith(_SHRINKING) for name in state.configs.get(log[0], ()))
            yield from _check_extent(subject, facts, content, may_shrink)
            if content.batches is not None and not may_shrink:
                yield from _check_records(subject, facts, content, log[0] in held)

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
                    END_STATE, f"committed offset of {group} in {topic}-{partition}",
                    _either(last), str(state.commits.get(commit, "none")), _BY_ANSWERS,
                )  # fmt: skip
        for group in sorted(self._deleted_groups & state.groups):
            yield RunFinding(END_STATE, f"group {group}", "deleted", "there", _BY_ANSWERS)

    def _check_transactions(self, state: EndState) -> Iterator[RunFinding]:
        for name in sorted(self.transactional_ids):
            subject, expected = f"transactional id {name}", self._transactions[name].state
            found = state.transactions.get(name, "unknown id")
            if subject not in state.unread and found != expected:
                yield RunFinding(END_STATE, subject, expected, found, _BY_ANSWERS)

    def _check_topics(self, state: EndState) -> Iterator[RunFinding]:
        if "topics" in state.unread:
            return
        for name, claim in sorted(self._topics.items()):
            count = state.topics.get(name)
            subject = f"topic {name}"
            if claim.exists != (count is not None):
                words = ("deleted", "there") if count is not None else ("created", "not there")
                yield RunFinding(END_STATE, subject, *words, _BY_ANSWERS)
            elif claim.exists and claim.partitions > 0 and count != claim.partitions:
                expected = f"{claim.partitions} partitions"
                yield RunFinding(END_STATE, subject, expected, str(count), _BY_ANSWERS)
            configs = state.configs.get(name)
            for config, value in claim.configs.items() if configs is not None else ():
                if value is not None and configs is not None and configs.get(config) != value:
                    found = configs.get(config, "not set")
                    subject = f"config {config} of {name}"
                    yield RunFinding(END_STATE, subject, value, found, _BY_ANSWERS, config)


def _completed_ns(outcome: Outcome) -> int:
    return outcome.answered_ns if outcome.answered_ns >= 0 else outcome.sent_ns


def _either(values: Iterable[Any]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))


def _check_extent(
    subject: str, facts: LogFacts, content: LogContent, may_shrink: bool
) -> Iterator[RunFinding]:
    """The start and end of a log against acknowledged batches and deleted records."""
    end = max((each.end for each in facts.produced), default=-1)
    if content.end < end:
        expected, actual = f"ends at {end} or later", f"ends at {content.end}"
        yield RunFinding(END_STATE, subject, expected, actual, _BY_ANSWERS)
    start = facts.deleted_to
    if start < 0:
        start = min((each.base for each in facts.produced), default=content.start)
    is_early = facts.deleted_to >= 0 and content.start < start
    is_late = not may_shrink and content.start > start
    if is_early or is_late:
        expected, actual = f"starts at {start}", f"starts at {content.start}"
        yield RunFinding(END_STATE, subject, expected, actual, _BY_ANSWERS)


def _check_records(
    subject: str, facts: LogFacts, content: LogContent, is_held: bool
) -> Iterator[RunFinding]:
    """The records of a log against those that were acknowledged. is_held: it had some before."""
    assert content.batches is not None
    kept = {base: each for base, each in facts.acknowledged.items() if each.end > content.start}
    wanted, found = sum(each.records for each in kept.values()), content.records or 0
    if found < wanted or (not is_held and found > wanted + facts.unknown):
        maybe = f" to {wanted + facts.unknown}" if 0 < facts.unknown < MANY else ""
        text = f"{wanted}{maybe} records"
        yield RunFinding(END_STATE, subject, text, f"{found} records", _BY_ANSWERS)
    stored = {each.base_offset: each for each in content.batches}
    wrong: dict[str, list[Produced]] = defaultdict(list)
    for base, each in sorted(kept.items()):
        if base in stored:
            if each.data and content_digest(each.data) != stored[base].digest:
                wrong["other records"].append(each)
            if each.is_aborted not in (None, stored[base].is_aborted):
                wrong["aborted records are visible, or committed ones are not"].append(each)
        elif base >= content.start:
            wrong["none"].append(each)
    for text, produced in wrong.items():
        count = RecordCount(sum(each.records for each in produced), produced[0].base)
        yield RunFinding(END_STATE, subject, str(count), text, _BY_ANSWERS)


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
            findings.append(RunFinding(END_STATE, subject, wanted, text, _BY_REFERENCE, config))
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
