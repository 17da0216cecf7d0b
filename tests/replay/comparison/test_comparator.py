"""Responses are compared field by field, and rules allow differences."""

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kdissect.codec.message import Message, encode_message
from kdissect.codec.record_codec import encode_batch
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.layout import layout
from kdissect.protocol.model import Type
from kdissect.replay.batch_headers import headers
from kdissect.replay.comparison.comparator import Comparator
from kdissect.replay.comparison.equivalence import Meaning
from kdissect.replay.comparison.grouping import VALUES_MAX, group_differences
from kdissect.replay.comparison.records import RecordLedger, digests_of
from kdissect.replay.comparison.rules import RuleError, built_in_rules, load_rules, parse_rules
from kdissect.replay.fields import FieldContext, FieldKind
from kdissect.replay.model import (
    Difference,
    Exchange,
    Judgement,
    Outcome,
    ReplayPlan,
    SkipCode,
    Skipped,
    Step,
    TopicFacts,
    Verdict,
    Workload,
    WorkloadFacts,
)
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.messages import response_of
from kdissect.replay.workload.source import load_workload
from tests.builders.workloads import exchange, workload
from tests.conftest import ROOT
from tests.material import CAPTURES, needs_material
from tests.replay.made import response
from tests.replay.other_cluster import OtherCluster, events, everything

PER_VERSION = 2  # answers of each API and version whose fields are changed one by one
PER_ANSWER = 150  # of these at most, evenly chosen
NOTHING: Any = object()


def leaves(of: Any, values: dict[str, Any], path: str = "") -> Any:
    """(path, slot, holder, name) of every plain value and every array of a body."""
    for name, slot in of.by_name.items():
        value = values[name]
        here = f"{path}.{name}" if path else name
        if slot.inner is None or value is None:
            yield here, slot, values, name
        elif slot.field.is_array:
            yield here, slot, values, name
            for index, each in enumerate(value):
                key = each.get("name", index) if name == "configs" else index
                yield from leaves(slot.inner, each, f"{here}[{key}]")
        else:
            yield from leaves(slot.inner, value, here)


def other(slot: Any, value: Any) -> Any:
    """Another value of a field, or NOTHING if its type has no other."""
    kind = slot.field.type
    if slot.field.is_array:
        if value:
            return value[:-1]
        if slot.inner is not None:
            return NOTHING
        return [{Type.STRING: "x", Type.UUID: UUID(int=9)}.get(kind, 5)]
    if kind in (Type.STRING, Type.BYTES, Type.RECORDS) and not value:
        return NOTHING if kind is Type.RECORDS else "x" if kind is Type.STRING else b"x"
    if kind is Type.STRING:
        return value + "x"
    if kind is Type.RECORDS:
        whole = [each for each in headers(value) if not each.is_partial]
        end = whole[-1].pos + whole[-1].size if whole else 0
        return value[: end - 1] + bytes([value[end - 1] ^ 1]) + value[end:] if end else NOTHING
    if kind is Type.BYTES:
        return value[:-1] + bytes([value[-1] ^ 1])
    if kind is Type.UUID:
        return UUID(int=value.int ^ 1)
    if kind is Type.BOOL:
        return not value
    if kind is Type.STRUCT:
        return NOTHING
    return value + 1 if value < 100 else value - 1


def names(path: str, difference: Difference) -> bool:
    """Whether a difference is at the place, around it, or inside of it."""
    said = difference.path
    return (
        said == path
        or said.startswith((path + "[", path + "."))
        or path.startswith((said + "[", said + "."))
    )


