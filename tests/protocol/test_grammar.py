"""The notation: its meaning and its errors."""

import pytest

from kdissect.errors import DefinitionError
from kdissect.protocol import grammar
from kdissect.protocol.model import NEVER, NO_LIMIT, Api, Definition, Type, VersionRange
from tests.builders.notation import EXAMPLE


def test_every_word_of_the_notation_reaches_the_model():
    """An example with each word parses to the model's values."""
    (api,) = grammar.parse(EXAMPLE)
    assert isinstance(api, Api)
    assert (api.key, api.name) == (99, "Invented")
    assert api.notes == ("A note about it.", "And another.")
    assert api.request.versions == VersionRange(0, 7)
    assert api.request.flexible == VersionRange(4, NO_LIMIT)
    assert api.request.unstable == VersionRange(7, 7)
    assert api.request.name == "InventedRequest"
    fields = {field.name: field for field in api.request.fields}
    assert fields["name"].nullable == fields["name"].versions
    assert fields["name"].default is None
    assert fields["name"].entity == "topicName"
    assert fields["legacy"].nullable == VersionRange(2, 3)
    assert fields["legacy"].default == ""
    assert fields["size_max"].default == 2**63 - 1
    assert fields["on"].default is True
    assert fields["label"].default == "some words"
    assert fields["id"].map_key
    assert fields["id"].never_flexible
    assert (fields["epoch"].tag, fields["epoch"].tagged) == (0, VersionRange(4, NO_LIMIT))
    assert fields["late"].tagged == VersionRange(5, NO_LIMIT)
    assert fields["late"].is_array
    assert fields["late"].default is None
    assert fields["cursor"].type is Type.STRUCT
    assert [field.name for field in fields["cursor"].fields] == ["at"]
    first, second = api.response.fields
    assert first.fields == second.fields
    assert first.default == ()
    assert first.tagged == NEVER


def test_records_have_parts_of_their_own_versions():
    """Key and value have ranges of versions of their own."""
    text = """\
group 1 Kept

key: versions 0
  group: string 0

value: versions 0-4, flexible 4+
  offset: int64 0+
"""
    (record,) = grammar.parse(text)
    assert isinstance(record, Api)
    assert (record.request.name, record.response.name) == ("KeptKey", "KeptValue")
    assert (record.request.kind, record.request.record_key) == ("group", 1)
    assert record.response.versions == VersionRange(0, 4)


def test_a_file_may_declare_several():
    """Definitions follow each other in one file, with their notes."""
    text = (
        "header One: versions 0\n\nfields\n  a: int8 0+\n\n# Why.\ndata Two: versions 1\n\nfields\n"
    )
    one, two = grammar.parse(text)
    assert isinstance(one, Definition)
    assert isinstance(two, Definition)
    assert (one.name, two.name, two.notes) == ("One", "Two", ("Why.",))


HEAD = "api 1 A: versions 0-3\n\nrequest\n"
TAIL = "\nresponse\n"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "empty"),
        ("# only a note\n", 1, "no head"),
        ("request\n", 1, "expected a head"),
        ("api 1 A: versions x\n", 1, "versions R"),
        ("api 1 A\n\nrequest\n", 3, "not said"),
        (HEAD, 3, "response is missing"),
        (HEAD + TAIL + "\nrequest\n", 7, "not expected"),
        (HEAD + TAIL + "\nvalue\n", 7, "not expected"),
        (HEAD + TAIL + "\nanything\n", 7, "expected a part"),
        (HEAD + "  a int32 0+\n" + TAIL, 4, "expected a field"),
        (HEAD + "  a: int32\n" + TAIL, 4, "expected a field"),
        (HEAD + "  a: [int32 0+\n" + TAIL, 4, "expected a field"),
        (HEAD + "  A: int32 0+\n" + TAIL, 4, "expected a field"),
        (HEAD + "   a: int32 0+\n" + TAIL, 4, "indentation of 2"),
        (HEAD + "  a: int32 0+\n    b: int32 0+\n" + TAIL, 5, "indentation of 2"),
        (HEAD + "  a: int33 0+\n" + TAIL, 4, "no type"),
        (HEAD + "  a: Missing 0+\n" + TAIL, 4, "not declared"),
        (HEAD + "  a: int32 3-1\n" + TAIL, 4, "no range"),
        (HEAD + "  a: int32 0-99999\n" + TAIL, 4, "no range"),
        (HEAD + "  a: int32 0+ = x\n" + TAIL, 4, "no default"),
        (HEAD + "  a: int32 0+ = null\n" + TAIL, 4, "no version allows null"),
        (HEAD + '  a: [string] 0+ = "x"\n' + TAIL, 4, "no default"),
        (HEAD + "  a: int32 0+\n  a: int32 2+\n" + TAIL, 5, "twice"),
        (HEAD + "  a: S 0+\n" + TAIL + "\nstruct S\n  s: S 0+\n", 9, "contains itself"),
        (HEAD + TAIL + "\nstruct S\n  a: int8 0+\n\nstruct S\n  a: int8 0+\n", 10, "twice"),
    ],
)
def test_a_mistake_is_refused_with_its_line(text, line, reason):
    """DefinitionError has the file, the line and the reason."""
    with pytest.raises(DefinitionError, match=reason) as caught:
        grammar.parse(text, "some/where/01_a.kdef")
    assert caught.value.place == f"01_a.kdef:{line}"
