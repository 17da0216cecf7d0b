"""What a run's answers claim about the state after it, and the comparison with that state.

An answer claims something about the end: an acknowledged batch is in its log with its records, a
committed offset is the group's, a transaction has ended, a created topic exists with its configs.
Later requests to the same resource may change that, and a request without an answer leaves it
unknown. Only claims that nothing later touches are checked.

The claims also say what an answer in the middle of the run may show: a transaction that the run has
ended is not described as Ongoing. A config that the run has set is right as it was set, although
the captured broker showed it later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kdissect.codec.redaction import is_secret
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batches import content_digest
from kdissect.replay.comparison.logs import MANY, LogFacts, Logs, Produced, Readers, count_text
from kdissect.replay.model import END_STATE, FOREVER_NS, Contradiction, Difference, Reply
from kdissect.replay.target.state import LogContent, State
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import TOPIC_RESOURCE, entries
from kdissect.text import plural

_BY_ANSWERS = "by the answers of this run"
_BY_REFERENCE = "by the reference"
_SHRINKING = ("cleanup.policy", "retention.bytes", "retention.ms", "local.retention.")
_SET = 0  # operation of IncrementalAlterConfigs
_ENDED = ("Empty", "CompleteCommit", "CompleteAbort")
_GONE, _A_TOPIC = "none", "a topic"  # values: there is none; of an unknown number of partitions

# A subject is a kind and its names; as text:
_NAMES = {
    "topic": "topic {}",
    "log": "log {}-{}",  # topic, partition
    "config": "config {1} of {0}",  # topic, name
    "group": "group {}",
    "commit": "committed offset of {} in {}-{}",  # group, topic, partition
    "transaction": "transactional id {}",
}
Subject = tuple[Any, ...]


class _Claim(NamedTuple):
    """A value that a request has left of a subject; None if nobody knows which. It took effect
    between sent_ns and last_ns."""

    value: str | None
    sent_ns: int = -1
    last_ns: int = -1


class Claims:
    """Claims of a run's answers about the state after it, by the capture's names.

    readers: of each final reply. contradictions: answers that contradict earlier claims.
    set_configs: (resource, config) -> the values that the run has set.
    """

    def __init__(self, ids: IdMap, logs: Logs) -> None:
        self._topics, self._name = ids.target_topics, ids.captured_name
        self._logs = logs
        self.contradictions: list[Contradiction] = []
        self.set_configs: dict[tuple[str, ...], set[str]] = defaultdict(set)
        # The claims that later ones leave, one but for commits that overlap.
        self._claims: dict[Subject, list[_Claim]] = {}
        # by transactional id: offset and time of each commit in the open transaction
        self._pending: dict[str, list[tuple[Subject, _Claim]]] = defaultdict(list)
        self.readers: Readers = {
            ApiKey.PRODUCE: self._begin,
            ApiKey.METADATA: self._metadata,
            ApiKey.CREATE_TOPICS: self._create,
            ApiKey.CREATE_PARTITIONS: self._create,
            ApiKey.DELETE_TOPICS: self._delete_topics,
            ApiKey.ALTER_CONFIGS: self._alter_configs,
            ApiKey.INCREMENTAL_ALTER_CONFIGS: self._alter_configs,
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

    def _transaction(self, name: str) -> Subject:
        return "transaction", self._name("transactional-id", name)

    def _claim(self, value: str | None, *subject: Any, last_ns: int = -1) -> None:
        """Replace what was claimed of a subject."""
        self._claims[subject] = [_Claim(value, last_ns=last_ns)]

    def _last(self, *subject: Any) -> _Claim:
        return self._claims.get(subject, [_Claim(None)])[-1]

    def _named(self, kind: str) -> list[Subject]:
        return [subject for subject in self._claims if subject[0] == kind]

    def _forget(self, kind: str, place: int, names: Collection[str]) -> None:
        """Forget the claims of a kind about these names, which stand at a place of the subject."""
        for subject in self._named(kind):
            if subject[place] in names:
                del self._claims[subject]

    @property
    def gone(self) -> set[str]:
        """Topics that the run deleted at last."""
        return {each[1] for each in self._named("topic") if self._last(*each).value == _GONE}

    @property
    def committed_groups(self) -> set[str]:
        """Groups with committed offsets."""
        return {subject[1] for subject in self._named("commit")}

    @property
    def transactional_ids(self) -> set[str]:
        """Transactional ids whose state the answers decide."""
        return {each[1] for each in self._named("transaction") if self._last(*each).value}

    # -- topics ---------------------------------------------------------------------------------

    def _metadata(self, reply: Reply) -> None:
        """A request that creates topics may bring back one that was deleted."""
        if reply.request.get("allow_auto_topic_creation", True):
            for name in map(self._topics.of, entries(reply.request["topics"])):
                if self._last("topic", name).value == _GONE:
                    del self._claims["topic", name]

    def _create(self, reply: Reply) -> None:
        """A request that creates topics, or more partitions of those that are there."""
        results = entries(reply.body.get("topics") or reply.body.get("results"))
        codes = {each["name"]: each["error_code"] for each in results}
        for topic in entries(reply.request["topics"]) if not reply.is_trial else ():
            name, code = self._name("topic", topic["name"]), codes.get(topic["name"])
            is_new = "count" not in topic
            if code or (not is_new and ("topic", name) not in self._claims):
                continue
            if is_new:
                self._forget("config", 1, {name})
                count = len(entries(topic["assignments"])) or topic["num_partitions"]
            else:
                count = topic["count"]
            text = plural(count, "partition") if count > 0 else _A_TOPIC
            unknown = None if is_new else _A_TOPIC
            self._claim(unknown if code is None else text, "topic", name)
            for each in entries(topic.get("configs")) if code == 0 else ():
                self._set_config(name, each["name"], each["value"])

    def _delete_topics(self, reply: Reply) -> None:
        results = entries(reply.body.get("responses"))
        done = [self._topics.of(each) for each in results if not each["error_code"]]
        asked = [{"name": each} for each in entries(reply.request.get("topic_names"))]
        asked += entries(reply.request.get("topics"))
        for name in map(self._topics.of, asked) if reply.answer is None else done:
            self._claim(None if reply.answer is None else _GONE, "topic", name)
            self._logs.forget_topic(name)
            self._forget("config", 1, {name})
            self._forget("commit", 2, {name})  # the groups' offsets go with the topic

    def _alter_configs(self, reply: Reply) -> None:
        results = entries(reply.body.get("responses"))
        refused = {each["resource_name"] for each in results if each["error_code"]}
        is_whole = reply.step.exchange.api_key == ApiKey.ALTER_CONFIGS
        for resource in entries(reply.request["resources"]) if not reply.is_trial else ():
            name = resource["resource_name"]
            if resource["resource_type"] != TOPIC_RESOURCE or name in refused:
                continue
            name = self._name("topic", name)
            if is_whole:
                self._forget("config", 1, {name})
            for each in entries(resource["configs"]):
                is_set = each.get("config_operation", _SET) == _SET and reply.answer is not None
                self._set_config(name, each["name"], each["value"] if is_set else None)

    def _set_config(self, topic: str, config: str, value: str | None) -> None:
        self._claim(value, "config", topic, config)
        if value is not None:
            self.set_configs[f"topic {topic}", config].add(value)

    # -- groups and transactions ----------------------------------------------------------------

    def _committed(self, reply: Reply) -> Iterator[tuple[Subject, _Claim]]:
        """Offsets that a response accepted; others are unknown if there is none."""
        group = self._name("group", reply.request["group_id"])
        self._claims.pop(("group", group), None)
        results = dict(self._topics.logs(reply.body))
        for log, partition in self._topics.logs(reply.request):
            if log not in results:
                self._claim(None, "commit", group, *log, last_ns=FOREVER_NS)
            elif results[log]["error_code"] == 0:
                offset = str(partition["committed_offset"])
                yield ("commit", group, *log), _Claim(offset, reply.sent_ns, reply.end_ns)

    def _commit(self, commit: Subject, claim: _Claim) -> None:
        known = self._claims.get(commit, ())
        self._claims[commit] = [*(each for each in known if each.last_ns > claim.sent_ns), claim]

    def _offset_commit(self, reply: Reply) -> None:
        for commit, claim in self._committed(reply):
            self._commit(commit, claim)

    def _forget_group(self, reply: Reply) -> None:
        named = entries(reply.request.get("groups_names")) or [reply.request.get("group_id")]
        self._forget("commit", 1, {self._name("group", each) for each in named})
        for each in entries(reply.body.get("results")):  # of DeleteGroups
            if not each["error_code"]:
                self._claim(_GONE, "group", self._name("group", each["group_id"]))

    def _begin(self, reply: Reply) -> None:
        """A request that is part of a transaction."""
        names = [
            reply.request.get("transactional_id"),
            reply.request.get("v3_and_below_transactional_id"),
            *(one["transactional_id"] for one in entries(reply.request.get("transactions"))),
        ]
        for name in filter(None, names):
            self._claim(None, *self._transaction(name))

    def _txn_offset_commit(self, reply: Reply) -> None:
        self._begin(reply)
        self._pending[reply.request["transactional_id"]] += self._committed(reply)

    def _init_producer_id(self, reply: Reply) -> None:
        if reply.request["transactional_id"]:
            self._end(reply, "Empty")

    def _end_txn(self, reply: Reply) -> None:
        """Offsets of a transaction are ordered by their own requests, not by its markers."""
        is_commit = reply.request["committed"]
        for commit, claim in self._pending[reply.request["transactional_id"]]:
            if not reply.taken:
                self._commit(commit, _Claim(None, claim.sent_ns, FOREVER_NS))
            elif is_commit:
                self._commit(commit, claim._replace(last_ns=reply.end_ns))
        self._end(reply, "CompleteCommit" if is_commit else "CompleteAbort")

    def _end(self, reply: Reply, state: str) -> None:
        """Note the end of a transaction, if the answer has no error; else it is unknown."""
        name = reply.request["transactional_id"]
        is_aborted = state != "CompleteCommit" if reply.taken else None
        self._logs.end_transaction(name, is_aborted=is_aborted)
        self._pending.pop(name, None)
        claimed = state if reply.taken else None
        self._claim(claimed, *self._transaction(name), last_ns=reply.end_ns)

    def _describe_transactions(self, reply: Reply) -> None:
        """A transaction that the run has ended before is not Ongoing."""
        for each in entries(reply.body.get("transaction_states")):
            name, state = each["transactional_id"], each["transaction_state"]
            known = self._last(*self._transaction(name))
            is_over = known.value in _ENDED and known.last_ns < reply.sent_ns
            if not each["error_code"] and is_over and state == "Ongoing":
                place, note = "transaction_states[].transaction_state", "the run has ended it"
                one = Difference(place, (name,), known.value, state, note=note)
                self.contradictions.append(reply.wrong(one))

    # -- the check ------------------------------------------------------------------------------

    def check(self, state: State, held: set[str]) -> list[Difference]:
        """Findings where the state is not as claimed. held: topics that had records before."""
        there = facts_of(state) | {("group", name): Fact("there") for name in state.groups}
        expected = {
            subject: [Fact(str(each.value)) for each in claims]
            for subject, claims in self._claims.items()
            if _is_certain(subject, [each.value for each in claims], state)
        }
        return [*self._check_logs(state, held), *_differing(there, expected, _BY_ANSWERS)]

    def _check_logs(self, state: State, held: set[str]) -> Iterator[Difference]:
        for log, facts in sorted(self._logs.items(), key=lambda each: each[0]):
            if not facts.produced and facts.deleted_to < 0:
                continue
            wrong: Iterable[tuple[str, str]] = ()
            if (content := state.logs.get(log)) is not None:
                names = state.configs.get(log[0], ())
                may_shrink = any(name.startswith(_SHRINKING) for name in names)
                wrong = _wrong(facts, content, may_shrink=may_shrink, is_held=log[0] in held)
            elif log[0] in state.topics and not state.unread:
                wrong = [("a log", "none")]
            for texts in wrong:
                yield _finding(("log", *log), *texts, _BY_ANSWERS)


def _is_certain(subject: Subject, values: Sequence[str | None], state: State) -> bool:
    """Return whether claims say what has to be there, and that part of the state was read."""
    kind, name, *_ = subject
    if None in values or (kind == "topic" and _A_TOPIC in values and name in state.topics):
        return False
    part = {"topic": "topics", "commit": f"group {name}", "transaction": "transactional ids"}
    return name in state.configs if kind == "config" else part.get(kind) not in state.unread


def _wrong(
    facts: LogFacts, content: LogContent, *, may_shrink: bool, is_held: bool
) -> Iterator[tuple[str, str]]:
    """What contradicts acknowledged batches and deleted records: expected and found. is_held: the
    log had some records before."""
    end = max((each.end for each in facts.produced.values()), default=-1)
    if content.end < end:
        yield f"ends at {end} or later", f"ends at {content.end}"
    start = facts.deleted_to
    if start < 0:
        start = min(facts.produced, default=content.start)
    is_early = facts.deleted_to >= 0 and content.start < start
    if is_early or (content.start > start and not may_shrink):
        yield f"starts at {start}", f"starts at {content.start}"
    if content.batches is None or may_shrink:
        return
    kept = {base: each for base, each in facts.produced.items() if each.end > content.start}
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
        yield count_text(sum(each.records for each in produced), produced[0].base), text


# -- facts of a state -----------------------------------------------------------------------------


class Fact(NamedTuple):
    """What a state has of a subject. content: what the text stands for."""

    text: str
    content: Any = None


_NONE = Fact(_GONE)


def compare_states(state: State, references: Sequence[State]) -> list[Difference]:
    """Findings where a state is like none of the reference's, all by the capture's names."""
    found, others = facts_of(state), [facts_of(each, state) for each in references]
    subjects = found.keys() | {subject for each in others for subject in each}
    expected = {subject: [each.get(subject, _NONE) for each in others] for subject in subjects}
    return _differing(found, expected, _BY_REFERENCE)


def facts_of(state: State, like: State | None = None) -> dict[Subject, Fact]:
    """The facts that runs must have in common, by subject. Offsets are those of logs that start
    where the logs of `like` do; parts that could not be read are left out."""
    facts: dict[Subject, Fact] = {}
    for name, count in state.topics.items():
        facts["topic", name] = Fact(plural(count, "partition"))
    for log, content in state.logs.items():
        if content.batches is not None:
            rows = tuple((each.digest, each.is_aborted) for each in content.batches)
            is_appended = any(each.has_append_time for each in content.batches)
            text = f"{content.records} records{' with LogAppendTime' * is_appended}"
            facts["log", *log] = Fact(text, rows)
    for commit, offset in state.commits.items():
        start, new = (
            each.logs[commit[1:]].start if commit[1:] in each.logs else 0
            for each in (state, like or state)
        )
        facts["commit", *commit] = Fact(str(offset - start + new))
    for name, ended in state.transactions.items():
        facts["transaction", name] = Fact(ended)
    for topic, configs in state.configs.items():
        facts |= {("config", topic, name): Fact(value) for name, value in configs.items()}
    return facts


def _finding(subject: Subject, expected: str, found: str, note: str) -> Difference:
    kind, *names = subject
    hidden = kind == "config" and is_secret("value", {"name": names[1]})
    of = (_NAMES[kind].format(*names),)
    return Difference(END_STATE, of, expected, found, note=note, is_secret=hidden)


def _differing(
    found: Mapping[Subject, Fact], expected: Mapping[Subject, Sequence[Fact]], note: str
) -> list[Difference]:
    """Findings where a fact is none of those expected of its subject."""
    findings = []
    for subject, wanted in sorted(expected.items()):
        fact = found.get(subject, _NONE)
        if fact not in wanted:
            texts = [each.text for each in wanted]
            text = f"{fact.text}, but other ones" if fact.text in texts else fact.text
            either = " or ".join(dict.fromkeys(texts))
            findings.append(_finding(subject, either, text, note))
    return findings