def flipped(path: Path) -> tuple[Counter[str], dict[str, str]]:
    """Change each field of answers alone: counts by verdict, and changes that were not found."""
    workload = load_workload(str(path))
    cluster = OtherCluster(workload)
    plan = make_plan(workload, everything())
    translator = Translator(IdMap(plan))
    translator.learn_metadata(cluster.metadata())
    comparator = Comparator(translator.ids)
    seen: Counter[tuple[str, int]] = Counter()
    verdicts: Counter[str] = Counter()
    missed: dict[str, str] = {}
    for is_request, step in events(plan):
        captured = response_of(step.exchange)
        if is_request:
            translator.request(step)
            continue
        if captured is None:
            continue
        answer = cluster.moved(captured)
        data = encode_message(answer)
        translator.learn(step, data)
        before = comparator.judge(Outcome(step, answer=data)).differences
        key = (step.api_name, step.exchange.api_version)
        seen[key] += 1
        if seen[key] > PER_VERSION:
            continue
        shape = layout(catalog.api(answer.api_key).response, answer.api_version)
        places = list(leaves(shape, answer.body))
        for place, slot, holder, name in places[:: 1 + len(places) // PER_ANSWER]:
            value = holder[name]
            holder[name] = other(slot, value)
            changed = None if holder[name] is NOTHING else encode_message(answer)
            holder[name] = value
            if changed is None:
                continue
            found = comparator.judge(Outcome(step, answer=changed))
            verdicts[found.verdict.value] += 1
            new = [each for each in found.differences if each not in before]
            if not any(names(place, each) for each in new) and found.verdict is not Verdict.ERROR:
                plain = re.sub(r"\[\d+\]", "[]", place)
                missed[f"{step.api_name} {plain}"] = found.verdict.value
    return verdicts, missed


# Where records lie is part of the answer about them: another topic or partition shows as records
# that are missing there, and in the end as different ones.
ABOUT_RECORDS = {
    "Fetch responses[].partitions[].partition_index", "Fetch responses[].topic_id",
    "Fetch responses[].topic", "ShareFetch responses[].topic_id",
    "ShareFetch responses[].partitions[].partition_index",
}  # fmt: skip


def check_flips(path: Path, count_min: int) -> None:
    verdicts, missed = flipped(path)
    assert sum(verdicts.values()) > count_min
    assert verdicts["different"] > 0.6 * sum(verdicts.values())
    # the first offset that is produced to a log, and first epochs, are what the target says
    first_told = {name for name in missed if name.endswith((".base_offset", "leader_epoch"))}
    first_told.add("CreateTopics topics[].topic_id")  # also of topics that are not made after all
    assert set(missed) - ABOUT_RECORDS - first_told == set()


@pytest.mark.parametrize(
    "name", ["librdkafka.pcap", pytest.param("java_0_10_2_2.pcap", marks=pytest.mark.heavy)]
)
def test_every_changed_field_is_found_at_its_place(captures: Path, name: str) -> None:
    """A changed value of any field is a difference with its path."""
    check_flips(captures / name, 500)


@needs_material
@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    ["java_latest/java_latest", "admin/admin", "transactions/transactions", "share_streams/share",
     "version_sweep/sweep_4_3_1"],
)  # fmt: skip
def test_every_changed_field_of_many_apis_is_found(name: str) -> None:
    """The same in captures with many APIs."""
    check_flips(CAPTURES / f"{name}.pcap", 600)


# -- verdicts ---------------------------------------------------------------------------------


@pytest.fixture
def plan(captures: Path) -> ReplayPlan:
    return make_plan(load_workload(str(captures / "librdkafka.pcap")), everything())


def step_named(plan: ReplayPlan, name: str) -> Step:
    return next(each for each in plan.steps if each.api_name == name and each.skipped is None)


TAKEN = {"name": "t", "error_code": 36, "error_message": "it exists"}  # in CreateTopics


def outcome_with(step: Step, change: Any) -> tuple[Outcome, Message]:
    message = copy.deepcopy(response_of(step.exchange))
    assert message is not None
    change(message.body)
    return Outcome(step, answer=encode_message(message)), message


