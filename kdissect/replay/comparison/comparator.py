"""Judges the answers of a run: each beside its captured response, then all of them together.

`TreeDiff` finds the differences of one answer. Facts of the whole run (STATES) find answers that
contradict each other, and only all answers show which records did not come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from kdissect.codec.message import Message, decode_message
from kdissect.errors import DecodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.cluster_state import ClusterState
from kdissect.replay.comparison.committed_offsets import CommittedOffsets
from kdissect.replay.comparison.equivalence import Meaning
from kdissect.replay.comparison.group_state import GroupState
from kdissect.replay.comparison.heartbeat_groups import HeartbeatGroups
from kdissect.replay.comparison.log_bounds import LogBounds
from kdissect.replay.comparison.log_state import LogState
from kdissect.replay.comparison.records import RecordLedger, digests_of
from kdissect.replay.comparison.rules import Rules, load_rules
from kdissect.replay.comparison.share_state import ShareState
from kdissect.replay.comparison.tree_diff import FETCH_APIS, DiffContext, RequestNames, TreeDiff
from kdissect.replay.comparison.value_text import text_of
from kdissect.replay.model import (
    Difference,
    Judgement,
    Outcome,
    SkipCode,
    Step,
    Verdict,
)
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.offsets import Log
from kdissect.replay.translation.producers import Producer
from kdissect.replay.workload.messages import (
    entries,
    request_of,
)

# Facts of a finished run. `collect` takes each outcome, in the order of sending; then `check`
# reports the answers that contradict the others.
STATES = (
    LogState, LogBounds, ShareState, CommittedOffsets, GroupState, HeartbeatGroups, ClusterState,
)  # fmt: skip
IN_RUN = "other answers of this run show it"

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
        self._acks_0: dict[Log, set[int]] | None = None  # digests of records, if they were needed

    def _producer(self, producer_id: int, epoch: int) -> tuple[int, int] | None:
        found = self.ids.producers.target(Producer(producer_id, epoch))
        return None if found is None else (found.producer_id, found.epoch)

    def judge(self, outcome: Outcome) -> Judgement:
        self._outcomes.append(outcome)
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

    def _judge_contradictions(self, changed: dict[int, Judgement]) -> None:
        """Answers that contradict what the run knows to be true of the target are different,
        whatever the capture has and whichever rule allows it."""
        contradicted: dict[int, list[Difference]] = defaultdict(list)
        by_number = {outcome.step.number: outcome for outcome in self._outcomes}

        def add(outcome: Outcome, path: str, expected: Any, answered: Any, note: str) -> None:
            texts = text_of(expected), text_of(answered)
            difference = Difference(path, *texts, note=f"{note} ({IN_RUN})")
            contradicted[outcome.step.number].append(difference)

        states = [state(self.ids) for state in STATES]
        for outcome in sorted(self._outcomes, key=lambda each: each.sent_ns):
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
