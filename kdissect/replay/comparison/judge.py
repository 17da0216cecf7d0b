"""Judges the answers of a run: each beside what it should be, then all of them together.

An answer should be the captured response, or with `--against` the answer of the reference to the
same request: both become trees in the same vocabulary, which are compared. Records are
compared in whichever answer they come. Then the answers are compared with what the target itself
has shown (`claims`, `logs`, `groups`): such a contradiction counts whatever the capture has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay import model
from kdissect.replay.batches import headers
from kdissect.replay.comparison.claims import Claims, compare_states
from kdissect.replay.comparison.groups import Groups
from kdissect.replay.comparison.kinds import Releases, tolerate_changes
from kdissect.replay.comparison.logs import MANY, LogFacts, Logs, compare_records
from kdissect.replay.comparison.normal_form import Normaliser, compare, is_set, requested
from kdissect.replay.fields import FieldRule, FieldTable, told
from kdissect.replay.model import Difference, Judgement, Log, Outcome, Reply, Step, Verdict
from kdissect.replay.target.state import State
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import Body, decoded, decoding, response_body, response_of

FETCH_APIS = frozenset({ApiKey.FETCH, ApiKey.SHARE_FETCH})
OTHER_VERSION, AS_SET, NOISE = "other-api-version", "as-set", "control-runs"  # rules
_EVIDENCE = ("error_code", "offset", "record", "watermark", "aborted_transactions")


class RunFacts:
    """The answers of a run, and what they show of the target's logs and groups and claim about the
    end.

    outcomes: by step, or some of them. state: of the target after the run, None if it was not read.
    findings: about that state.
    """

    def __init__(self, ids: IdMap, outcomes: Sequence[Outcome]) -> None:
        self.ids, self.outcomes = ids, outcomes
        self.state: State | None = None
        self.findings: list[Difference] = []
        self.logs, self.groups = Logs(ids), Groups(ids)
        self.claims = Claims(ids, self.logs)
        always, at_last = {**self.logs.readers, **self.groups.readers}, self.claims.readers
        for outcome in self.in_order():
            key = outcome.step.exchange.api_key
            for is_final, reply in _replies(outcome) if key in always or key in at_last else ():
                if key in always:
                    always[key](reply)
                if is_final and key in at_last:
                    at_last[key](reply)

    def in_order(self) -> list[Outcome]:
        """The outcomes in the order in which the answers came."""
        return sorted(self.outcomes, key=lambda each: max(each.answered_ns, each.sent_ns))


def _replies(outcome: Outcome) -> Iterator[tuple[bool, Reply]]:
    """Each time that a request was sent, with its answer: the earlier ones, the final one, and what
    followed it."""
    step, version = outcome.step, outcome.api_version
    tries: list[model.Attempt | Outcome] = [*outcome.earlier, outcome, *outcome.followed]
    for each in tries:
        key = step.exchange.api_key
        request = decoded(each.sent or b"", "request", key, version)
        answer = decoded(each.answer or b"", "response", key, version)
        if request is not None:
            body = None if answer is None else answer.body
            times_ns = each.sent_ns, each.answered_ns
            yield each is outcome, Reply(step, outcome.node_id, *times_ns, request.body, body)


class Judge:
    """Judges the answers of one run. reference: those that they should be; None for the captured
    responses."""

    def __init__(
        self, facts: RunFacts, table: FieldTable, reference: RunFacts | None = None
    ) -> None:
        self._facts, self._reference = facts, reference
        ids, has_reference = facts.ids, reference is not None
        named, expected_ids = requested(ids.plan), ids if reference is None else reference.ids
        self._answer_form, self._expected_form = (
            Normaliser(each, table, named, is_target=is_target, keeps_server=has_reference)
            for each, is_target in ((ids, True), (expected_ids, has_reference))
        )
        self._table = table
        # of compared answers: steps and their record sets
        self._expected_records: dict[LogFacts, list[tuple[int, bytes]]] = defaultdict(list)
        self._captured_ends: dict[LogFacts, int] = defaultdict(int)  # of the captured records

    def _to_target(self, log: Log, step: int, offset: int) -> int:
        """The target's offset of one of the reference, or of the capture."""
        if self._reference is not None:
            offset = self._reference.ids.offsets.of(log, step).to_capture(offset)
        return self._facts.ids.offsets.of(log, step).to_target(offset)

    def _expected(self, step: Step) -> Message | str:
        """The decoded message that an answer should be; or why there is nothing to compare with."""
        exchange, version = step.exchange, step.exchange.api_version
        if self._reference is None:
            if (captured := response_of(exchange)) is not None:
                return captured
            frame, whose = exchange.response, "captured response"
            why = exchange.response_missing or "it is not in the capture"
        else:
            outcome = self._reference.outcomes[step.number]
            frame, whose, version = outcome.answer, "answer of the reference", outcome.api_version
            why = outcome.error or "not sent"
        if frame is None:
            return f"no {whose} to compare: {why}"
        found = decoding(frame, "response", exchange.api_key, version)
        return f"the {whose} cannot be decoded: {found}" if isinstance(found, str) else found

    # -- all answers ----------------------------------------------------------------------------

    def judge(self) -> None:
        """Give each outcome its judgement."""
        facts, ordered = self._facts, self._facts.in_order()
        judgements = [self._judged(each) for each in ordered]
        found: dict[int, list[Difference]] = defaultdict(list)
        for number, difference in chain(
            facts.claims.contradictions,
            self._compared_records(),
            facts.logs.contradictions(),
            facts.groups.contradictions(),
        ):
            found[number].append(difference)
        for outcome, judgement in zip(ordered, judgements, strict=True):
            known = {each.path for each in judgement.differences if not each.rule}
            new = [each for each in found[outcome.step.number] if each.path not in known]
            if new and judgement.verdict not in (Verdict.ERROR, Verdict.SKIPPED):
                judgement = judgement.with_differences([*judgement.differences, *new])
            outcome.judgement = judgement
            as_set = partial(_as_set, facts.claims.set_configs, judgement.differences)
            model.tolerate([outcome], as_set)

    def _compared_records(self) -> Iterator[model.Contradiction]:
        for facts, sets in self._expected_records.items():
            end = self._captured_ends.get(facts, MANY)
            if self._reference is not None:
                # A reference may have been asked later than the captured broker: then it has more
                # records, which the target need not have.
                end = self._reference.ids.offsets.of(facts.log, sets[0][0]).to_target(end)
            yield from compare_records(facts, sets, partial(self._to_target, facts.log), end)

    def _judged(self, outcome: Outcome) -> Judgement:
        step, exchange = outcome.step, outcome.step.exchange
        if (judgement := unanswered(outcome)) is not None:
            return judgement
        assert outcome.answer is not None
        version = outcome.api_version if outcome.api_version >= 0 else exchange.api_version
        expected = self._expected(step)
        if isinstance(expected, str):
            return Judgement(Verdict.TOLERATED, reason=expected)
        answer = decoding(outcome.answer, "response", exchange.api_key, version)
        if isinstance(answer, str):
            return Judgement(Verdict.ERROR, reason=f"the answer cannot be decoded: {answer}")
        others = [] if self._reference is None else [self._reference.outcomes[step.number]]
        is_repeated = bool(outcome.earlier) and exchange.api_key == ApiKey.PRODUCE
        if is_repeated or any(each.is_racing for each in (outcome, *others)):
            step = replace(step, is_racing=True)
        differences = self.differences(step, expected, answer)
        if exchange.api_key in FETCH_APIS:
            self._expect_records(outcome, expected.body)
        if answer.api_version != expected.api_version:
            versions = f"v{expected.api_version}", f"v{answer.api_version}"
            note = "sent at the nearest version that the target speaks"
            one = Difference("api_version", (), *versions, rule=OTHER_VERSION, note=note)
            differences.insert(0, one)
        return Judgement().with_differences(differences)

    def _expect_records(self, outcome: Outcome, expected: Body) -> None:
        """Note the records that answers have to bring. Those of a reference may have come in
        several tries."""
        step, bodies = outcome.step, [expected]
        if self._reference is not None:
            tries = _replies(self._reference.outcomes[step.number])
            bodies = [reply.body for _, reply in tries]
            for log, partition in self._facts.ids.names.logs(response_body(step.exchange)):
                ends = [each.last_offset + 1 for each in headers(partition["records"] or b"")]
                of_log = self._facts.logs.of(log, outcome.sent_ns)
                self._captured_ends[of_log] = max(self._captured_ends[of_log], *ends, 0)
        for body in bodies:
            for log, partition in self._expected_form.topics.logs(body):
                of_log = self._facts.logs.of(log, outcome.sent_ns)
                self._expected_records[of_log].append((step.number, partition["records"] or b""))

    def differences(self, step: Step, expected: Message, answer: Message) -> list[Difference]:
        found = compare(
            self._expected_form.tree(step, expected),
            self._answer_form.tree(step, answer),
            partial(self._allowed, step),
            common_only=expected.api_version != answer.api_version,
        )
        return list(found)

    def _allowed(self, step: Step, one: Difference, around: tuple[Body, ...]) -> Difference:
        """The difference with the name of the first rule that allows it. Its conditions are about
        the struct of the field, or for what is below an ignored field, one of those around."""
        for rule in self._table.at(step.api_name, one.place):
            holders = around if rule.ignores_below else around[-1:]
            if _allows(rule, one) and any(
                self._expected_form.applies(rule, step, each) for each in holders
            ):
                return replace(one, rule=rule.name)
        return one


