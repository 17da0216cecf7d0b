"""Frames of one form: decoded by what the first of them has shown.

Theory of operation
-------------------
Most messages of a workload are alike. They differ in their values, and hardly ever in what decides
where values lie: lengths, counts, presence, tags and their sizes. These bytes are a message's
*structure*, all the others its *leaves*. Two frames of one API, version, side and size whose
structure bytes are equal have every leaf at the same place, so what a walk over the first of them
found holds for the second: that is a `Form`.

Whether a frame is of a form is one AND and one comparison of whole numbers as long as the frame;
its leaves come out of one `struct` call; lists and dicts are put together by a short program. A
string is a leaf whose length is structure, and so are bytes. `message_codec` stays the definition,
and decodes whatever has no form: faulty frames, unknown tags, bytes behind the message, frames that
are large or of a size seen for the first time. Forms are few, and kept for the process; what each
costs is bounded by FRAME_SIZE_MAX, how many there are by FORMS_MAX.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import UUID

from kdissect.codec import message_codec
from kdissect.codec.message import Message, decode_message, definitions_of
from kdissect.codec.message_codec import Layout, Slot
from kdissect.errors import DecodeError
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import Type

FRAME_SIZE_MAX = 8192
FORMS_MAX = 8192
FORMS_A_SIZE = 16  # of one API, version, side and size
_SIDES = {"request": 0, "response": 1}
_CODES = {
    Type.BOOL: ("?", 1),
    Type.INT8: ("b", 1),
    Type.INT16: ("h", 2),
    Type.UINT16: ("H", 2),
    Type.INT32: ("i", 4),
    Type.UINT32: ("I", 4),
    Type.INT64: ("q", 8),
    Type.FLOAT64: ("d", 8),
    Type.UUID: ("16s", 16),
}
_IDENTITY = frozenset({"request_api_key", "request_api_version"})


@lru_cache(4096)
def uuid_of(data: bytes) -> UUID:
    """The id of these bytes, the same object each time: equal ones are found equal at once."""
    return UUID(bytes=data)


class FormLeaf(NamedTuple):
    """A value: `pos` and `size` of its bytes in the frame, and its slot (an array's for elements).

    code: of `struct`, without byte order. place: among the values of the form.
    """

    pos: int
    size: int
    slot: Slot
    code: str
    place: int


class Ref(NamedTuple):
    """Stands for the value of a leaf where a message is laid out without values."""

    leaf: FormLeaf


class Form:
    """What frames of one form have in common; equal to itself only.

    leaves: in wire order. header, body: as of a message, with a `Ref` for each leaf and the values
    that all such messages have; nobody may change them.
    """

    __slots__ = ("_body_at", "_consts", "_fixed", "_header_at", "_mask", "_program", "_texts",
                 "_unpack", "_uuids", "api_key", "api_version", "body", "header", "leaves", "side",
                 "size")  # fmt: skip

    def __init__(self, frame: bytes, side: str, api_key: int, api_version: int) -> None:
        self.api_key, self.api_version, self.side = api_key, api_version, side
        self.size = len(frame)
        maker = _Maker(frame)
        definition, header, header_version = definitions_of(catalog.api(api_key), api_version, side)
        self.header, header_ref = maker.struct(message_codec.layout(header, header_version))
        self.body, body_ref = maker.struct(message_codec.layout(definition, api_version))
        if maker.pos != len(frame):
            raise NoForm
        self.leaves = tuple(maker.leaves)
        self._consts = tuple(maker.consts)
        self._texts = tuple(
            leaf.place for leaf in self.leaves if leaf.slot.field.type is Type.STRING
        )
        self._uuids = tuple(leaf.place for leaf in self.leaves if leaf.slot.field.type is Type.UUID)
        at = {"leaf": 0, "const": len(self.leaves)}
        at["made"] = at["const"] + len(self._consts)
        self._program = tuple(
            (names, _getter([at[kind] + index for kind, index in refs]))
            for names, refs in maker.program
        )
        self._header_at, self._body_at = (
            at[kind] + index for kind, index in (header_ref, body_ref)
        )
        self._unpack = struct.Struct(_codes(self.leaves, len(frame))).unpack
        mask = bytearray(b"\xff" * len(frame))
        for leaf in self.leaves:
            mask[leaf.pos : leaf.pos + leaf.size] = bytes(leaf.size)
        self._mask = int.from_bytes(mask)
        self._fixed = int.from_bytes(frame) & self._mask

    def fits(self, number: int) -> bool:
        """Whether a frame of this size, read as one big-endian number, is of this form."""
        return number & self._mask == self._fixed

    def values(self, frame: bytes) -> list[Any]:
        """The leaves' values, in their order, as `message_codec` has them."""
        values: list[Any] = list(self._unpack(frame))
        for index in self._texts:
            values[index] = values[index].decode("utf-8", "surrogateescape")
        for index in self._uuids:
            values[index] = uuid_of(values[index])
        return values

    def value(self, frame: bytes, leaf: FormLeaf) -> Any:
        """A single number of a frame."""
        return struct.unpack_from(f">{leaf.code}", frame, leaf.pos)[0]

    def message(self, frame: bytes) -> Message:
        """The same as `decode_message`."""
        values = self._made(frame)
        message: Message = object.__new__(Message)
        message.api_key, message.api_version = self.api_key, self.api_version
        message.side, message.surplus = self.side, b""
        message.header, message.body = values[self._header_at], values[self._body_at]
        return message

    def _made(self, frame: bytes) -> list[Any]:
        values = self.values(frame)
        values += self._consts
        for names, getter in self._program:
            if names is None:
                values.append(list(getter(values)))
            else:
                values.append(dict(zip(names, getter(values), strict=True)))
        return values


class NoForm(Exception):
    """Something in a frame that forms do not have."""


def _getter(places: list[int]) -> Callable[[list[Any]], Any]:
    if len(places) > 1:
        return itemgetter(*places)
    if places:
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(slice(0, 0))


def _codes(leaves: tuple[FormLeaf, ...], size: int) -> str:
    codes, pos = [">"], 0
    for leaf in leaves:
        codes.append(f"{leaf.pos - pos}x{leaf.code}")
        pos = leaf.pos + leaf.size
    codes.append(f"{size - pos}x")
    return "".join(codes)


_Place = tuple[str, int]  # "leaf", "const" or "made", and the index there


class _Maker:
    """Walks the first frame of a form; raises DecodeError or NoForm where there is none.

    program: (names of a struct's fields or None for a list, places of the values), inner before
    outer.
    """

    def __init__(self, frame: bytes) -> None:
        self.data = memoryview(frame)
        self.pos = 0
        self.leaves: list[FormLeaf] = []
        self.consts: list[Any] = []
        self.program: list[tuple[tuple[str, ...] | None, list[_Place]]] = []

    def struct(self, of: Layout) -> tuple[dict[str, Any], _Place]:
        found: dict[str, tuple[Any, _Place]] = {}
        for slot in of.plain:
            found[slot.name] = self._field(slot, self.data)
        if of.flexible:
            self._tags(of, found)
        place = self._make(tuple(found), [place for _, place in found.values()])
        return {name: value for name, (value, _) in found.items()}, place

    def _tags(self, of: Layout, found: dict[str, tuple[Any, _Place]]) -> None:
        count, self.pos = message_codec.read_uvarint(self.data, self.pos)
        there: dict[int, tuple[Any, _Place]] = {}
        last = -1
        for _ in range(count):
            tag, self.pos = message_codec.read_uvarint(self.data, self.pos)
            size, self.pos = message_codec.read_uvarint(self.data, self.pos)
            end = self.pos + size
            if tag <= last or tag not in of.tagged or end > len(self.data):
                raise NoForm
            last = tag
            there[tag] = self._field(of.tagged[tag], self.data[:end])
            if self.pos != end:
                raise NoForm
        for tag, slot in of.tagged.items():
            found[slot.name] = there[tag] if tag in there else self._fresh(slot.default())

    def _fresh(self, value: Any) -> tuple[Any, _Place]:
        """A default: each message has its own lists and dicts, to change."""
        if isinstance(value, dict):
            found = {name: self._fresh(inner) for name, inner in value.items()}
            place = self._make(tuple(found), [place for _, place in found.values()])
            return {name: made for name, (made, _) in found.items()}, place
        if isinstance(value, list):
            return value, self._make(None, [self._fresh(inner)[1] for inner in value])
        return self._const(value)

    def _field(self, slot: Slot, data: memoryview) -> tuple[Any, _Place]:
        if slot.field.is_array:
            return self._array(slot, data)
        if slot.inner is not None:
            if slot.nullable:
                is_there, self.pos = message_codec.read_presence(data, self.pos, slot.tagged)
                if not is_there:
                    return self._const(None)
            return self._inner(slot.inner, data)
        if slot.name in _IDENTITY:
            value, self.pos = slot.read(data, self.pos)
            return self._const(value)
        return self._leaf(slot, data, slot.nullable)

    def _inner(self, inner: Layout, data: memoryview) -> tuple[Any, _Place]:
        whole, self.data = self.data, data
        try:
            return self.struct(inner)
        finally:
            self.data = whole

    def _array(self, slot: Slot, data: memoryview) -> tuple[Any, _Place]:
        count, self.pos = message_codec.read_count(
            data, self.pos, slot.element_size_min, compact=slot.compact, nullable=slot.nullable
        )
        if count is None:
            return self._const(None)
        elements = [
            self._leaf(slot, data, False) if slot.inner is None else self._inner(slot.inner, data)
            for _ in range(count)
        ]
        return [value for value, _ in elements], self._make(None, [place for _, place in elements])

    def _leaf(self, slot: Slot, data: memoryview, nullable: bool) -> tuple[Any, _Place]:
        if slot.takes_null or slot.field.type in (Type.STRING, Type.BYTES, Type.RECORDS):
            value, self.pos = slot.read(data, self.pos, nullable)
            if not value:
                return self._const(value)
            size = len(
                value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
            )
            code = f"{size}s"
        else:
            code, size = _CODES[slot.field.type]
            _, self.pos = slot.read(data, self.pos)
        leaf = FormLeaf(self.pos - size, size, slot, code, len(self.leaves))
        self.leaves.append(leaf)
        return Ref(leaf), ("leaf", leaf.place)

    def _const(self, value: Any) -> tuple[Any, _Place]:
        self.consts.append(value)
        return value, ("const", len(self.consts) - 1)

    def _make(self, names: tuple[str, ...] | None, places: list[_Place]) -> _Place:
        self.program.append((names, places))
        return "made", len(self.program) - 1


class _Forms:
    """The forms of this process, by (side, api_key, api_version, size); None: seen once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int], list[Form] | None] = {}
        self._count = 0

    def of(self, frame: bytes, side: str, api_key: int, api_version: int) -> Form | None:
        size = len(frame)
        if size > FRAME_SIZE_MAX:
            return None
        key = (_SIDES[side], api_key, api_version, size)
        known = self._known.get(key)
        if known is None:
            if key not in self._known:
                if len(self._known) < FORMS_MAX:
                    self._known[key] = None
                return None
            known = self._known[key] = []
        number = int.from_bytes(frame)
        for form in known:
            if form.fits(number):
                return form
        if len(known) >= FORMS_A_SIZE or self._count >= FORMS_MAX:
            return None
        made = _made(frame, side, api_key, api_version)
        if made is not None:
            self._count += 1
            known.append(made)
        return made


def _made(frame: bytes, side: str, api_key: int, api_version: int) -> Form | None:
    if side == "response" and api_key == ApiKey.API_VERSIONS:
        return None  # its version is another one at times
    head = api_key.to_bytes(2, "big", signed=True) + api_version.to_bytes(2, "big", signed=True)
    if side == "request" and frame[:4] != head:
        return None
    try:
        return Form(frame, side, api_key, api_version)
    except (DecodeError, ValueError, NoForm):
        return None


_FORMS = _Forms()
form_of = _FORMS.of


def decode_alike(frame: bytes, *, side: str, api_key: int, api_version: int) -> Message:
    """The same as `decode_message`, quicker for frames that are alike. Raises the same."""
    form = form_of(frame, side, api_key, api_version)
    if form is not None:
        return form.message(frame)
    return decode_message(frame, side=side, api_key=api_key, api_version=api_version)
