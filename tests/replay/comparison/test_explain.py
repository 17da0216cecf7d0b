"""Explanations of differences: releases, known values, and earlier requests that failed."""

from typing import Any

import pytest

from kdissect.codec.message import Message
from kdissect.protocol import releases
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.explain import explain, explanations
from kdissect.replay.model import (
    Difference,
    Judgement,
    Outcome,
    ReplayPlan,
    SkipCode,
    Skipped,
    Verdict,
)
from kdissect.replay.planning.plan import make_plan
from tests.builders.workloads import exchange, fetch, fetched, produce, produced, workload
from tests.replay.other_cluster import everything

OLD = {key: (one.first, one.last) for key, one in releases.spoken_versions("3.9.1").items()}
NEW = {key: (one.first, one.last) for key, one in releases.spoken_versions("4.3.1").items()}


def api_versions(ranges: dict[int, tuple[int, int]]) -> Message:
    offered = [
        {"api_key": key, "min_version": first, "max_version": last}
        for key, (first, last) in ranges.items()
    ]
    return Message(ApiKey.API_VERSIONS, 0, "response", {}, {"error_code": 0, "api_keys": offered})


def request() -> Message:
    return Message(ApiKey.API_VERSIONS, 0, "request", {"client_id": "c"}, {})


def run(plan: ReplayPlan, found: dict[int, Any]) -> tuple[list[str], list[Outcome]]:
    """Outcomes with differences or skips of steps, and their explanations."""
    outcomes = []
    for step in plan.steps:
        told = found.get(step.number)
        if isinstance(told, Skipped):
            outcome = Outcome(step, skipped=told)
            outcome.judgement = Judgement(
                Verdict.DIFFERENT if told.is_finding else Verdict.SKIPPED,
                [Difference("api_version", "v9", "not offered", note=told.reason)],
            )
        elif told:
            outcome = Outcome(step, judgement=Judgement(Verdict.DIFFERENT, list(told)))
        else:
            outcome = Outcome(step, judgement=Judgement(Verdict.SAME))
        outcomes.append(outcome)
    return explain(plan, outcomes, NEW), outcomes


def notes(outcome: Outcome) -> list[str]:
    assert outcome.judgement is not None
    return [each.note for each in outcome.judgement.differences]


def test_version_ranges_of_another_release_are_no_findings() -> None:
    """Ranges that the target's release speaks are no findings: one note counts them. A range that
    it does not speak stays one, with the releases as its note."""
    plan = make_plan(workload([exchange(0, request(), 0, 1, api_versions(OLD))]), everything())
    index = list(OLD).index(ApiKey.FETCH)
    added = next(key for key in NEW if key not in OLD)
    first, last = NEW[added]
    of_release = [
        Difference(f"api_keys[{index}].max_version", "17", str(NEW[ApiKey.FETCH][1])),
        Difference(
            "api_keys[90]",
            "absent",
            f"{{api_key={added}, min_version={first}, max_version={last}}}",
        ),
        Difference("throttle_time_ms", "0", "1", rule="throttle-time"),
    ]
    lines, [outcome] = run(plan, {0: of_release})
    assert lines[0] == "by what they offer, the captured broker is Kafka 3.9, the target Kafka 4.3"
    assert lines[1].startswith("2 differences between Kafka 3.9 and Kafka 4.3 (rule other-release)")
    assert outcome.judgement is not None
    assert outcome.judgement.verdict is Verdict.TOLERATED
    lies = [
        Difference(f"api_keys[{index}].max_version", "17", "3"),
        Difference("api_keys[1]", "{api_key=1, min_version=0, max_version=17}", "absent"),
    ]
    lines, [outcome] = run(plan, {0: lies})
    assert len(lines) == 1
    assert outcome.judgement is not None
    assert [each.rule for each in outcome.judgement.differences] == ["", ""]
    assert notes(outcome) == [
        "versions of this API that Kafka 3.9 offered, and those that Kafka 4.3 does",
        "Kafka 3.9 offered this API, Kafka 4.3 does not",
    ]


def test_the_same_release_explains_nothing() -> None:
    """A difference between two runs of one release gets no explanation."""
    plan = make_plan(workload([exchange(0, request(), 0, 1, api_versions(NEW))]), everything())
    told, [outcome] = run(plan, {0: [Difference("api_keys[3].max_version", "12", "13")]})
    assert told == []
    assert notes(outcome) == [""]