def test_answers_are_equal_tolerated_or_different(plan: ReplayPlan) -> None:
    """Equal, tolerated and different answers have their verdicts and differences."""
    comparator = Comparator(IdMap(plan))
    step = step_named(plan, "Metadata")
    assert comparator.judge(Outcome(step, answer=step.exchange.response)).verdict is Verdict.SAME
    outcome, _ = outcome_with(step, lambda body: body.update(throttle_time_ms=9))
    tolerated = comparator.judge(outcome)
    assert tolerated.verdict is Verdict.TOLERATED
    assert tolerated.differences == [Difference("throttle_time_ms", "0", "9", "throttle-time")]
    outcome, _ = outcome_with(
        step_named(plan, "FindCoordinator"), lambda body: body.update(error_code=29)
    )
    different = comparator.judge(outcome)
    assert different.verdict is Verdict.DIFFERENT
    found = next(each for each in different.differences if not each.rule)
    assert (found.path, found.captured, found.answered) == ("error_code", "15", "29")
    assert found.note == "COORDINATOR_NOT_AVAILABLE then, TOPIC_AUTHORIZATION_FAILED now"
    assert comparator.judge(Outcome(step, error="timed out")).verdict is Verdict.ERROR
    assert comparator.judge(Outcome(step, answer=b"\0\0\0\1")).verdict is Verdict.ERROR
    skipped = Skipped(SkipCode.API_VERSION, "too old", is_finding=True)
    finding = comparator.judge(Outcome(step, skipped=skipped))
    assert (finding.verdict, finding.reason) == (Verdict.DIFFERENT, "too old")
    other_skip = Skipped(SkipCode.NOT_ALLOWED, "needs --allow admin")
    assert comparator.judge(Outcome(step, skipped=other_skip)).verdict is Verdict.SKIPPED


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda body: body.update(throttle_time_ms=30_000), "throttle_time_ms"),
        (lambda body: body.update(brokers=[]), "brokers[0]"),
        (lambda body: _first_partition(body).update(isr_nodes=[]), "isr_nodes"),
        (lambda body: _first_partition(body).update(replica_nodes=[]), "replica_nodes"),
    ],
    ids=["throttled for 30 s", "no brokers", "nothing in sync", "no replicas"],
)
def test_bounds_of_rules(plan: ReplayPlan, change: Any, path: str) -> None:
    """A rule allows a difference up to its bound."""
    step = next(
        each
        for each in plan.steps
        if each.api_name == "Metadata" and each.skipped is None and _has_partitions(each)
    )
    outcome, _ = outcome_with(step, change)
    found = Comparator(IdMap(plan)).judge(outcome)
    assert found.verdict is Verdict.DIFFERENT
    assert {each.path.rpartition(".")[2] for each in found.differences if not each.rule} == {path}


@pytest.mark.parametrize(
    ("api", "changed", "is_allowed"),
    [
        (ApiKey.CREATE_TOPICS, {"topics": [{"name": "t", "error_code": 36}]}, False),
        (ApiKey.CREATE_TOPICS, {"topics": [TAKEN | {"error_message": "other"}]}, True),
        (ApiKey.API_VERSIONS, {"finalized_features_epoch": 0}, False),
        (ApiKey.API_VERSIONS, {"finalized_features_epoch": 7}, True),
    ],
)
def test_bounds_of_texts_and_epochs(api: ApiKey, changed: dict[str, Any], is_allowed: bool) -> None:
    """Another text stands beside an error, and another epoch is at least 1."""
    before = {"topics": [TAKEN]} if api == ApiKey.CREATE_TOPICS else {"finalized_features_epoch": 5}
    frames = [response(api, 3, **body) for body in (before, changed)]
    exchange = Exchange(0, 0, 0, api, 3, 7, "c", b"", frames[0], 0, 0, 0, 0)
    step = Step(0, 0, exchange, api.name, "read", 0, True)
    workload = Workload("made", "capture", [], WorkloadFacts())
    ids = IdMap(ReplayPlan(workload, everything(), [], []))
    found = Comparator(ids).judge(Outcome(step, answer=frames[1]))
    assert found.verdict is (Verdict.TOLERATED if is_allowed else Verdict.DIFFERENT)


