"""Judges the answers of a run: each beside what it should be, then all of them together.

An answer should be the captured response, or with `--against` the answer of the reference to the
same request: both become trees in the same vocabulary, and `diff` compares them. Records are
compared in whichever answer they come. Then the answers are compared with what the target itself
has shown (`logs`, `groups`, `claims`): such a contradiction counts whatever the capture has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kdissect.codec.message import Message, decode_message
from kdissect.errors import DecodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.diff import Found, compare
from kdissect.replay.comparison.end_state import Claims
from kdissect.replay.comparison.groups import GroupEvidence
from kdissect.replay.comparison.logs import LogEvidence
from kdissect.replay.comparison.normal_form import Normaliser, RequestNames
from kdissect.replay.comparison.records import RecordLedger, digest_of, rows_of, whole_batches
from kdissect.replay.comparison.terms import CapturedTerms, TargetTerms, Terms
from kdissect.replay.fields import FieldKind, FieldRule, FieldTable, told
from kdissect.replay.model import Difference, Judgement, Outcome, SkipCode, Step, Verdict
from kdissect.replay.translation.id_map import IdMap, Producer
from kdissect.replay.translation.offsets import Log
from kdissect.replay.workload.messages import entries, request_of

FETCH_APIS = frozenset({ApiKey.FETCH, ApiKey.SHARE_FETCH})
OTHER_VERSION, AS_SET = "other-api-version", "as-set"  # rules

Body = dict[str, Any]


class Allowances:
    """Rules that allow differences. used: how many each has allowed."""

    def __init__(self, table: FieldTable, normaliser: Normaliser) -> None:
        self._table, self._normaliser = table, normaliser
        self.used: Counter[str] = Counter()

    def judged(self, step: Step, found: Found) -> Difference:
        """The difference with the name of the first rule that allows it."""
        one = found.difference
        for rule, holder in self._rules(step.api_name, found):
            if _allows(rule, one) and self._normaliser.applies(rule, step, holder):
                self.used[rule.name] += 1
                return replace(one, rule=rule.name)
        return one

    def _rules(self, api_name: str, found: Found) -> Iterator[tuple[FieldRule, Body]]:
        """The rules about a place, with the struct that their conditions are about. Those that
        ignore a place also ignore all below it."""
        path, depth = found.difference.place, len(found.holders)
        for rule in self._table.at(api_name, path):
            yield rule, found.holders[-1] if found.holders else {}
        while depth > 1:
            path, depth = path.removesuffix("[]").rpartition(".")[0], depth - 1
            for place in (path, path.removesuffix("[]")):
                for rule in self._table.at(api_name, place):
                    if rule.is_own and rule.kind is FieldKind.IGNORE:
                        yield rule, found.holders[depth - 1]


def _allows(rule: FieldRule, one: Difference) -> bool:
    """Return whether a rule allows a pair of values."""
    if rule.kind is FieldKind.IGNORE:
        return rule.is_own
    if rule.kind is FieldKind.TOLERANCE:
        c, a = one.captured, one.answered
        if not isinstance(c, (int, float)) or not isinstance(a, (int, float)):
            return False
        return bool(abs(a - c) <= max(rule.absolute, rule.relative * abs(c)))
    if rule.kind is FieldKind.EQUAL_MODULO:
        return all(
            not values or told(value) in values
            for values, value in ((rule.captured, one.captured), (rule.answered, one.answered))
        )
    return False


@dataclass(frozen=True)
class ReferenceRun:
    """A run that another one is compared with. outcomes: by step."""

    outcomes: Sequence[Outcome]
    ids: IdMap


class _Expected:
    """What the answers of a run should be: the captured responses, or a reference's answers."""

    def __init__(self, ids: IdMap, reference: ReferenceRun | None) -> None:
        self._reference = reference
        self.terms: Terms = CapturedTerms(ids) if reference is None else TargetTerms(reference.ids)

    def message(self, step: Step) -> Message | str:
        """The decoded message; or why there is nothing to compare with."""
        exchange = step.exchange
        if self._reference is None:
            if exchange.response is None:
                why = exchange.response_missing or "it is not in the capture"
                return f"no captured response to compare: {why}"
            found = _decoded(exchange.response, exchange.api_key, exchange.api_version)
            text = "the captured response cannot be decoded"
        else:
            outcome = self._reference.outcomes[step.number]
            if outcome.answer is None:
                return f"no answer of the reference to compare: {outcome.error or 'not sent'}"
            found = _decoded(outcome.answer, exchange.api_key, outcome.api_version)
            text = "the answer of the reference cannot be decoded"
        return f"{text}: {found}" if isinstance(found, str) else found

    def offset(self, log: Log, offset: int) -> int:
        """In the capture's log."""
        if self._reference is None:
            return offset
        return self._reference.ids.offsets.to_capture(log, offset)

    def producer(self, producer_id: int, epoch: int) -> Producer:
        if self._reference is None:
            return Producer(producer_id, epoch)
        return Producer(*self.terms.producer(producer_id, epoch))