def test_known_values_and_later_differences() -> None:
    """A version that is not offered says who speaks it; what touches the same partition later may
    follow from it, what touches another does not."""
    wrote = exchange(0, produce(0), 0, 1, produced(0, 0))
    read = exchange(1, fetch(0), 2, 3, fetched(0))
    other = exchange(2, fetch(1), 2, 3, fetched(1))
    plan = make_plan(workload([wrote], [read], [other]), everything())
    code = Difference("responses[0].partitions[0].error_code", "0", "29", note="NONE then")
    refused = Skipped(SkipCode.API_VERSION, "the target speaks v10 to v13", is_finding=True)
    _, outcomes = run(plan, {0: refused, 1: [code], 2: [code]})
    assert notes(outcomes[0]) == [
        "the target speaks v10 to v13; v9 is spoken by Kafka 2.8 to 4.3, of those known"
    ]
    permitted = "NONE then; the target does not permit that to the user of the replay"
    follows = "may follow from exchange 0: Produce v9 is not offered by the target"
    assert notes(outcomes[1]) == [f"{permitted}; {follows}"]
    assert notes(outcomes[2]) == [permitted]


def test_texts_name_releases_if_they_need_them() -> None:
    """Each explanation names releases if, and only if, it needs them."""
    for each in explanations():
        text = each.text.format(then="3.9", now="4.3")
        assert ("4.3" in text or "3.9" in text) <= each.needs_releases


def test_beside_an_error_code() -> None:
    """Values beside another error code have its explanation, and notes name the code."""
    plan = make_plan(workload([exchange(0, produce(0), 0, 1, produced(0, 0))]), everything())
    found = [
        Difference("responses[0].parts[1].error_code", "0", "42", note="NONE then"),
        Difference("responses[0].parts[1].error_message", "null", "too small", rule="error-text"),
        Difference("responses[0].parts[1].deep.topic_id", "1", "2"),
        Difference("responses[0].parts[2].base_offset", "1", "2"),
    ]
    _, [outcome] = run(plan, {0: found})
    assert notes(outcome) == [
        "NONE then; the target says: too small",
        "",
        "beside an error code that is another one",
        "",
    ]
    found = [
        Difference("error_code", "64", "0", note="X then"),
        Difference("error_message", "not for you", "null", rule="error-text"),
        Difference("expiry", "-1", "17"),
    ]
    _, [outcome] = run(plan, {0: found})
    assert notes(outcome)[0].endswith("the captured broker says: not for you")
    assert notes(outcome)[2] == "beside an error code that is another one"


@pytest.mark.parametrize(
    ("code", "note"),
    [
        (SkipCode.NOT_ALLOWED, "may follow from exchange 0: Produce v9 was not sent (not_allowed)"),
        (SkipCode.OTHER_PRINCIPAL, ""),
    ],
)
def test_what_follows_from_a_request_that_was_not_sent(code: SkipCode, note: str) -> None:
    """Nothing, if the captured broker refused it as well."""
    wrote = exchange(0, produce(0), 0, 1, produced(0, 0))
    read = exchange(1, fetch(0), 2, 3, fetched(0))
    plan = make_plan(workload([wrote], [read]), everything())
    less = Difference("responses[0].partitions[0].records", "1 record", "none")
    _, outcomes = run(plan, {0: Skipped(code, "because"), 1: [less]})
    assert notes(outcomes[1]) == [note]


def test_later_answers_of_a_session() -> None:
    """After a smaller Fetch, because of an earlier Produce, its session may differ, too."""
    wrote = exchange(0, produce(0), 0, 1, produced(0, 0))
    reads = [exchange(n, fetch(0), 2 * n, 2 * n + 1, fetched(0)) for n in (1, 2)]
    reads[1].request = exchange(2, fetch(1), 4, 5, fetched(1)).request
    plan = make_plan(workload([wrote], reads), everything())
    refused = Skipped(SkipCode.API_VERSION, "the target speaks v10 to v13", is_finding=True)
    less = Difference("responses[0].partitions[0].records", "1 record", "none")
    _, outcomes = run(plan, {0: refused, 1: [less], 2: [Difference("responses[0]", "a", "b")]})
    follows = "may follow from exchange 0: Produce v9 is not offered by the target"
    assert notes(outcomes[1]) == notes(outcomes[2]) == [follows]