def _has_partitions(step: Step) -> bool:
    response = response_of(step.exchange)
    return response is not None and any(each["partitions"] for each in response.body["topics"])


def _first_partition(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(
        each["partitions"][0] for each in body["topics"] if each["partitions"]
    )
    return found


def test_strict_tolerates_nothing_but_translated_ids(plan: ReplayPlan) -> None:
    """A throttle time is a difference without the built-in rules."""
    comparator = Comparator(IdMap(plan), strict=True)
    step = step_named(plan, "Metadata")
    outcome, _ = outcome_with(step, lambda body: body.update(throttle_time_ms=9))
    assert comparator.judge(outcome).verdict is Verdict.DIFFERENT
    assert comparator.judge(Outcome(step, answer=step.exchange.response)).verdict is Verdict.SAME


def test_order_is_free_under_a_rule(plan: ReplayPlan) -> None:
    """Under a rule of order, a reversed list is equal, and a new item is found."""
    comparator = Comparator(IdMap(plan))
    step = step_named(plan, "ApiVersions")
    outcome, _ = outcome_with(step, lambda body: body["api_keys"].reverse())
    found = comparator.judge(outcome)
    assert [(each.path, each.rule) for each in found.differences] == [
        ("api_keys", "api-versions-order")
    ]

    def newer(body: dict[str, Any]) -> None:
        body["api_keys"].reverse()
        body["api_keys"].append({"api_key": 99, "min_version": 0, "max_version": 1})

    outcome, _ = outcome_with(step, newer)
    found = comparator.judge(outcome)
    line = next(each for each in found.differences if not each.rule)
    assert line.captured == "absent"
    assert line.answered == "{api_key=99, min_version=0, max_version=1}"


def test_rules_of_a_file_come_first(plan: ReplayPlan, tmp_path: Path) -> None:
    """A rule of the user's file allows a difference of two, and not of three."""
    file = tmp_path / "mine.toml"
    file.write_text(
        """
        [[rule]]
        name = "ours"
        kind = "tolerance"
        path = "api_keys[].max_version"
        apis = ["ApiVersions"]
        absolute = 2
        why = "An upgrade by two versions is fine."
        """
    )
    step = step_named(plan, "ApiVersions")
    comparator = Comparator(IdMap(plan), load_rules([str(file)]))

    def raised(by: int) -> Judgement:
        def change(body: dict[str, Any]) -> None:
            body["api_keys"][0]["max_version"] = max_version + by

        return comparator.judge(outcome_with(step, change)[0])

    message = response_of(step.exchange)
    assert message is not None
    max_version = message.body["api_keys"][0]["max_version"]
    assert [each.rule for each in raised(2).differences] == ["ours"]
    assert raised(3).verdict is Verdict.DIFFERENT


# -- records ----------------------------------------------------------------------------------

LOG = ("t", 0)


def batch(first: int, values: list[bytes], codec: str = "none", **more: Any) -> bytes:
    records = [
        {"offset": first + at, "timestamp_ms": 100 + at, "key": b"k", "value": value,
         "headers": [{"key": "h", "value": b"1"}]}
        for at, value in enumerate(values)
    ]  # fmt: skip
    return encode_batch(records, codec=codec, **more)


def ledger(shift: int = 0) -> RecordLedger:
    return RecordLedger(lambda _, offset: offset + shift, lambda _, __: None)


def test_records_are_compared_by_offset_across_batches() -> None:
    """Two batches then, one compressed batch now: the same three records."""
    book = ledger(10)
    captured = batch(0, [b"a", b"b"]) + batch(2, [b"c"])
    answered_data = batch(10, [b"a", b"b", b"c"], "zstd", base_timestamp_ms=100)
    found, uneven = book.compare(0, "records", LOG, captured, answered_data)
    differing = [each[0] for each in found]
    assert differing == ["[offset 2].timestamp_ms"]  # 100 then, 102 now
    assert not uneven
    found, uneven = book.compare(0, "records", LOG, captured, batch(10, [b"a", b"B", b"c"]))
    assert ("[offset 1].value", "'b'", "'B'", "") in found
    assert not uneven


def test_records_that_come_with_another_answer_are_no_difference() -> None:
    """Records may arrive in another Fetch, if all are equal in the end."""
    book = ledger()
    _, uneven = book.compare(1, "records", LOG, batch(0, [b"a", b"b"]), b"")
    assert uneven
    assert book.finish() == {1: [("records", 2, 0, False)]}
    book.compare(2, "records", LOG, b"", batch(0, [b"a", b"b"]))
    assert book.finish() == {1: [("records", 0, -1, False)]}
    other_book = ledger()
    other_book.compare(1, "records", LOG, batch(0, [b"a", b"b"]), b"")
    other_book.compare(2, "records", LOG, b"", batch(0, [b"a", b"X"]))
    assert other_book.finish() == {1: [("records", 1, 1, True)]}


def test_records_without_an_order() -> None:
    """Of Produce requests with acks 0: the same records at other offsets, and no others."""
    unacknowledged = digests_of(batch(0, [b"a", b"b", b"c"]))

    def places(answered_data: bytes, known: set[int]) -> list[str]:
        book = ledger()
        book.compare(1, "records", LOG, batch(0, [b"a", b"b", b"c"]), answered_data)
        book.finish()
        return sorted(path for _, path in book.reordered(lambda log: known))

    swapped = batch(0, [b"b", b"a", b"c"])
    assert places(swapped, unacknowledged) == ["records[offset 0]", "records[offset 1]"]
    assert places(swapped, digests_of(batch(0, [b"a"]))) == []
    assert places(batch(0, [b"b", b"b", b"c"]), unacknowledged) == []
    assert places(batch(0, [b"b", b"X", b"c"]), unacknowledged) == []


def test_a_damaged_batch_and_another_producer_are_differences() -> None:
    """A wrong checksum and an untranslated producer id are differences."""
    data = batch(0, [b"a"], producer_id=5, producer_epoch=0)
    damaged = data[:17] + b"\0\0\0\0" + data[21:]
    found, _ = ledger().compare(0, "records", LOG, data, damaged)
    assert [each[0] for each in found] == ["[offset 0].crc"]
    book = RecordLedger(lambda _, offset: offset, lambda number, epoch: (number + 90, epoch))
    found, _ = book.compare(0, "records", LOG, data, data)
    assert found[0][:3] == ("[offset 0].producer_id", "5 epoch 0", "5 epoch 0")
    renamed = batch(0, [b"a"], producer_id=95, producer_epoch=0)
    assert book.compare(0, "records", LOG, data, renamed) == ([], False)


@pytest.mark.parametrize(("producer_id", "count"), [(95, 1), (96, 0)])
def test_markers_of_two_producers_may_change_their_order(producer_id: int, count: int) -> None:
    """A marker is compared with one of the same producer."""
    commit, abort = (
        encode_batch(
            [{"offset": 0, "timestamp_ms": 5, "key": key, "value": b"\0" * 6, "headers": []}],
            producer_id=of, producer_epoch=0, is_transactional=True, is_control=True,
        )
        for key, of in ((b"\0\0\0\1", 5), (b"\0\0\0\0", producer_id))
    )  # fmt: skip
    book = RecordLedger(lambda _, offset: offset, lambda number, epoch: (number + 90, epoch))
    found, _ = book.compare(0, "records", LOG, commit, abort)
    assert len(found) == count


# -- groups -----------------------------------------------------------------------------------


def test_ten_thousand_times_the_same_is_one_line(plan: ReplayPlan) -> None:
    """Equal differences are grouped by path and rule, with their count."""
    step = step_named(plan, "Metadata")
    one = Difference("topics[3].error_code", "0", "3")
    outcomes = [Outcome(step, judgement=Judgement(Verdict.DIFFERENT, [one])) for _ in range(10_000)]
    various = [
        Difference(f"topics[{at}].partitions[1].leader_id", str(at), str(at + 1))
        for at in range(500)
    ]
    tolerated = Difference("throttle_time_ms", "0", "7", "throttle-time")
    outcomes.append(
        Outcome(step, judgement=Judgement(Verdict.DIFFERENT, [*various, tolerated, tolerated]))
    )
    groups = group_differences(outcomes)
    assert [(each.path, each.count, each.rule) for each in groups] == [
        ("topics[].error_code", 10_000, ""),
        ("topics[].partitions[].leader_id", 500, ""),
        ("throttle_time_ms", 2, "throttle-time"),
    ]
    assert groups[0].example_path == "topics[3].error_code"
    assert (groups[1].captured, groups[1].answered) == ("various", "various")
    assert VALUES_MAX < 500


# -- rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[rule]]\nname='a'\nkind='ignore'", "path is missing"),
        ("[[rule]]\nname='a'\nkind='never'\npath='x'", "none of ignore"),
        ("[[rule]]\nname='a'\nkind='ignore'\npath='x'\nwhom='b'", "'whom' is no field"),
        ("[[rule]]\nname='a'\nkind='translated'\npath='x'", "says as what"),
        ("[[rule]]\nname='a'\nkind='tolerance'\npath='x'", "absolute or relative"),
        ("[[rule]]\nname='a'\nkind='equal-modulo'\npath='x'", "missing"),
        ("[[rule]]\nname='a'\nkind='ignore'\npath='x'\napis=['Fetsh']", "did you mean"),
        ("[[rule]]\nname='a'\nkind='ignore'\npath='x'\nwhere={a='('}", "no regular expression"),
        ("[rule", "mine.toml"),
        ("[rules]\n", "no part of a file of rules"),
        ("format_version = 2\n", "format_version"),
    ],
)
def test_wrong_rules_are_refused(text: str, says: str) -> None:
    """RuleError has the file and the reason."""
    with pytest.raises(RuleError, match=re.escape(says)) as caught:
        parse_rules(text, "mine.toml")
    assert "mine.toml" in str(caught.value)


