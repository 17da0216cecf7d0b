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

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from kdissect.codec.redaction import is_secret
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batches import content_digest
from kdissect.replay.comparison.logs import MANY, LogFacts, Logs, Produced, Readers, count_text
from kdissect.replay.model import END_STATE, FOREVER_NS, Contradiction, Difference, Reply
from kdissect.replay.target.state import GONE, LogContent, State, Subject, Value
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import TOPIC_RESOURCE, entries
from kdissect.text import plural

_BY_ANSWERS = "by the answers of this run"
_BY_REFERENCE = "by the reference"
_RETENTION = ("retention.bytes", "retention.ms", "local.retention.bytes", "local.retention.ms")
_CLEANING = ("cleanup.policy", *_RETENTION)
_SET = 0  # operation of IncrementalAlterConfigs
_ENDED = ("Empty", "CompleteCommit", "CompleteAbort")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_A_TOPIC = "a topic"  # the value of one with an unknown number of partitions

# A subject is a kind and its names; as text:
_NAMES = {
    "topic": "topic {}",
    "log": "log {}-{}",  # topic, partition
    "config": "config {1} of {0}",  # topic, name
    "group": "group {}",
    "commit": "committed offset of {} in {}-{}",  # group, topic, partition
    "transactional-id": "transactional id {}",
}


class _Claim(NamedTuple):
    """A value that a request has left of a subject; None if nobody knows which. It took effect
    between sent_ns and last_ns."""

    value: Value | None
    sent_ns: int
    last_ns: int


_UNKNOWN = _Claim(None, FOREVER_NS, FOREVER_NS)


