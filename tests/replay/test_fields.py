"""The table of fields: kinds as in a handwritten list, and mistakes in files of rules."""

import re
from collections.abc import Iterator

import pytest

from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import Field
from kdissect.replay import fields
from kdissect.replay.workload.messages import TARGET_OWN_APIS, is_transient
from kdissect.replay.workload.source import INTERNAL_APIS
from tests.conftest import ROOT
from tests.oracles.message_fields import FIELDS

KEYS = {api.name: key for key, api in catalog.apis().items()}
KINDS = {kind: kind for kind in fields.IDS}
# The list says more of these than the table.
KINDS |= {
    "assignment": "protocol", "subscription": "protocol",
    "acl-resource": "resource", "config-resource": "resource",
    "coordinator-key": "coordinator", "token": "opaque",
}  # fmt: skip
# Kafka's own marks of fields, where it has them.
ENTITIES = {
    "topicName": "topic", "groupId": "group", "brokerId": "node", "producerId": "producer-id",
    "transactionalId": "transactional-id",
}  # fmt: skip


def leaves(shape: fields.Shape) -> Iterator[fields.ShapeField]:
    for field in shape.fields.values():
        yield from [field] if field.inner is None else leaves(field.inner)


def test_every_api_that_is_replayed_is_in_the_list() -> None:
    """The list written by hand has both sides of each API that replay sends."""
    replayed = set(KEYS.values()) - INTERNAL_APIS - TARGET_OWN_APIS
    wanted = {(catalog.api(key).name, side) for key in replayed for side in ("request", "response")}
    assert set(FIELDS) == wanted


@pytest.mark.parametrize(("api_name", "side"), FIELDS)
def test_fields_have_the_kinds_of_the_list(api_name: str, side: str) -> None:
    """The table says of each field what the list says."""
    key = KEYS[api_name]
    versions = catalog.api(key).side(side).versions
    shapes = (
        fields.shape_of(fields.built_in_fields(), key, side, version)
        for version in range(versions.first, versions.last + 1)
    )
    listed, known = FIELDS[api_name, side], set()
    for field in (each for shape in shapes for each in leaves(shape)):
        path = field.path.replace("[]", "")
        kind = listed.get(path, "")
        if field.kind != "replicas":  # no id
            assert field.kind == KINDS.get(kind), path
        assert kind == ENTITIES.get(field.slot.field.entity, kind), path
        known.add(path)
    assert set(listed) <= known


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[rule]]\nname='a'\nkind='ignore'", "path or entity is missing"),
        ("[[rule]]\nname='a'\nkind='never'\npath='x'", "none of topic"),
        ("[[rule]]\nname='a'\nkind='ignore'\npath='x'\nwhom='b'", "'whom' is no field"),
        ("[[rule]]\nname='a'\nkind='unordered'\npath='x'", "key is missing"),
        ("[[rule]]\nname='a'\nkind='tolerance'\npath='x'", "absolute or relative"),
        ("[[rule]]\nname='a'\nkind='equal-modulo'\npath='x'", "missing"),
        ("[[rule]]\nname='a'\nkind='ignore'\npath='x'\napis=['Fetsh']", "did you mean"),
        ("[[rule]]\nname='a'\nkind='ignore'\npath='x'\nwhere={a='('}", "no regular expression"),
        ("[[rule]]\nname='a'\nkind='ignore'\npath=[1]", "[1] is no text, and no list of texts"),
        ("[[rule]]\nname='a'\nkind='ignore'\npath='x'\napis=5", "5 is no text"),
        ("[[rule]]\nname=5\nkind='ignore'\npath='x'", "name = 5 is no str"),
        ("[[rule]]\nname='a'\nkind='ignore'\npath='x'\nracing='no'", "racing = 'no' is no bool"),
        ("[rule]\nname='a'", "each rule begins with the line [[rule]]"),
        ("rule = 5", "each rule begins with the line [[rule]]"),
        ("[rule", "mine.toml"),
        ("[rules]\n", "no part of a file of rules"),
        ("format_version = 2\n", "format_version"),
    ],
)
def test_wrong_rules_are_refused(text: str, says: str) -> None:
    """RuleError has the file and the reason."""
    with pytest.raises(fields.RuleError, match=re.escape(says)) as caught:
        fields.parse_rules(text, "mine.toml")
    assert "mine.toml" in str(caught.value)


def test_one_value_needs_no_list() -> None:
    """Of the fields of a rule that have lists."""
    text = "[[rule]]\nname='a'\nkind='equal-modulo'\npath='x'\napis='Fetch'\ncaptured='12'"
    [rule] = fields.parse_rules(text, "mine.toml")
    assert (rule.path, rule.apis, rule.captured) == (("x",), {"Fetch"}, {"12"})


def test_paths_of_rules() -> None:
    """A path is a field, a field of elements, or a pattern."""
    rules = fields.parse_rules(
        "[[rule]]\nname='a'\nkind='ignore'\npath='error_code'\n"
        "[[rule]]\nname='b'\nkind='ignore'\npath='topics[].name'\n"
        "[[rule]]\nname='c'\nkind='ignore'\npath=['*_ms', 'x']\n"
        "[[rule]]\nname='d'\nkind='ignore'\npath='*.topics[].name'\n",
        "x",
    )
    fits = {
        path: [rule.name for rule in rules if rule.fits("Fetch", path)]
        for path in ("error_code", "topics[].error_code", "topics[].name", "a.topics[].name",
                     "x.throttle_time_ms", "topics[].my_error_code", "x")
    }  # fmt: skip
    assert list(fits.values()) == [["a"], ["a"], ["b", "d"], ["d"], ["c"], [], ["c"]]


def test_each_built_in_rule_has_a_reason_and_is_explained() -> None:
    """`docs/replay-rules.md` is made from the table."""
    from tools.replay_rules import page

    rules = fields.built_in_fields().rules
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(rule.why for rule in rules)
    assert (ROOT / "docs" / "replay-rules.md").read_text() == page()


def test_paths_of_built_in_rules_are_fields() -> None:
    """A rule about a place that no message has would be a spelling mistake."""
    paths: dict[str, set[str]] = {name: set() for name in KEYS}
    for name, found in paths.items():
        api = catalog.api(KEYS[name])
        for definition in (api.request, api.response):
            found.update(_places(definition.fields, ""))
    for rule in fields.built_in_fields().rules:
        for path in rule.path:
            one = fields.path_pattern((path,))
            apis = rule.apis or set(paths)
            assert any(one.fullmatch(each) for name in apis for each in paths[name]), rule.name


def _places(fields: tuple[Field, ...], path: str) -> Iterator[str]:
    for field in fields:
        here = path + field.name
        yield here
        if field.is_array:
            yield f"{here}[]"
        yield from _places(field.fields, f"{here}{'[]' * field.is_array}.")


def test_what_was_not_ready_then_is_what_clients_repeat() -> None:
    """The codes of the rule are those of the table of `messages`, and no refusal for good."""
    [rule] = [each for each in fields.built_in_fields().rules if each.name == "not-ready-then"]
    assert all(is_transient(ApiKey.LIST_OFFSETS, int(code)) for code in rule.captured)