def unanswered(outcome: Outcome) -> Judgement | None:
    """The judgement of an outcome without an answer to compare; None if there is one."""
    step = outcome.step
    exchange, skipped = step.exchange, outcome.skipped or step.skipped
    had_none = step.expects_response and exchange.response is None
    if skipped is not None and (skipped.code is not model.SkipCode.API_VERSION or had_none):
        return Judgement(Verdict.SKIPPED, reason=skipped.reason)
    if skipped is not None:
        difference = Difference(
            "api_version", (), f"v{exchange.api_version}", "not offered", note=skipped.reason
        )
        return Judgement(Verdict.DIFFERENT, [difference], skipped.reason)
    if outcome.error and had_none and exchange.response_missing:
        reason = f"{outcome.error}; no captured response: {exchange.response_missing}"
        return Judgement(Verdict.TOLERATED, reason=reason)
    if outcome.error:
        return Judgement(Verdict.ERROR, reason=outcome.error)
    if not step.expects_response:
        return Judgement(reason="no response is expected")
    return Judgement(Verdict.ERROR, reason="no answer") if outcome.answer is None else None


def _as_set(
    configs: Mapping[tuple[str, ...], set[str]], beside: list[Difference], _: str, one: Difference
) -> Difference:
    """The difference, tolerated where the target shows a config as the run has set it. beside: in
    the same answer; if the value differs, it has to be one that the run has set."""
    values = configs.get(one.keys)
    if not values or one.answered is model.ABSENT:
        return one
    shown = [each for each in beside if each.keys == one.keys and each.place.endswith(".value")]
    return replace(one, rule=AS_SET) if all(each.answered in values for each in shown) else one