class Judge:
    """Judges one run. reference: the run that it is compared with; None for the capture."""

    def __init__(
        self, ids: IdMap, table: FieldTable, reference: ReferenceRun | None = None
    ) -> None:
        self.ids = ids
        captured = CapturedTerms(ids)
        names = RequestNames(ids.plan, captured)
        self._expected = _Expected(ids, reference)
        self._has_reference = reference is not None
        self._target_terms = TargetTerms(ids)
        self._theirs = Normaliser(
            table, self._target_terms, names, keeps_served=self._has_reference
        )
        self._ours = Normaliser(
            table, self._expected.terms, names, keeps_served=self._has_reference
        )
        self.allowances = Allowances(table, self._ours)
        self.ledger = RecordLedger(self._to_target, self._producer)
        self._evidence = LogEvidence(ids), GroupEvidence(captured, self._target_terms)
        self._acks_0: dict[Log, set[int]] | None = None  # digests of records, if they were needed

    def _to_target(self, log: Log, offset: int) -> int:
        return self.ids.offsets.to_target(log, self._expected.offset(log, offset))

    def _producer(self, producer_id: int, epoch: int) -> tuple[int, int] | None:
        return self.ids.producers.target(self._expected.producer(producer_id, epoch))

    # -- all answers ----------------------------------------------------------------------------

    def judge(self, outcomes: Iterable[Outcome]) -> None:
        """Give each outcome its judgement. Answers are taken in the order in which they came."""
        ordered = sorted(outcomes, key=lambda each: max(each.answered_ns, each.sent_ns))
        judgements = {each.step.number: self._judged(each) for each in ordered}
        found: dict[int, list[Difference]] = self.ledger.finish(self._unacknowledged)
        claims = Claims(self.ids, ordered)
        for number, differences in claims.contradicted.items():
            found[number] += differences
        for number, configs in claims.shown_configs.items():
            judgements[number] = _without(judgements[number], configs)
        for evidence in self._evidence:
            for outcome in sorted(ordered, key=lambda each: each.sent_ns):
                evidence.add(outcome)
            for number, difference in evidence.contradictions():
                found[number].append(difference)
        for outcome in ordered:
            judgement = judgements[outcome.step.number]
            more = found.get(outcome.step.number)
            outcome.judgement = judgement if more is None else _with(judgement, more)

    def _judged(self, outcome: Outcome) -> Judgement:
        step = outcome.step
        exchange = step.exchange
        skipped = outcome.skipped or step.skipped
        if skipped is not None:
            if not skipped.is_finding:
                return Judgement(Verdict.SKIPPED, reason=skipped.reason)
            offered = "not offered" if skipped.code is SkipCode.API_VERSION else skipped.code.value
            difference = Difference(
                "api_version", (), f"v{exchange.api_version}", offered, note=skipped.reason
            )
            return Judgement(Verdict.DIFFERENT, [difference], skipped.reason)
        if outcome.error:
            return _failed(outcome)
        if not step.expects_response:
            return Judgement(Verdict.SAME, reason="no response is expected")
        if outcome.answer is None:
            return Judgement(Verdict.ERROR, reason="no answer")
        if not self._has_reference and self._is_as_captured(outcome):
            return Judgement(Verdict.SAME)
        expected = self._expected.message(step)
        if isinstance(expected, str):
            return Judgement(Verdict.TOLERATED, reason=expected)
        version = outcome.api_version if outcome.api_version >= 0 else exchange.api_version
        answer = _decoded(outcome.answer, exchange.api_key, version)
        if isinstance(answer, str):
            return Judgement(Verdict.ERROR, reason=f"the answer cannot be decoded: {answer}")
        differences = self.differences(step, expected, answer)
        if exchange.api_key in FETCH_APIS:
            self._compare_records(outcome, expected, answer)
        if version != expected.api_version:
            versions = f"v{expected.api_version}", f"v{version}"
            note = "sent at the nearest version that the target speaks"
            differences.insert(
                0, Difference("api_version", (), *versions, rule=OTHER_VERSION, note=note)
            )
        return Judgement(verdict_of(differences), differences)

    def _is_as_captured(self, outcome: Outcome) -> bool:
        """Return whether an answer is the captured one byte for byte. Those with records are looked
        at nevertheless, since others may lack them."""
        exchange = outcome.step.exchange
        return (
            outcome.answer is not None
            and exchange.response is not None
            and outcome.api_version in (-1, exchange.api_version)
            and outcome.answer[4:] == exchange.response[4:]
            and exchange.api_key not in FETCH_APIS
        )

    def differences(self, step: Step, expected: Message, answer: Message) -> list[Difference]:
        found = compare(
            self._ours.tree(step, expected),
            self._theirs.tree(step, answer),
            common_only=expected.api_version != answer.api_version,
            with_served=self._has_reference,
        )
        return [self.allowances.judged(step, each) for each in found]

    # -- records --------------------------------------------------------------------------------

    def _compare_records(self, outcome: Outcome, expected: Message, answer: Message) -> None:
        """Compare the records of a Fetch. Several answers to a ShareFetch are one: each brings
        other records."""
        wanted = _fetched(expected, self._expected.terms)
        answers = [answer]
        if answer.api_key == ApiKey.SHARE_FETCH:
            frames = (each.answer for each in outcome.earlier)
            decoded = (_decoded(each, answer.api_key, answer.api_version) for each in frames)
            answers = [*(each for each in decoded if isinstance(each, Message)), answer]
        brought: dict[Log, bytes] = defaultdict(bytes)
        for each in answers:
            for log, data in _fetched(each, self._target_terms).items():
                brought[log] += data
        for log in wanted.keys() | brought.keys():
            self.ledger.compare(
                outcome.step.number, log, wanted.get(log, b""), brought.get(log, b"")
            )

    def _unacknowledged(self, log: Log) -> set[int]:
        """Digests of the records that Produce requests with acks 0 write to a log."""
        if self._acks_0 is None:
            self._acks_0 = defaultdict(set)
            for step in self.ids.plan.steps:
                if step.exchange.api_key != ApiKey.PRODUCE or step.expects_response:
                    continue
                request = request_of(step.exchange)
                for topic in entries(request.body["topic_data"] if request is not None else None):
                    name = self.ids.topic_name(topic.get("name") or "", topic.get("topic_id"))
                    for partition in entries(topic["partition_data"]):
                        data = partition["records"] or b""
                        digests = map(digest_of, rows_of(data, whole_batches(data)))
                        self._acks_0[name, partition["index"]].update(digests)
        return self._acks_0[log]


