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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.groups import CLASSIC_APIS, Groups
from kdissect.replay.comparison.logs import MANY, LogFacts, Logs, Produced
from kdissect.replay.comparison.records import Contradiction, RecordCount, content_digest
from kdissect.replay.comparison.terms import Terms
from kdissect.replay.model import END_STATE, FOREVER_NS, Difference, Outcome, RunFinding
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
_GONE, _A_TOPIC = "none", "a topic"  # values: there is none; of an unknown number of partitions

Body = dict[str, Any]
Commit = tuple[str, str, str, int]  # "commit", group, topic, partition


class _Claim(NamedTuple):
    """A value that a request has left of a subject; None if nobody knows which. last_ns: the last
    time at which it took effect. owner: the transactional id of a committed offset, "" none."""

    value: str | None
    sent_ns: int = -1
    last_ns: int = -1
    owner: str = ""


class Claims:
    """Claims of a run's answers about the state after it, by the capture's names.

    contradictions: answers that contradict earlier claims. set_configs: (resource, config) -> the
    values that the run has set.
    """

    def __init__(self, ids: IdMap, outcomes: Iterable[Outcome]) -> None:
        self._terms = Terms.of_target(ids)
        self.logs = Logs(self._terms)
        self.groups = Groups(Terms.of_capture(ids), self._terms)
        self.contradictions: list[Contradiction] = []
        self.set_configs: dict[tuple[str, ...], set[str]] = defaultdict(set)
        # The claims that later ones leave, one but for commits that overlap; by subject: a topic, a
        # config of a topic, a group, a transactional id, or a commit.
        self._claims: dict[tuple[Any, ...], list[_Claim]] = {}
        self._pending: dict[str, list[tuple[Commit, str]]] = defaultdict(
            list
        )  # by transactional id
        readers: dict[int, Callable[[Outcome, Body, Body | None], None]] = {
            ApiKey.PRODUCE: self._begin,
            ApiKey.METADATA: self._metadata,
            ApiKey.CREATE_TOPICS: self._create_topics,
            ApiKey.DELETE_TOPICS: self._delete_topics,
            ApiKey.CREATE_PARTITIONS: self._create_partitions,
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

    def _value(self, *subject: Any) -> str | None:
        claims = self._claims.get(subject)
        return claims[-1].value if claims else None

    def _named(self, kind: str) -> Iterator[tuple[Any, ...]]:
        return (subject for subject in list(self._claims) if subject[0] == kind)

    def _forget(self, kind: str, place: int, names: Collection[str]) -> None:
        """Forget the claims of a kind about these names, which stand at a place of the subject."""
        for subject in self._named(kind):
            if subject[place] in names:
                del self._claims[subject]

    @property
    def gone(self) -> set[str]:
        """Topics that the run deleted at last."""
        return {name for _, name in self._named("topic") if self._value("topic", name) == _GONE}

    @property
    def committed_groups(self) -> set[str]:
        """Groups with committed offsets."""
        return {subject[1] for subject in self._named("commit")}

    @property
    def transactional_ids(self) -> set[str]:
        """Transactional ids whose state the answers decide."""
        return {name for _, name in self._named("transaction") if self._value("transaction", name)}

    # -- topics ---------------------------------------------------------------------------------

    def _metadata(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        """A request that creates topics may bring back one that was deleted."""
        if request.get("allow_auto_topic_creation", True):
            for name in [self._terms.topics.of(each) for each in entries(request["topics"])]:
                if self._value("topic", name) == _GONE:
                    del self._claims["topic", name]

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
            if not code:
                self._forget("config", 1, {name})
                count = len(entries(topic["assignments"])) or topic["num_partitions"]
                text = plural(count, "partition") if count > 0 else _A_TOPIC
                self._claims["topic", name] = [_Claim(None if code is None else text)]
            for each in entries(topic["configs"]) if code == 0 else ():
                self._set_config(name, each["name"], each["value"])

    def _delete_topics(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        results = entries((answer or {}).get("responses"))
        done = [self._terms.topics.of(each) for each in results if not each["error_code"]]
        asked = [{"name": each} for each in entries(request.get("topic_names"))]
        asked += entries(request.get("topics"))
        for name in map(self._terms.topics.of, asked) if answer is None else done:
            self._claims["topic", name] = [_Claim(None if answer is None else _GONE)]
            self.logs.forget_topic(name)
            self._forget("config", 1, {name})
            self._forget("commit", 2, {name})  # the groups' offsets go with the topic

    def _create_partitions(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for name, topic, code in self._created(request, answer, "results"):
            if ("topic", name) in self._claims and not code:
                text = _A_TOPIC if code is None else plural(topic["count"], "partition")
                self._claims["topic", name] = [_Claim(text)]

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
            name = self._terms.topic(name)
            if not is_incremental:
                self._forget("config", 1, {name})
            for each in entries(resource["configs"]):
                is_set = each.get("config_operation", _SET) == _SET and answer is not None
                self._set_config(name, each["name"], each["value"] if is_set else None)

    def _set_config(self, topic: str, config: str, value: str | None) -> None:
        self._claims["config", topic, config] = [_Claim(value)]
        if value is not None:
            self.set_configs[f"topic {topic}", config].add(value)

    # -- groups and transactions ----------------------------------------------------------------

    def _committed(self, request: Body, answer: Body | None) -> Iterator[tuple[Commit, str]]:
        """Offsets that a response accepted; others are unknown if there is none."""
        group = self._terms.group(request["group_id"])
        self._claims.pop(("group", group), None)
        results = dict(self._terms.logs(answer))
        for log, partition in self._terms.logs(request):
            if log not in results:
                self._claims["commit", group, *log] = [_Claim(None, last_ns=FOREVER_NS)]
            elif results[log]["error_code"] == 0:
                yield ("commit", group, *log), str(partition["committed_offset"])

    def _commit(self, commit: Commit, claim: _Claim) -> None:
        """Transactions of one id follow each other: the markers of earlier ones are written."""
        kept = [
            each
            for each in self._claims.get(commit, ())
            if each.last_ns > claim.sent_ns and not (each.owner and each.owner == claim.owner)
        ]
        self._claims[commit] = [*kept, claim]

    def _offset_commit(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        for commit, offset in self._committed(request, answer):
            self._commit(commit, _Claim(offset, outcome.sent_ns, outcome.answered_ns))

    def _forget_group(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        named = set(entries(request.get("groups_names"))) or {request.get("group_id")}
        self._forget("commit", 1, set(map(self._terms.group, named)))
        for each in entries((answer or {}).get("results")):  # of DeleteGroups
            if not each["error_code"]:
                self._claims["group", self._terms.group(each["group_id"])] = [_Claim(_GONE)]

    def _begin(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        """A request that is part of a transaction."""
        name = request.get("transactional_id") or request.get("v3_and_below_transactional_id")
        several = [one["transactional_id"] for one in entries(request.get("transactions"))]
        for each in filter(None, (name, *several)):
            self._claims["transaction", self._terms.transactional_id(each)] = [_Claim(None)]

    def _txn_offset_commit(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        self._begin(outcome, request, answer)
        self._pending[request["transactional_id"]] += self._committed(request, answer)

    def _init_producer_id(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        if request["transactional_id"]:
            is_done = answer is not None and answer["error_code"] == 0
            self._end(outcome, request["transactional_id"], "Empty" if is_done else None)

    def _end_txn(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        name, is_commit = request["transactional_id"], request["committed"]
        is_done = answer is not None and answer["error_code"] == 0
        for commit, offset in self._pending[name] if is_commit or not is_done else ():
            last_ns = outcome.answered_ns + _MARKER_NS if is_done else FOREVER_NS
            claim = _Claim(offset if is_done else None, outcome.sent_ns, last_ns, name)
            self._commit(commit, claim)
        state = "CompleteCommit" if is_commit else "CompleteAbort"
        self._end(outcome, name, state if is_done else None)

    def _end(self, outcome: Outcome, name: str, state: str | None) -> None:
        """Note the end of a transaction; None if it is not known how it ends."""
        is_aborted = None if state is None else state != "CompleteCommit"
        self.logs.end_transaction(name, is_aborted=is_aborted)
        self._pending.pop(name, None)
        claim = _Claim(state, last_ns=outcome.answered_ns)
        self._claims["transaction", self._terms.transactional_id(name)] = [claim]

    def _describe_transactions(self, outcome: Outcome, request: Body, answer: Body | None) -> None:
        """A transaction that the run has ended before is not Ongoing."""
        for each in entries((answer or {}).get("transaction_states")):
            name, state = each["transactional_id"], each["transaction_state"]
            subject = "transaction", self._terms.transactional_id(name)
            [known] = self._claims.get(subject, [_Claim(None)])
            is_over = known.value in _ENDED and known.last_ns < outcome.sent_ns
            if not each["error_code"] and is_over and state == "Ongoing":
                place, note = "transaction_states[].transaction_state", "the run has ended it"
                difference = Difference(place, (name,), known.value, state, note=note)
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
        for (kind, name, *more), claims in self._claims.items():
            values = [each.value for each in claims]
            facts = [Fact(each) for each in values if each is not None]
            is_read = {
                "topic": "topics" not in state.unread,
                "config": name in state.configs,
                "group": True,
                "commit": f"group {name}" not in state.unread,
                "transaction": f"transactional id {name}" not in state.unread,
            }[kind]
            if None in values or not is_read or (_A_TOPIC in values and name in state.topics):
                continue
            if kind == "commit":
                yield _committed_offset((name, *more)), facts
            elif kind == "config":
                yield f"config {more[0]} of {name}", facts
            else:
                yield f"{'transactional id' if kind == 'transaction' else kind} {name}", facts


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


_NONE = Fact(_GONE)


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


def _committed_offset(commit: tuple[Any, ...]) -> str:
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