def _allows(rule: FieldRule, one: Difference) -> bool:
    """Return whether a rule allows a pair of values."""
    if rule.kind == "ignore":
        return rule.is_own
    if rule.kind == "tolerance":
        if (distance := _distance(one)) is None:
            return False
        return distance <= max(rule.absolute, rule.relative * abs(one.captured))
    return rule.kind == "equal-modulo" and rule.has(one.captured, one.answered)


# -- runs beside each other -----------------------------------------------------------------------


def judge_run(
    facts: RunFacts,
    controls: Sequence[RunFacts],
    references: Sequence[RunFacts],
    table: FieldTable,
    releases: Releases,
) -> list[str]:
    """Give each outcome of a run its judgement: by the reference that it resembles most, or by the
    capture if there are no references. What differs between control runs, or between the releases,
    is tolerated.

    Returns notes, which name what is noise, and rules of the user that had no effect.
    """
    judged: list[list[Judgement]] = []
    each_of: Sequence[RunFacts | None] = references or [None]
    for reference in each_of:
        Judge(facts, table, reference).judge()
        judged.append([each.judgement for each in facts.outcomes])
    for outcome, *judgements in zip(facts.outcomes, *judged, strict=True):
        outcome.judgement = min(judgements, key=_rank)
    used = {one.rule for each in chain(*judged) for one in each.differences}
    notes = [
        f"rule {rule.name} "
        + ("allowed nothing" if rule in table.fitting else "fits no field of the compared answers")
        for rule in table.rules
        if rule.is_own and rule.name not in used
        if rule.is_allowance or rule not in table.fitting
    ]
    noise = Noise()
    for other in controls[1:]:
        Judge(other, table, controls[0]).judge()
        noise.add(other.outcomes)
    model.tolerate(facts.outcomes, noise.tolerated)
    tolerate_changes(releases, facts.outcomes)
    return [*notes, *noise.notes()]


