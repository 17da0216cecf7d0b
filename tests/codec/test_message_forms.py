"""Frames decoded by their form are what `decode_message` makes of them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdissect import DecodeError, Message, decode_message, encode_message
from kdissect.codec import message_forms
from kdissect.codec.message_forms import Form, Ref, decode_alike, form_of
from kdissect.protocol import catalog
from tests.codec.message_values import sample, to_json

ALL = [
    (key, version, side)
    for key, api in catalog.apis().items()
    for side in ("request", "response")
    for version in range(api.request.versions.first, api.request.versions.last + 1)
    if (key, side) != (18, "response")
]


def made(key, version, side, seed):
    definition = catalog.api(key).side(side)
    body = sample(definition, version, seed)
    return encode_message(Message(key, version, side, {"correlation_id": seed}, body))


def other_values(frame, form, generator):
    """A frame of the same form."""
    out = bytearray(frame)
    for leaf in form.leaves:
        if generator.random() < 0.7:
            out[leaf.pos : leaf.pos + leaf.size] = generator.randbytes(leaf.size)
    return bytes(out)


def shown(message):
    return to_json([message.header, message.body, message.side, message.surplus])


def check(frame, form):
    assert form.fits(int.from_bytes(frame))
    expected = decode_message(
        frame, side=form.side, api_key=form.api_key, api_version=form.api_version
    )
    found = form.message(frame)
    assert shown(found) == shown(expected)
    assert list(found.body) == list(expected.body)
    assert (found.api_key, found.api_version) == (expected.api_key, expected.api_version)


def test_every_message_of_every_version():
    generator = random.Random(8)
    count = 0
    for key, version, side in ALL:
        for seed in range(3):
            frame = made(key, version, side, seed)
            try:
                form = Form(frame, side, key, version)
            except message_forms.NoForm:
                assert b"_unknown_tags" in repr(decode(frame, key, version, side)).encode()
                continue
            check(frame, form)
            check(other_values(frame, form, generator), form)
            count += 1
    assert count > 1500


def decode(frame, key, version, side):
    return decode_message(frame, side=side, api_key=key, api_version=version)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_bytes_fit_only_where_nothing_else_moves(data):
    key, version, side = data.draw(st.sampled_from(ALL))
    frame = made(key, version, side, data.draw(st.integers(0, 5)))
    try:
        form = Form(frame, side, key, version)
    except message_forms.NoForm:
        return
    out = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        pos = data.draw(st.integers(0, len(out) - 1))
        out[pos] = data.draw(st.integers(0, 255))
    if form.fits(int.from_bytes(out)):
        check(bytes(out), form)


def test_messages_share_nothing_that_can_be_changed():
    frame = encode_message(Message(1, 15, "request", {}, {"topics": []}))
    form = Form(frame, "request", 1, 15)
    first, second = form.message(frame), form.message(frame)
    first.body["topics"].append(1)
    first.body["replica_state"]["replica_id"] = 9
    assert second == decode_message(frame, side="request")


def test_the_second_frame_of_a_size_makes_a_form():
    known = message_forms._Forms()
    frame = encode_message(Message(12, 4, "request", {"correlation_id": 1}, {"group_id": "g"}))
    assert known.of(frame, "request", 12, 4) is None
    form = known.of(frame, "request", 12, 4)
    assert form is not None
    assert known.of(frame[:4] + b"\0\0\0\7" + frame[8:], "request", 12, 4) is form
    assert known.of(frame, "request", 12, 3) is None


def test_what_has_no_form_is_decoded_by_the_definition():
    frame = encode_message(Message(12, 4, "request", {"correlation_id": 1}, {"group_id": "g"}))
    for _ in range(3):
        assert decode_alike(frame + b"!", side="request", api_key=12, api_version=4).surplus == b"!"
        with pytest.raises(DecodeError):
            decode_alike(frame[:-2], side="request", api_key=12, api_version=4)
        with pytest.raises(ValueError, match="api_version"):
            decode_alike(frame, side="request", api_key=12, api_version=3)
    large = encode_message(Message(0, 9, "request", {}, {"transactional_id": "x" * 9000}))
    assert form_of(large, "request", 0, 9) is None


def test_a_form_tells_where_its_values_are():
    body = {"group_id": "group", "member_id": "me", "generation_id": 7}
    frame = encode_message(Message(12, 4, "request", {}, body))
    form = Form(frame, "request", 12, 4)
    ref = form.body["member_id"]
    assert isinstance(ref, Ref)
    assert frame[ref.leaf.pos : ref.leaf.pos + ref.leaf.size] == b"me"
    assert form.values(frame)[form.body["generation_id"].leaf.place] == 7
    assert form.body["group_instance_id"] is None
