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

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.groups import CLASSIC_APIS, Groups
from kdissect.replay.comparison.logs import MANY, LogFacts, Logs, Produced, deleted_topics
from kdissect.replay.comparison.records import Contradiction, RecordCount, content_digest
from kdissect.replay.comparison.terms import Terms
from kdissect.replay.model import END_STATE, Difference, Outcome, RunFinding
from kdissect.replay.target.state import LogContent, State
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import TOPIC_RESOURCE, decoded, entries
from kdissect.text import plural

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


class _Committed(NamedTuple):
    """last_ns: the last time at which it took effect. owner: a transactional id, "" none."""

    sent_ns: int
    last_ns: int
    offset: int
    owner: str = ""


class Claims:
    """Claims of a run's answers about the state after it, by the capture's names.

    By step: answers that contradict earlier claims; and (resource, config) of the configs that
    answers show as the run has set them.
    """

    def __init__(self, ids: IdMap, outcomes: Iterable[Outcome]) -> None:
        self._terms = Terms.of_target(ids)
        self.logs = Logs(self._terms)
        self.groups = Groups(Terms.of_capture(ids), self._terms)
        self.contradictions: list[Contradiction] = []
        self.shown_configs: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        self._topics: dict[str, _Topic] = {}
        self._commits: dict[Commit, list[_Committed]] = defaultdict(list)
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
            for name in [self._terms.topics.of(each) for each in entries(request["topics"])]:
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
            name = self._terms.topics.of(result)
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
            committed = _Committed(outcome.sent_ns, outcome.answered_ns, offset)
            self._commits[commit].append(committed)

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
            last_ns = outcome.answered_ns + _MARKER_NS
            self._commits[commit].append(_Committed(outcome.sent_ns, last_ns, offset, name))
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
                difference = Difference(place, (name,), known.state, state, note=note)
                self.contradictions.append((outcome.step.number, difference))

    # -- the check ------------------------------------------------------------------------------

    def check(self, state: State, held: set[str]) -> list[RunFinding]:
        """Findings where the state is not as claimed. held: topics that had records before."""
        there = facts_of(state) | {f"group {name}": Fact("there") for name in state.groups}
        expected = dict(self._expected(state))
        return [*self._check_logs(state, held), *_differing(there, expected, _BY_ANSWERS)]

    def _check_logs(self, state: State, held: set[str]) -> Iterator[RunFinding]:
        for log, facts in sorted(self.logs.items(), key=lambda each: each[0]):
            wrong: list[tuple[str, str]] = []
            if not facts.produced and facts.deleted_to < 0:
                continue
            if (content := state.logs.get(log)) is not None:
                names = state.configs.get(log[0], ())
                may_shrink = any(name.startswith(_SHRINKING) for name in names)
                wrong += _wrong_extent(facts, content, may_shrink)
                if content.batches is not None and not may_shrink:
                    wrong += _wrong_records(facts, content, log[0] in held)
            elif log[0] in state.topics and not state.unread:
                wrong.append(("a log", "none"))
            for texts in wrong:
                yield RunFinding(END_STATE, f"log {log[0]}-{log[1]}", *texts, _BY_ANSWERS)

    def _expected(self, state: State) -> Iterator[tuple[str, list[Fact]]]:
        """What is claimed but for logs, by subject; parts that could not be read are left out."""
        for commit, commits in self._commits.items():
            if commit[0] not in self._open_groups and f"group {commit[0]}" not in state.unread:
                yield _committed_offset(commit), [Fact(str(each)) for each in _last(commits)]
        for name in self._deleted_groups:
            yield f"group {name}", [_NONE]
        for name in self.transactional_ids:
            if (subject := f"transactional id {name}") not in state.unread:
                yield subject, [Fact(self._transactions[name].state)]
        for name, claim in self._topics.items() if "topics" not in state.unread else ():
            if not claim.exists:
                yield f"topic {name}", [_NONE]
            elif claim.partitions > 0:
                yield f"topic {name}", [Fact(plural(claim.partitions, "partition"))]
            elif name not in state.topics:
                yield f"topic {name}", [Fact("a topic")]
            for config, value in claim.configs.items() if name in state.configs else ():
                if value is not None:
                    yield f"config {config} of {name}", [Fact(value)]