def test_paths_of_rules() -> None:
    """A path is a field, a field of elements, or a pattern."""
    rules = parse_rules(
        "[[rule]]\nname='a'\nkind='ignore'\npath='error_code'\n"
        "[[rule]]\nname='b'\nkind='ignore'\npath='topics[].name'\n"
        "[[rule]]\nname='c'\nkind='ignore'\npath='*_ms'\n",
        "x",
    )
    fits = {
        path: [rule.name for rule in rules if rule.fits("Fetch", path)]
        for path in ("error_code", "topics[].error_code", "topics[].name", "a.topics[].name",
                     "x.throttle_time_ms", "topics[].my_error_code")
    }  # fmt: skip
    assert list(fits.values()) == [["a"], ["a"], ["b"], [], ["c"], []]


def test_each_built_in_rule_has_a_reason_and_is_explained() -> None:
    """`docs/replay-rules.md` is made from the rules."""
    from tools.replay_rules import page

    rules = built_in_rules()
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(rule.why for rule in rules)
    assert (ROOT / "docs" / "replay-rules.md").read_text() == page()


def test_paths_of_built_in_rules_are_fields_of_responses() -> None:
    """A rule about a place that no response has would be a spelling mistake."""
    paths: dict[str, set[str]] = {}
    for definition in catalog.apis().values():
        found: set[str] = set()
        for api_version in range(
            definition.response.versions.first, definition.response.versions.last + 1
        ):
            _paths(layout(definition.response, api_version), "", found)
        paths[definition.name] = found
    for rule in built_in_rules():
        if rule.path in ("*", "api_version"):
            continue
        apis = rule.apis or set(paths)
        assert any(rule.fits(name, path) for name in apis for path in paths[name]), rule.name