class Claims:
    """Claims of a run's answers about the state after it, by the subjects of `target.state`.

    readers: of each final reply. contradictions: answers that contradict earlier claims.
    set_configs: (resource, config) -> the values that the run has set.
    """

    def __init__(self, ids: IdMap, logs: Logs) -> None:
        self._topics, self._name = ids.target_topics, ids.captured_name
        self._logs = logs
        self.contradictions: list[Contradiction] = []
        self.set_configs: dict[tuple[str, ...], set[str]] = defaultdict(set)
        # The claims that later ones leave, one but for requests that overlap.
        self._claims: dict[Subject, list[_Claim]] = {}
        # by transactional id: the commits in the open transaction
        self._pending: dict[str, list[tuple[Subject, _Claim]]] = defaultdict(list)
        self.readers: Readers = {
            ApiKey.PRODUCE: self._claim_transaction,
            ApiKey.METADATA: self._metadata,
            ApiKey.CREATE_TOPICS: self._create,
            ApiKey.CREATE_PARTITIONS: self._create,
            ApiKey.DELETE_TOPICS: self._delete_topics,
            ApiKey.ALTER_CONFIGS: self._alter_configs,
            ApiKey.INCREMENTAL_ALTER_CONFIGS: self._alter_configs,
            ApiKey.JOIN_GROUP: self._group_is_back,
            ApiKey.CONSUMER_GROUP_HEARTBEAT: self._group_is_back,
            ApiKey.SHARE_GROUP_HEARTBEAT: self._group_is_back,
            ApiKey.STREAMS_GROUP_HEARTBEAT: self._group_is_back,
            ApiKey.OFFSET_COMMIT: self._offset_commit,
            ApiKey.TXN_OFFSET_COMMIT: self._txn_offset_commit,
            ApiKey.OFFSET_DELETE: self._forget_group,
            ApiKey.DELETE_GROUPS: self._forget_group,
            ApiKey.INIT_PRODUCER_ID: self._init_producer_id,
            ApiKey.ADD_PARTITIONS_TO_TXN: self._claim_transaction,
            ApiKey.ADD_OFFSETS_TO_TXN: self._claim_transaction,
            ApiKey.END_TXN: self._end_txn,
            ApiKey.DESCRIBE_TRANSACTIONS: self._show_transactions,
            ApiKey.LIST_TRANSACTIONS: self._show_transactions,
        }

    def _claim(self, reply: Reply, value: Value | None, *subject: Any) -> None:
        self._add(subject, _Claim(value, reply.sent_ns, reply.end_ns))

    def _add(self, subject: Subject, claim: _Claim) -> None:
        """A claim replaces those that were true before its request was sent."""
        known = self._claims.get(subject, ())
        self._claims[subject] = [*(each for each in known if each.last_ns > claim.sent_ns), claim]

    def _forget(self, kind: str, place: int, names: Collection[str]) -> None:
        """Forget the claims of a kind about these names, which stand at a place of the subject."""
        for subject in [each for each in self._claims if each[0] == kind]:
            if subject[place] in names:
                del self._claims[subject]

    @property
    def decided(self) -> dict[Subject, list[Value | None]]:
        """The values that the answers leave possible, of subjects of which they are known."""
        values = {each: [one.value for one in claims] for each, claims in self._claims.items()}
        return {subject: found for subject, found in values.items() if None not in found}

    # -- topics ---------------------------------------------------------------------------------

    def _metadata(self, reply: Reply) -> None:
        """A request that creates topics may bring back one that was deleted."""
        if reply.request.get("allow_auto_topic_creation", True):
            for name in map(self._topics.of, entries(reply.request["topics"])):
                *_, last = self._claims.get(("topic", name), [_UNKNOWN])
                if last.value == GONE:
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
            unknown = None if is_new else _A_TOPIC
            known = count if count > 0 else _A_TOPIC
            self._claim(reply, unknown if code is None else known, "topic", name)
            for each in entries(topic.get("configs")) if code == 0 else ():
                self._set_config(reply, name, each["name"], each["value"])

    def _delete_topics(self, reply: Reply) -> None:
        results = entries(reply.body.get("responses"))
        done = [self._topics.of(each) for each in results if not each["error_code"]]
        for name in reply.step.named("topic") if reply.answer is None else done:
            self._claim(reply, None if reply.answer is None else GONE, "topic", name)
            self._logs.topic_deleted(name, reply)
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
                self._set_config(reply, name, each["name"], each["value"] if is_set else None)

    def _set_config(self, reply: Reply, topic: str, config: str, value: str | None) -> None:
        self._claim(reply, value, "config", topic, config)
        if value is not None:
            self.set_configs[f"topic {topic}", config].add(value)

    # -- groups and transactions ----------------------------------------------------------------

    def _group_is_back(self, reply: Reply) -> None:
        """A deleted group comes back with a member or a commit."""
        self._claims.pop(("group", self._name("group", reply.request["group_id"])), None)

    def _committed(self, reply: Reply) -> Iterator[tuple[Subject, _Claim]]:
        """Claims of a request that commits offsets. Refused ones stay as they were."""
        self._group_is_back(reply)
        group = self._name("group", reply.request["group_id"])
        results = dict(self._topics.logs(reply.body))
        for log, partition in self._topics.logs(reply.request):
            if log not in results or results[log]["error_code"] == 0:
                offset = partition["committed_offset"] if log in results else None
                yield ("commit", group, *log), _Claim(offset, reply.sent_ns, reply.end_ns)

    def _offset_commit(self, reply: Reply) -> None:
        for commit, claim in self._committed(reply):
            self._add(commit, claim)

    def _forget_group(self, reply: Reply) -> None:
        self._forget("commit", 1, reply.step.named("group"))
        for each in entries(reply.body.get("results")):  # of DeleteGroups
            if not each["error_code"]:
                self._claim(reply, GONE, "group", self._name("group", each["group_id"]))

    def _claim_transaction(self, reply: Reply, state: str | None = None) -> None:
        """A request that is part of a transaction, or leaves it in a state."""
        for name in reply.step.named("transactional-id"):
            self._claim(reply, state, "transactional-id", name)

    def _txn_offset_commit(self, reply: Reply) -> None:
        self._claim_transaction(reply)
        self._pending[reply.request["transactional_id"]] += self._committed(reply)

    def _init_producer_id(self, reply: Reply) -> None:
        if reply.request["transactional_id"]:
            self._end(reply, "Empty")

    def _end_txn(self, reply: Reply) -> None:
        """Offsets of a transaction are ordered by their own requests, not by its markers."""
        is_commit = reply.request["committed"]
        for commit, claim in self._pending[reply.request["transactional_id"]]:
            if not reply.taken:
                self._add(commit, _Claim(None, claim.sent_ns, FOREVER_NS))
            elif is_commit:
                self._add(commit, claim._replace(last_ns=reply.end_ns))
        self._end(reply, "CompleteCommit" if is_commit else "CompleteAbort")

    def _end(self, reply: Reply, state: str) -> None:
        """Note the end of a transaction, if the answer has no error; else it is unknown."""
        name = reply.request["transactional_id"]
        is_aborted = state != "CompleteCommit" if reply.taken else None
        self._logs.end_transaction(reply, is_aborted=is_aborted)
        self._pending.pop(name, None)
        self._claim_transaction(reply, state if reply.taken else None)

    def _show_transactions(self, reply: Reply) -> None:
        """A transaction that the run has ended before is not Ongoing."""
        for each in entries(reply.body.get("transaction_states")):
            name, state = each["transactional_id"], each["transaction_state"]
            subject = "transactional-id", self._name("transactional-id", name)
            *_, (value, _, last_ns) = self._claims.get(subject, [_UNKNOWN])
            is_over = value in _ENDED and last_ns < reply.sent_ns
            if not each.get("error_code") and is_over and state == "Ongoing":
                place, note = "transaction_states[].transaction_state", "the run has ended it"
                one = Difference(place, (name,), value, state, note=note)
                self.contradictions.append(reply.wrong(one))

    # -- the check ------------------------------------------------------------------------------

    def check(self, state: State, held: set[str]) -> list[Difference]:
        """Findings where the state is not as claimed. held: topics that had records before."""
        decided = {}
        for subject, values in self.decided.items():
            kind, name, *_ = subject
            part = f"commits of {name}" if kind == "commit" else f"{kind}s"
            is_there = kind != "config" or ("topic", name) in state.facts
            if is_there and part not in state.unread:
                decided[subject] = values
        return [*self._check_logs(state, held), *_differing(state.facts, decided, _BY_ANSWERS)]

    def _check_logs(self, state: State, held: set[str]) -> Iterator[Difference]:
        for (log, _), facts in sorted(self._logs.items(), key=lambda each: each[0]):
            if facts is not self._logs.of(log) or (not facts.produced and facts.deleted_to < 0):
                continue
            wrong: Iterable[tuple[str, str]] = ()
            if (content := state.logs.get(log)) is not None:
                configs = {name: state.facts.get(("config", log[0], name)) for name in _CLEANING}
                wrong = _wrong(facts, content, configs, is_held=log[0] in held)
            elif ("topic", log[0]) in state.facts and not state.unread:
                wrong = [("a log", "none")]
            for texts in wrong:
                yield _finding(("log", *log), *texts, _BY_ANSWERS)