def _rank(judgement: Judgement) -> tuple[bool, int]:
    """Lower by a reference that the answer resembles more, and highest by one that has no answer:
    then the judgement has the reason why nothing was compared."""
    is_compared = not judgement.reason or judgement.verdict is Verdict.ERROR
    return not is_compared, sum(not each.rule for each in judgement.differences)


def end_findings(
    facts: RunFacts, controls: Sequence[RunFacts], references: Sequence[RunFacts]
) -> list[Difference]:
    """Findings about the state after a run that its control runs do not have."""
    excused = [each for control in controls for each in control.findings]
    findings = [each for each in facts.findings if each not in excused]
    states = [each.state for each in references if each.state is not None]
    if facts.state is not None and states:
        known = {each.keys for each in findings}
        compared = compare_states(facts.state, states)
        findings += [each for each in compared if each.keys not in known]
    return findings


class Noise(dict[tuple[str, str], list[Difference]]):
    """Differences between control runs, which send the same workload to the same cluster; by API
    and place without keys.

    A field of an API whose value differs between two of them differs by itself, so a difference
    there proves nothing. A noisy field does not allow any value:

    - a number may differ by as much as a control run differs from the first one at most
    - a text has to be one that a control run has in that field; if no two control runs ever agree,
      as for random ids, any text will do, but not null, an empty one or a missing element

    Error codes, offsets and records are never noise.
    """

    run_count = 0  # of control runs that were added

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Add the differences of a control run that was judged by the first one."""
        self.run_count += 1
        for outcome in outcomes:
            for one in outcome.judgement.differences:
                if not one.rule:
                    self.setdefault((outcome.step.api_name, one.place), []).append(one)

    def notes(self) -> list[str]:
        """The noisy fields, most frequent first."""
        ordered = sorted(self.items(), key=lambda each: (-len(each[1]), each[0]))
        return [
            f"control runs differ from each other in {api} {place}, in {len(known)} places: "
            + ("never excused" if is_evidence(place) else "excused")
            for (api, place), known in ordered
        ]

    def tolerated(self, api_name: str, one: Difference) -> Difference:
        """The difference, tolerated if it is noise."""
        known = self.get((api_name, one.place), [])
        if not known or is_evidence(one.place) or not self._is_among(known, one):
            return one
        note = f"control runs differ from each other here, in {len(known)} places"
        return replace(one, rule=NOISE, note=note)

    def _is_among(self, known: Sequence[Difference], one: Difference) -> bool:
        if (distance := _distance(one)) is not None:
            return distance <= max(_distance(each) or 0 for each in known)
        first = {told(each.captured) for each in known}
        others = {told(each.answered) for each in known}
        is_random = len(others) == len(known) == self.run_count * len(first) and not first & others
        return told(one.answered) in first | others or (is_random and is_set(one.answered))


def is_evidence(place: str) -> bool:
    """Return whether differences at a place count although control runs differ there."""
    return any(word in place for word in _EVIDENCE)


def _distance(one: Difference) -> float | None:
    """Between two numbers; None for other values."""
    values = one.captured, one.answered
    if any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in values):
        return None
    return float(abs(one.answered - one.captured))