def _paths(of: Any, path: str, found: set[str]) -> None:
    for name, slot in of.by_name.items():
        here = f"{path}.{name}" if path else name
        found.add(here)
        if slot.field.is_array:
            here += "[]"
            found.add(here)
        if slot.inner is not None:
            _paths(slot.inner, here, found)


def test_a_topic_that_the_run_has_deleted_is_known_by_its_id() -> None:
    """Answers from before the deletion are judged after it."""
    captured, target = UUID(int=1), UUID(int=2)
    facts = WorkloadFacts(topics={"t": TopicFacts("t", topic_ids=[str(captured)])})
    ids = IdMap(ReplayPlan(Workload("made", "capture", [], facts), everything(), [], []))
    ids.target.created("t", target)
    ids.target.forget_topic("t")
    assert Meaning(ids).captured_topic("", target) == ("t", captured)
    assert Meaning(ids).captured_topic("", UUID(int=3)) == ("", UUID(int=3))


@pytest.mark.parametrize(("captured", "answered", "is_same"), [(1, 5, 1), (0, 0, 1), (0, 5, 0)])
def test_a_number_that_is_no_node_of_the_capture_stays_as_it_is(
    plan: ReplayPlan, captured: int, answered: int, is_same: int
) -> None:
    """Without an error, brokers leave the current leader at 0 (KIP-951)."""
    facts = WorkloadFacts(brokers={1: ("broker", 9092)})
    ids = IdMap(ReplayPlan(Workload("made", "capture", [], facts), everything(), [], []))
    ids.target.nodes = {5: ("other", 9092)}
    values = captured, answered, FieldContext(), {}, plan.steps[0], "leader_id"
    assert Meaning(ids).same("node", FieldKind.NODE, *values) == is_same