def _wrong(
    facts: LogFacts, content: LogContent, configs: Mapping[str, Value | None], *, is_held: bool
) -> Iterator[tuple[str, str]]:
    """What contradicts acknowledged batches and deleted records: expected and found. Compaction
    deletes any records, retention those at the start. is_held: the log had some records before."""
    end = max((each.end for each in facts.produced.values()), default=-1)
    if content.end < end:
        yield f"ends at {end} or later", f"ends at {content.end}"
    start = facts.deleted_to
    if start < 0:
        start = min(facts.produced, default=content.start)
    is_early = facts.deleted_to >= 0 and content.start < start
    is_compacted = "compact" in str(configs["cleanup.policy"])
    may_begin_later = is_compacted or any(configs[name] is not None for name in _RETENTION)
    if is_early or (content.start > start and not may_begin_later):
        yield f"starts at {start}", f"starts at {content.start}"
    if content.batches is None or is_compacted:
        return
    kept = {base: each for base, each in facts.produced.items() if each.end > content.start}
    # those from the log's start on; a batch that begins before it may come with all of its records
    wanted = sum(each.end - max(base, content.start) for base, each in kept.items())
    most, found = sum(each.records for each in kept.values()) + facts.unknown, content.records or 0
    if found < wanted or (not is_held and found > most):
        maybe = f" to {most}" if wanted < most < MANY else ""
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