def _last(commits: list[_Committed]) -> list[int]:
    """The offsets that may be the last one of these commits."""
    newest_ns = max(each.sent_ns for each in commits)
    # Transactions of one id follow each other: the markers of earlier ones are written.
    newest_of: dict[str, int] = {}
    for each in commits:
        newest_of[each.owner] = max(each.sent_ns, newest_of.get(each.owner, each.sent_ns))
    return [
        each.offset
        for each in commits
        if newest_ns < each.last_ns and (not each.owner or newest_of[each.owner] == each.sent_ns)
    ]


def _completed_ns(outcome: Outcome) -> int:
    return outcome.answered_ns if outcome.answered_ns >= 0 else outcome.sent_ns


def _wrong_extent(
    facts: LogFacts, content: LogContent, may_shrink: bool
) -> Iterator[tuple[str, str]]:
    """The start and end of a log that contradict acknowledged batches and deleted records: expected
    and found."""
    end = max((each.end for each in facts.produced), default=-1)
    if content.end < end:
        yield f"ends at {end} or later", f"ends at {content.end}"
    start = facts.deleted_to
    if start < 0:
        start = min((each.base for each in facts.produced), default=content.start)
    is_early = facts.deleted_to >= 0 and content.start < start
    is_late = not may_shrink and content.start > start
    if is_early or is_late:
        yield f"starts at {start}", f"starts at {content.start}"


def _wrong_records(
    facts: LogFacts, content: LogContent, is_held: bool
) -> Iterator[tuple[str, str]]:
    """The records of a log that are not those acknowledged. is_held: it had some before."""
    assert content.batches is not None
    kept = {base: each for base, each in facts.acknowledged.items() if each.end > content.start}
    wanted, found = sum(each.records for each in kept.values()), content.records or 0
    if found < wanted or (not is_held and found > wanted + facts.unknown):
        maybe = f" to {wanted + facts.unknown}" if 0 < facts.unknown < MANY else ""
        yield f"{wanted}{maybe} records", f"{found} records"
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
        yield str(RecordCount(sum(each.records for each in produced), produced[0].base)), text


# -- facts of a state -----------------------------------------------------------------------------


class Fact(NamedTuple):
    """What a state has of a subject. content: what the text stands for."""

    text: str
    content: Any = None


_NONE = Fact("none")


def compare_states(state: State, references: Sequence[State]) -> list[RunFinding]:
    """Findings where a state is like none of the reference's, all by the capture's names."""
    found, others = facts_of(state), [facts_of(each, state) for each in references]
    subjects = found.keys() | {name for each in others for name in each}
    expected = {name: [each.get(name, _NONE) for each in others] for name in subjects}
    return _differing(found, expected, _BY_REFERENCE)


def facts_of(state: State, like: State | None = None) -> dict[str, Fact]:
    """The facts that runs must have in common, by subject. Offsets are those of logs that start
    where the logs of `like` do; parts that could not be read are left out."""
    facts = {
        f"topic {name}": Fact(plural(count, "partition")) for name, count in state.topics.items()
    }
    for (topic, partition), content in state.logs.items():
        if content.batches is not None:
            rows = tuple((each.digest, each.is_aborted) for each in content.batches)
            is_appended = any(each.has_append_time for each in content.batches)
            text = f"{content.records} records{' with LogAppendTime' * is_appended}"
            facts[f"log {topic}-{partition}"] = Fact(text, rows)
    for commit, offset in state.commits.items():
        start, new = (
            each.logs[commit[1:]].start if commit[1:] in each.logs else 0
            for each in (state, like or state)
        )
        facts[_committed_offset(commit)] = Fact(str(offset - start + new))
    facts |= {f"transactional id {name}": Fact(each) for name, each in state.transactions.items()}
    for topic, configs in state.configs.items():
        facts |= {f"config {name} of {topic}": Fact(value) for name, value in configs.items()}
    return facts


def _committed_offset(commit: Commit) -> str:
    group, topic, partition = commit
    return f"committed offset of {group} in {topic}-{partition}"


def _differing(
    found: Mapping[str, Fact], expected: Mapping[str, Sequence[Fact]], note: str
) -> list[RunFinding]:
    """Findings where a fact is none of those expected of its subject."""
    findings = []
    for subject, wanted in sorted(expected.items()):
        fact = found.get(subject, _NONE)
        if fact not in wanted:
            texts = [each.text for each in wanted]
            text = f"{fact.text}, but other ones" if fact.text in texts else fact.text
            either = " or ".join(dict.fromkeys(texts))
            findings.append(RunFinding(END_STATE, subject, either, text, note))
    return findings