@pytest.mark.parametrize(
    ("captured", "answered", "has_append_times", "is_allowed"),
    [
        ((-1, -1), (99, 0), True, True),  # the target's records are later
        ((-1, -1), (99, 0), False, False),
        ((50, 3), (99, 1), True, True),
        ((50, 3), (99, 4), True, False),
        ((50, 3), (-1, -1), True, False),
        ((-1, 3), (-1, 1), True, False),  # no lookup by time
    ],
)
def test_lookups_by_a_time_that_the_broker_has_set(
    captured: tuple[int, int], answered: tuple[int, int], has_append_times: bool, is_allowed: bool
) -> None:
    """They find the same record, or an earlier one."""

    def found(timestamp: int, offset: int) -> Message:
        part = {"partition_index": 0, "error_code": 0, "timestamp": timestamp, "offset": offset,
                "leader_epoch": 0 if offset >= 0 else -1}  # fmt: skip
        body = {"topics": [{"name": "t", "partitions": [part]}]}
        return Message(ApiKey.LIST_OFFSETS, 4, "response", {"correlation_id": 1}, body)

    asked = {"topics": [{"name": "t", "partitions": [{"partition_index": 0, "timestamp": 40}]}]}
    request = Message(ApiKey.LIST_OFFSETS, 4, "request", {"client_id": "c"}, asked)
    made = workload([exchange(0, request, 0, 1, found(*captured))])
    made.facts.topics["t"] = TopicFacts("t", has_append_times=has_append_times)
    one = make_plan(made, everything())
    outcome = Outcome(one.steps[0], answer=encode_message(found(*answered)))
    verdict = Comparator(IdMap(one)).judge(outcome).verdict
    assert (verdict is not Verdict.DIFFERENT) is is_allowed
