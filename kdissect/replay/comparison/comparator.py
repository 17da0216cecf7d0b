"""Judges the answers of a run: each beside its captured response, then all of them together.

`TreeDiff` finds the differences of one answer. Facts of the whole run (STATES) find answers that
contradict each other, and only all answers show which records did not come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from kdissect.codec.message import Message, decode_message
from kdissect.errors import DecodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.append_times import AppendTimes
from kdissect.replay.comparison.cluster_state import ClusterState
from kdissect.replay.comparison.committed_offsets import CommittedOffsets
from kdissect.replay.comparison.config_state import ConfigState
from kdissect.replay.comparison.described_rows import DescribedRows
from kdissect.replay.comparison.descriptions import Descriptions
from kdissect.replay.comparison.equivalence import Meaning
from kdissect.replay.comparison.group_state import GroupState
from kdissect.replay.comparison.heartbeat_groups import HeartbeatGroups
from kdissect.replay.comparison.log_bounds import LogBounds
from kdissect.replay.comparison.log_state import LogState
from kdissect.replay.comparison.names_in_answers import AnswerNames
from kdissect.replay.comparison.producer_ids import ProducerIds
from kdissect.replay.comparison.producer_state import ProducerState
from kdissect.replay.comparison.records import RecordLedger, digests_of
from kdissect.replay.comparison.rules import Rules, load_rules
from kdissect.replay.comparison.share_state import ShareState
from kdissect.replay.comparison.target_clock import TargetClock
from kdissect.replay.comparison.telemetry_state import TelemetryState
from kdissect.replay.comparison.timing import Timing
from kdissect.replay.comparison.token_state import TokenState
from kdissect.replay.comparison.tree_diff import FETCH_APIS, DiffContext, RequestNames, TreeDiff
from kdissect.replay.comparison.value_text import text_of
from kdissect.replay.model import (
    READ,
    Difference,
    EarlierAnswer,
    Judgement,
    Outcome,
    SkipCode,
    Step,
    Verdict,
)
from kdissect.replay.translation.fetch_limits import is_full
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.offsets import Log
from kdissect.replay.translation.producers import Producer
from kdissect.replay.workload.messages import (
    decoded,
    entries,
    error_codes,
    request_of,
    response_of,
)

# Facts of a finished run. `collect` takes each outcome, in the order of sending; then `check`
# reports the answers that contradict the others.
STATES = (
    LogState, LogBounds, AppendTimes, ProducerState, ProducerIds, ShareState, CommittedOffsets,
    GroupState, HeartbeatGroups, Descriptions, ClusterState, ConfigState, TargetClock, TokenState,
    TelemetryState,
)  # fmt: skip
# Each topic in their responses has an error code of its own.
_TOPIC_READS = frozenset({ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS})
IN_RUN = "other answers of this run show it"
_NOT_FINAL = Difference("answer", "final", "not final")

Body = dict[str, Any]


class Comparator:
    """`model.Comparison`. One for a run; judges in the order in which answers come."""

    def __init__(self, ids: IdMap, rules: Rules | None = None, strict: bool = False) -> None:
        rules = rules or load_rules()
        if strict:
            kept = tuple(rule for rule in rules.rules if rule.kind == "translated" or rule.is_own)
            rules = Rules(kept)
        self.ids = ids
        self.rules = rules
        self.ledger = RecordLedger(ids.offsets.to_target, self._producer)
        names = RequestNames(ids)
        self._context = DiffContext(ids, rules, Meaning(ids), self.ledger, names)
        # Answers whose records are looked at again when all is known of where they are.
        self._kept: dict[int, tuple[Step, Message, Message]] = {}
        self._outcomes: list[Outcome] = []
        self._names = AnswerNames(ids, names, self._outcomes)
        self._acks_0: dict[Log, set[int]] | None = None  # digests of records, if they were needed

    def _producer(self, producer_id: int, epoch: int) -> tuple[int, int] | None:
        found = self.ids.producers.target(Producer(producer_id, epoch))
        return None if found is None else (found.producer_id, found.epoch)

    def judge(self, outcome: Outcome) -> Judgement:
        self._outcomes.append(outcome)
        for earlier in outcome.earlier:
            self._look_at(outcome, earlier)
        return self._judge(outcome)

    def _judge(self, outcome: Outcome) -> Judgement:
        step = outcome.step
        exchange = step.exchange
        skipped = outcome.skipped or step.skipped
        if skipped is not None:
            if not skipped.is_finding:
                return Judgement(Verdict.SKIPPED, reason=skipped.reason)
            offered = "not offered" if skipped.code is SkipCode.API_VERSION else skipped.code.value
            difference = Difference(
                "api_version", f"v{exchange.api_version}", offered, note=skipped.reason
            )
            return Judgement(Verdict.DIFFERENT, [difference], skipped.reason)
        if outcome.error:
            return self._failed(outcome)
        if not step.expects_response:
            return Judgement(Verdict.SAME, reason="no response is expected")
        if outcome.answer is None:
            return Judgement(Verdict.ERROR, reason="no answer")
        if exchange.response is None:
            why = exchange.response_missing or "it is not in the capture"
            return Judgement(Verdict.TOLERATED, reason=f"no captured response to compare: {why}")
        version = outcome.api_version if outcome.api_version >= 0 else exchange.api_version
        if version == exchange.api_version and outcome.answer[4:] == exchange.response[4:]:
            if exchange.api_key not in FETCH_APIS:
                return Judgement(Verdict.SAME)
        captured = _decoded(exchange.response, exchange.api_key, exchange.api_version)
        answer = _decoded(outcome.answer, exchange.api_key, version)
        if isinstance(captured, str):
            return Judgement(
                Verdict.TOLERATED, reason=f"the captured response cannot be decoded: {captured}"
            )
        if isinstance(answer, str):
            return Judgement(Verdict.ERROR, reason=f"the answer cannot be decoded: {answer}")
        if version != exchange.api_version:
            _name_topics(captured.body, self.ids.names)
            _name_topics(answer.body, self.ids.target.names)
        judgement = self._judged(step, captured, answer)
        if version != exchange.api_version:
            judgement.differences.insert(
                0,
                Difference(
                    "api_version", f"v{exchange.api_version}", f"v{version}", "other-api-version",
                    "sent at the nearest version that the target speaks",
                ),
            )  # fmt: skip
            judgement.verdict = _verdict_of(judgement.differences)
        return judgement

    def differs(self, step: Step, captured: Message, answer: Message) -> bool:
        """Return whether an answer that brings no records is different, as far as is known now."""
        walk = TreeDiff(self._context, step)
        walk.run(captured, answer)
        return _verdict_of(walk.differences) is Verdict.DIFFERENT

    def _failed(self, outcome: Outcome) -> Judgement:
        """No answer came; nor did one in the capture, where its connection ended then."""
        exchange = outcome.step.exchange
        if exchange.expects_response and exchange.response is None and exchange.response_missing:
            reason = f"{outcome.error}; in the capture {exchange.response_missing}"
            return Judgement(Verdict.TOLERATED, reason=reason)
        return Judgement(Verdict.ERROR, reason=outcome.error)

    def _judged(self, step: Step, captured: Message, answer: Message) -> Judgement:
        walk = TreeDiff(self._context, step)
        walk.run(captured, answer)
        if walk.has_other_records:
            self._kept[step.number] = (step, captured, answer)
        return Judgement(_verdict_of(walk.differences), walk.differences)

    def finish(self) -> dict[int, Judgement]:
        """New judgements, by step, that only all answers together allow. Call it after the run.

        They are about records that a single answer lacks, and records whose offset was not known
        yet when their answer came.
        """
        self.ledger.forget_missing()
        changed: dict[int, Judgement] = {}
        for step, captured, answer in self._kept.values():
            changed[step.number] = self._judged(step, captured, answer)
        for number, found in self.ledger.finish().items():
            judgement = changed[number]
            by_path = {path: (count, first, other) for path, count, first, other in found}
            differences = []
            for difference in judgement.differences:
                if difference.path in by_path and by_path[difference.path][0]:
                    count, first, other = by_path[difference.path]
                    note = "other records than captured" if other else "no answer brings them"
                    difference = replace(
                        difference, rule="", note=f"{count} records from offset {first}: {note}"
                    )
                differences.append(difference)
            changed[number] = replace(
                judgement, verdict=_verdict_of(differences), differences=differences
            )
        self._allow_reordered(changed)
        self._judge_earlier(changed)
        self._judge_contradictions(changed)
        return changed

    def _allow_reordered(self, changed: dict[int, Judgement]) -> None:
        """Apply the rule `unacknowledged-order`: records of Produce requests with acks 0 may have
        another order, since no response says where they are."""
        rule = next((each for each in self.rules.rules if each.is_unacknowledged), None)
        reordered = set() if rule is None else self.ledger.reordered(self._unacknowledged)
        for number, _ in list(reordered):
            assert rule is not None
            differences = [
                replace(each, rule=rule.name)
                if not each.rule and (number, _record_path(each.path)) in reordered
                else each
                for each in changed[number].differences
            ]
            changed[number] = replace(
                changed[number], verdict=_verdict_of(differences), differences=differences
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
                        digests = digests_of(partition["records"] or b"")
                        self._acks_0[name, partition["index"]] |= digests
        return self._acks_0[log]

    def _look_at(self, outcome: Outcome, earlier: EarlierAnswer) -> None:
        """Note how an answer that was not final differs. Records of a Fetch are compared in the
        final answer; here only the error codes of its partitions are."""
        captured = response_of(outcome.step.exchange)
        answer = self.ids.answer_of(outcome.step, earlier.answer)
        if captured is None or answer is None or answer.api_version != captured.api_version:
            return
        earlier.error_codes = frozenset(error_codes(answer.body)) - {
            0, *error_codes(captured.body)
        }  # fmt: skip
        differences: list[Difference] = []
        if outcome.step.exchange.api_key in FETCH_APIS:
            was, codes = (
                set(error_codes(each.body["responses"])) - {0} for each in (captured, answer)
            )
            differences = [
                Difference("error_code", ", ".join(map(str, sorted(was))), str(code))
                for code in sorted(codes - was)
            ] or [Difference("records", "all", "not all")]
            captured, answer = (
                replace(each, body={**each.body, "responses": []}) for each in (captured, answer)
            )
        walk = TreeDiff(self._context, outcome.step)
        walk.run(captured, answer)
        earlier.differences = [each for each in walk.differences if not each.rule] + differences

    def _judge_earlier(self, changed: dict[int, Judgement]) -> None:
        """Answers that were not final and that timing does not explain are different, whatever the
        last one was."""
        retried = [each for each in self._outcomes if each.earlier]
        if not retried:
            return
        has_one_node = self.ids.target.has_one_node
        timing = Timing(self._outcomes, has_one_node=has_one_node)
        rows = DescribedRows(self._outcomes, has_one_node=has_one_node)
        for outcome in retried:
            number, differences = outcome.step.number, []
            for index, earlier in enumerate(outcome.earlier):
                is_timely = timing.explains(outcome, earlier) or self._is_full(outcome, earlier)
                found = self._wrong_names(outcome, index) or rows.wrong(outcome, index)
                earlier.is_explained = not found and is_timely
                if not earlier.is_explained:
                    found = found or earlier.differences or [_NOT_FINAL]
                    note = f"{_place(index, len(outcome.earlier))}: {earlier.reason}"
                    differences += [replace(each, rule="", note=note) for each in found]
            judgement = changed.get(number) or outcome.judgement
            if judgement is None or judgement.verdict is Verdict.ERROR:
                continue
            final = {replace(each, note="") for each in judgement.differences}  # said there once
            differences = [each for each in differences if replace(each, note="") not in final]
            if differences:
                changed[number] = replace(
                    judgement,
                    verdict=Verdict.DIFFERENT,
                    differences=[*differences, *judgement.differences],
                )

    def _is_full(self, outcome: Outcome, earlier: EarlierAnswer) -> bool:
        """Return whether a Fetch answer had no room for the records that it lacks."""
        exchange = outcome.step.exchange
        if exchange.api_key != ApiKey.FETCH:
            return False
        captured, answer = response_of(exchange), self.ids.answer_of(outcome.step, earlier.answer)
        sent = decoded(earlier.sent, "request", exchange.api_key, outcome.api_version)
        if captured is None or answer is None or sent is None:
            return False
        is_lacking_only = all(each.path == "records" for each in earlier.differences)
        limits, _ = self.ids.crowded_fetches.get(outcome.step.number, ({}, {}))
        return is_lacking_only and is_full(self.ids, sent.body, limits, captured, answer)

    def _wrong_names(self, outcome: Outcome, index: int) -> list[Difference]:
        """Differences by names in an earlier answer that no timing explains."""
        exchange = outcome.step.exchange
        if not _shows_state(outcome, index) or exchange.api_key in FETCH_APIS:
            return []
        first, version = outcome.with_answer(index), outcome.api_version
        request, response = request_of(exchange), response_of(exchange)
        sent = decoded(first.sent or b"", "request", exchange.api_key, version)
        answer = self.ids.answer_of(outcome.step, first.answer or b"")
        final = self.ids.answer_of(outcome.step, outcome.answer or b"")
        if request is None or response is None or sent is None or answer is None or final is None:
            return []
        wrong = self._names.wrong((request, response), sent, answer, final)
        return [Difference(*each) for each in wrong]

    def _judge_contradictions(self, changed: dict[int, Judgement]) -> None:
        """Answers that contradict what the run knows to be true of the target are different,
        whatever the capture has and whichever rule allows it."""
        contradicted: dict[int, list[Difference]] = defaultdict(list)
        by_number = {outcome.step.number: outcome for outcome in self._outcomes}

        def add(outcome: Outcome, path: str, expected: Any, answered: Any, note: str) -> None:
            number, index = outcome.step.number, len(outcome.earlier)
            count = len(by_number[number].earlier)
            which = f"{_place(index, count)}: " if index < count else ""
            texts = text_of(expected), text_of(answered)
            contradicted[number].append(Difference(path, *texts, note=f"{which}{note} ({IN_RUN})"))

        states = [state(self.ids) for state in STATES]
        answers = [each for outcome in self._outcomes for each in _answers(outcome)]
        for outcome in sorted(answers, key=lambda each: each.sent_ns):
            for state in states:
                state.collect(outcome)
        for state in states:
            state.check(add)
        for number, contradictions in contradicted.items():
            judgement = changed.get(number) or by_number[number].judgement
            if judgement is None or judgement.verdict is Verdict.ERROR:
                continue
            known = {each.path for each in judgement.differences if not each.rule}
            new = {each.path: each for each in contradictions if each.path not in known}
            changed[number] = replace(
                judgement,
                verdict=Verdict.DIFFERENT,
                differences=[
                    *(new.pop(each.path, each) for each in judgement.differences),
                    *new.values(),
                ],
            )


def _answers(outcome: Outcome) -> Iterator[Outcome]:
    """A read with each of its answers: earlier ones show a broker's state as well."""
    for index in range(len(outcome.earlier)):
        if _shows_state(outcome, index):
            yield outcome.with_answer(index)
    yield outcome


def _shows_state(outcome: Outcome, index: int) -> bool:
    """Return whether an earlier answer of a read has no error, or only errors of its topics."""
    api_key = outcome.step.exchange.api_key
    is_whole = api_key in _TOPIC_READS or not outcome.earlier[index].error_codes
    return outcome.step.step_class == READ and is_whole


def _place(index: int, count: int) -> str:
    """The place of an earlier answer; index from 0, count: of earlier answers."""
    return f"answer {index + 1} of {count + 1}"


def _record_path(path: str) -> str:
    """``...records[offset 5].key`` without the field of the record."""
    return path if path.endswith("records") else path.rpartition(".")[0]


def _verdict_of(differences: Iterable[Difference]) -> Verdict:
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


def _name_topics(body: Body, names: Mapping[UUID, str]) -> None:
    """Add the name to each topic that a message identifies only by id.

    The other message may be of an API version that has names instead of ids.
    """
    for value in body.values():
        if not isinstance(value, list):
            continue
        for each in value:
            if isinstance(each, dict):
                if "topic_id" in each and not (each.get("name") or each.get("topic")):
                    each["name"] = names.get(each["topic_id"], "")
                _name_topics(each, names)