# -- facts of two states --------------------------------------------------------------------------


# The records of a log: as text, and of each batch the digest and whether it is aborted.
_Records = tuple[str, tuple[tuple[int, bool], ...]]
_Value = Value | _Records | None


def compare_states(state: State, references: Sequence[State]) -> list[Difference]:
    """Findings where a state is like none of the reference's."""
    found, *others = (_comparable(each, state) for each in (state, *references))
    subjects = found.keys() | {subject for each in others for subject in each}
    expected = {subject: [each.get(subject, GONE) for each in others] for subject in subjects}
    return list(_differing(found, expected, _BY_REFERENCE))


def _comparable(state: State, like: State) -> dict[Subject, _Value]:
    """The facts that runs must have in common. Offsets are those of logs that start where the logs
    of `like` do; logs that could not be read are left out."""
    facts: dict[Subject, _Value] = {**state.facts}
    for subject, value in state.facts.items():
        if subject[0] == "commit" and subject[2:] in state.logs.keys() & like.logs.keys():
            log = subject[2:]
            facts[subject] = int(value) - state.logs[log].start + like.logs[log].start
    for log, content in state.logs.items():
        if content.batches is not None:
            rows = tuple((each.digest, each.is_aborted) for each in content.batches)
            is_appended = any(each.has_append_time for each in content.batches)
            text = f"{content.records} records{' with LogAppendTime' * is_appended}"
            facts["log", *log] = text, rows
    return facts


def _differing(
    found: Mapping[Subject, _Value], expected: Mapping[Subject, Sequence[_Value]], note: str
) -> Iterator[Difference]:
    """Findings where a fact is none of those expected of its subject."""
    for subject, wanted in sorted(expected.items()):
        value = found.get(subject, GONE)
        is_some = _A_TOPIC in wanted and value != GONE
        if subject[0] == "config" and _parsed(value) in map(_parsed, wanted):
            continue
        if value not in wanted and not is_some:
            texts = dict.fromkeys(_text(subject, each) for each in wanted)
            text = _text(subject, value)
            more = ", but other ones" * (text in texts)
            yield _finding(subject, " or ".join(texts), text + more, note)


def _parsed(value: _Value) -> tuple[Decimal | str, ...]:
    """A config as brokers read and describe it: ``compact, delete``, ``0.10`` and ``True`` are
    ``compact,delete``, ``0.1`` and ``true``."""
    parts = [each.strip() for each in str(value).split(",")]
    lower = [each.lower() if each.lower() in ("true", "false") else each for each in parts]
    return tuple(Decimal(each) if _NUMBER.fullmatch(each) else each for each in lower)


def _text(subject: Subject, value: _Value) -> str:
    if subject[0] == "topic" and isinstance(value, int):
        return plural(value, "partition")
    return value[0] if isinstance(value, tuple) else str(value)


def _finding(subject: Subject, expected: str, found: str, note: str) -> Difference:
    kind, *names = subject
    hidden = kind == "config" and is_secret("value", {"name": names[1]})
    of = (_NAMES[kind].format(*names),)
    return Difference(END_STATE, of, expected, found, note=note, is_secret=hidden)