def _fetched(message: Message, terms: Terms) -> dict[Log, bytes]:
    """The record data of a Fetch by log."""
    found: dict[Log, bytes] = defaultdict(bytes)
    for topic in entries(message.body["responses"]):
        name = terms.topic(topic.get("topic") or "") or terms.topic_of(topic["topic_id"])
        for partition in entries(topic["partitions"]):
            found[name, partition["partition_index"]] += partition["records"] or b""
    return found


def _failed(outcome: Outcome) -> Judgement:
    """No answer came; nor did one in the capture, where its connection ended then."""
    exchange = outcome.step.exchange
    if exchange.expects_response and exchange.response is None and exchange.response_missing:
        reason = f"{outcome.error}; in the capture {exchange.response_missing}"
        return Judgement(Verdict.TOLERATED, reason=reason)
    return Judgement(Verdict.ERROR, reason=outcome.error)


def _with(judgement: Judgement, more: list[Difference]) -> Judgement:
    """The judgement with differences that other answers show."""
    if judgement.verdict in (Verdict.ERROR, Verdict.SKIPPED):
        return judgement
    known = {each.path for each in judgement.differences if not each.rule}
    differences = [
        *judgement.differences, *(each for each in more if each.path not in known),
    ]  # fmt: skip
    return replace(judgement, verdict=verdict_of(differences), differences=differences)


def _without(judgement: Judgement, configs: set[tuple[str, ...]]) -> Judgement:
    """The judgement with these configs tolerated: the target shows them as the run has set them."""
    differences = [
        replace(each, rule=each.rule or AS_SET) if each.keys in configs else each
        for each in judgement.differences
    ]
    if differences == judgement.differences:
        return judgement
    return replace(judgement, verdict=verdict_of(differences), differences=differences)


def verdict_of(differences: Iterable[Difference]) -> Verdict:
    verdict = Verdict.SAME
    for each in differences:
        if not each.rule:
            return Verdict.DIFFERENT
        verdict = Verdict.TOLERATED
    return verdict


def _decoded(frame: bytes, api_key: int, api_version: int) -> Message | str:
    try:
        return decode_message(frame, side="response", api_key=api_key, api_version=api_version)
    except (DecodeError, ValueError) as error:
        return str(error)
