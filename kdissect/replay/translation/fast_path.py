"""A `Translator` that does not decode messages whose form it knows.

Theory of operation
-------------------
Most messages of a workload differ in values, and hardly ever in what decides where values lie:
lengths, counts, presence, tags and their sizes. These bytes are a frame's *structure*, all others
its *leaves*. If two frames of one API, version, side and size have equal structure bytes, every
leaf is at the same position in both: they have one `Form`, found by walking the first of them.

A request of a known form is copied, and its ids are patched at their positions. An answer that has
the form of the captured response is compared with it leaf by leaf. Everything else goes to
`Translator`, and so do frames with faults, unknown tags or surplus bytes, and large ones.

`running.replay` chooses this class; nothing else knows it. Forms live as long as the process;
FRAME_SIZE_MAX bounds what each costs, FORMS_MAX their number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Any, NamedTuple
from uuid import UUID

from kdissect.codec import message_codec
from kdissect.codec.message import Message, decode_message, definitions_of
from kdissect.codec.message_codec import Layout, Slot
from kdissect.errors import DecodeError
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import Type
from kdissect.replay.batch_headers import last_data
from kdissect.replay.model import READ, Step
from kdissect.replay.translation import requests
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.offsets import Log
from kdissect.replay.translation.retry import Differs
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.field_kinds import FieldContext, FieldKind, FieldRef, iter_fields
from kdissect.replay.workload.messages import (
    GROUP_KEY,
    OUT_OF_SEQUENCE,
    REBALANCING,
    REJOINING_APIS,
    SESSION_LOST,
    TRANSACTION_KEY,
    TRANSIENT,
    entries,
    response_of,
)

_FRAME_SIZE_MAX = 8192
FORMS_MAX = 8192
FORMS_A_SIZE = 16  # of one API, version, side and size
METADATA_MAX = 256

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
# Without renames, names stay as they are.
_NAMES = frozenset({FieldKind.TOPIC, FieldKind.GROUP, FieldKind.TRANSACTIONAL_ID})
_CHANGING = frozenset(requests.CHANGES) - _NAMES
_GROUP_OR_TRANSACTION = (GROUP_KEY, TRANSACTION_KEY)


class FastTranslator(Translator):
    """`model.Translation`. The same as `Translator`, quicker for frames of a known form."""

    def __init__(self, ids: IdMap, differs: Differs | None = None) -> None:
        super().__init__(ids, differs)
        self._is_plain = ids.has_renames or ids.options.reencode  # neither keeps a frame's size
        self._last_pair: tuple[bytes, Pair | None] = (b"", None)
        # Metadata of both sides -> `changes` of the target's facts after it was learnt
        self._metadata: dict[tuple[bytes, bytes], int] = {}

    def _translated(self, step: Step, frame: bytes, correlation_id: int) -> bytes:
        patched = None if self._is_plain else patch(self.ids, step, frame, correlation_id)
        return super()._translated(step, frame, correlation_id) if patched is None else patched

    def retry(self, step: Step, response: bytes) -> str:
        pair = self._pair(step, response)
        if pair is not None and is_final(self.ids, step, pair):
            return ""
        return super().retry(step, response)

    def learn(self, step: Step, response: bytes) -> None:
        if step.exchange.api_key == ApiKey.METADATA:
            self._learn_metadata(step, response)
            return
        pair = self._pair(step, response)
        if pair is not None and learn_pair(self.ids, step, pair):
            self.retries.finish(step)
        else:
            super().learn(step, response)

    def _learn_metadata(self, step: Step, response: bytes) -> None:
        """Clients repeat Metadata: the same answer says nothing new until something else did."""
        both = (step.exchange.response or b"")[4:], response[4:]
        if self._metadata.get(both) == self.ids.target.changes:
            return
        super().learn(step, response)
        if len(self._metadata) >= METADATA_MAX:
            self._metadata.clear()
        self._metadata[both] = self.ids.target.changes

    def _pair(self, step: Step, response: bytes) -> Pair | None:
        if self._last_pair[0] is not response:
            pair = None if self._is_plain else pair_of(step, response)
            self._last_pair = (response, pair)
        return self._last_pair[1]


# -- forms --------------------------------------------------------------------------------------


class FormLeaf(NamedTuple):
    """A value: `pos` and `size` of its bytes in the frame, and its slot (an array's for elements).

    code: of `struct`, without byte order. value_index: among the values of the form.
    """

    pos: int
    size: int
    slot: Slot
    code: str
    value_index: int


class NoForm(Exception):
    """The frame has something that forms do not cover."""


class Form:
    """The common part of frames that differ only in some values.

    leaves: fields whose values differ, in wire order.
    body: as of a message, with a `FormLeaf` for each leaf and the values that all such messages
    share; read only.
    """

    def __init__(self, frame: bytes, side: str, api_key: int, api_version: int) -> None:
        self.api_key, self.api_version, self.side = api_key, api_version, side
        walk = FormWalk(frame)
        definition, header, header_version = definitions_of(catalog.api(api_key), api_version, side)
        walk.struct(message_codec.layout(header, header_version))
        self.body = walk.struct(message_codec.layout(definition, api_version))
        if walk.pos != len(frame):
            raise NoForm
        self.leaves = tuple(walk.leaves)
        self._texts = self._of_type(Type.STRING)
        self._uuids = self._of_type(Type.UUID)
        codes, pos = [">"], 0
        for leaf in self.leaves:
            codes.append(f"{leaf.pos - pos}x{leaf.code}")
            pos = leaf.pos + leaf.size
        self._unpack = struct.Struct(f"{''.join(codes)}{len(frame) - pos}x").unpack
        mask = bytearray(b"\xff" * len(frame))
        for leaf in self.leaves:
            mask[leaf.pos : leaf.pos + leaf.size] = bytes(leaf.size)
        self._mask = int.from_bytes(mask)
        self._structure = int.from_bytes(frame) & self._mask

    def _of_type(self, of: Type) -> list[int]:
        return [leaf.value_index for leaf in self.leaves if leaf.slot.field.type is of]

    def fits(self, number: int) -> bool:
        """Return whether a frame of this size, read as one big-endian number, is of this form."""
        return number & self._mask == self._structure

    def values(self, frame: bytes) -> list[Any]:
        """The leaves' values, in their order, as `message_codec` has them."""
        values: list[Any] = list(self._unpack(frame))
        for index in self._texts:
            values[index] = values[index].decode("utf-8", "surrogateescape")
        for index in self._uuids:
            values[index] = message_codec.uuid_of(values[index])
        return values

    @cached_property
    def fields(self) -> tuple[FormField, ...]:
        """The fields that `field_kinds` knows, in wire order."""
        message: Message = object.__new__(Message)
        message.api_key, message.api_version = self.api_key, self.api_version
        message.side, message.body = self.side, self.body
        return tuple(_field(ref) for ref in iter_fields(message))

    def fields_of(self, kinds: Collection[FieldKind]) -> tuple[FormField, ...]:
        return tuple(field for field in self.fields if field.kind in kinds)

    @cached_property
    def records(self) -> tuple[FormField, ...]:
        return self.fields_of({FieldKind.RECORDS})

    @cached_property
    def base_offsets(self) -> tuple[FormField, ...]:
        offsets = self.fields_of({FieldKind.OFFSET})
        return tuple(field for field in offsets if field.slot.name == "base_offset")

    @cached_property
    def error_codes(self) -> tuple[FormLeaf, ...]:
        return tuple(_error_codes(self.body))

    @cached_property
    def patches(self) -> Patches:
        return Patches(self)


class FormWalk:
    """Walks the first frame of a form. Raises DecodeError or NoForm."""

    def __init__(self, frame: bytes) -> None:
        self.data = memoryview(frame)
        self.pos = 0
        self.leaves: list[FormLeaf] = []

    def struct(self, of: Layout) -> dict[str, Any]:
        found = {slot.name: self._field(slot, self.data) for slot in of.plain}
        if of.flexible:
            self._tags(of, found)
        return found

    def _tags(self, of: Layout, values: dict[str, Any]) -> None:
        count, self.pos = message_codec.read_uvarint(self.data, self.pos)
        tagged: dict[int, Any] = {}
        last = -1
        for _ in range(count):
            tag, self.pos = message_codec.read_uvarint(self.data, self.pos)
            size, self.pos = message_codec.read_uvarint(self.data, self.pos)
            end = self.pos + size
            if tag <= last or tag not in of.tagged or end > len(self.data):
                raise NoForm
            last = tag
            tagged[tag] = self._field(of.tagged[tag], self.data[:end])
            if self.pos != end:
                raise NoForm
        for tag, slot in of.tagged.items():
            values[slot.name] = tagged[tag] if tag in tagged else slot.default()

    def _field(self, slot: Slot, data: memoryview) -> Any:
        if slot.field.is_array:
            return self._array(slot, data)
        if slot.inner is not None:
            if slot.nullable:
                is_there, self.pos = message_codec.read_presence(data, self.pos, slot.tagged)
                if not is_there:
                    return None
            return self._inner(slot.inner, data)
        if slot.name in _IDENTITY:
            value, self.pos = slot.read(data, self.pos)
            return value
        return self._leaf(slot, data, slot.nullable)

    def _inner(self, inner: Layout, data: memoryview) -> dict[str, Any]:
        whole, self.data = self.data, data
        try:
            return self.struct(inner)
        finally:
            self.data = whole

    def _array(self, slot: Slot, data: memoryview) -> list[Any] | None:
        count, self.pos = message_codec.read_count(
            data, self.pos, slot.element_size_min, compact=slot.compact, nullable=slot.nullable
        )
        if count is None:
            return None
        return [
            self._leaf(slot, data, False) if slot.inner is None else self._inner(slot.inner, data)
            for _ in range(count)
        ]

    def _leaf(self, slot: Slot, data: memoryview, nullable: bool) -> Any:
        if slot.takes_null or slot.field.type in (Type.STRING, Type.BYTES, Type.RECORDS):
            value, self.pos = slot.read(data, self.pos, nullable)
            if not value:
                return value
            size = len(
                value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
            )
            code = f"{size}s"
        else:
            code, size = _CODES[slot.field.type]
            _, self.pos = slot.read(data, self.pos)
        leaf = FormLeaf(self.pos - size, size, slot, code, len(self.leaves))
        self.leaves.append(leaf)
        return leaf


class Forms:
    """Forms by (side, api_key, api_version, size); None: one frame of that size was seen."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int], list[Form] | None] = {}
        self._count = 0

    def of(self, frame: bytes, side: str, api_key: int, api_version: int) -> Form | None:
        size = len(frame)
        if size > _FRAME_SIZE_MAX:
            return None
        key = (side, api_key, api_version, size)
        forms = self._known.get(key)
        if forms is None:
            if key not in self._known:
                if len(self._known) < FORMS_MAX:
                    self._known[key] = None
                return None
            forms = self._known[key] = []
        number = int.from_bytes(frame)
        for form in forms:
            if form.fits(number):
                return form
        if len(forms) >= FORMS_A_SIZE or self._count >= FORMS_MAX:
            return None
        made = _made(frame, side, api_key, api_version)
        if made is not None:
            self._count += 1
            forms.append(made)
        return made


def _made(frame: bytes, side: str, api_key: int, api_version: int) -> Form | None:
    if side == "response" and api_key == ApiKey.API_VERSIONS:
        return None  # KIP-511: the response may be v0, whatever the request's version
    head = api_key.to_bytes(2, "big", signed=True) + api_version.to_bytes(2, "big", signed=True)
    if side == "request" and frame[:4] != head:
        return None
    try:
        return Form(frame, side, api_key, api_version)
    except (DecodeError, ValueError, NoForm):
        return None


_FORMS = Forms()
form_of = _FORMS.of


# -- fields of a form ---------------------------------------------------------------------------


class FormField(NamedTuple):
    """A `FieldRef` of a form: leaves of its value, or of the elements of its list.

    holder: the plain fields of the struct around; around: as a tuple. Values are leaves, or what
    all frames of the form share.
    """

    kind: FieldKind
    slot: Slot
    leaves: tuple[FormLeaf, ...]
    is_list: bool
    holder: dict[str, Any]
    around: tuple[Any, ...]

    def around_of(self, values: list[Any]) -> FieldContext:
        """The structs around the field, in a frame with these values."""
        return FieldContext(
            *[values[each.value_index] if type(each) is FormLeaf else each for each in self.around]
        )

    def ref(self, values: list[Any]) -> FieldRef:
        """The ref in a frame with these values; its holder has plain fields only."""
        holder = {
            name: values[each.value_index] if type(each) is FormLeaf else each
            for name, each in self.holder.items()
        }
        if self.is_list:
            holder[self.slot.name] = [values[leaf.value_index] for leaf in self.leaves]
        return FieldRef(self.kind, self.slot, holder, self.around_of(values))


def _field(ref: FieldRef) -> FormField:
    value = ref.holder[ref.slot.name]
    leaves = tuple(each for each in entries(value) or [value] if isinstance(each, FormLeaf))
    holder = {name: each for name, each in ref.holder.items() if not isinstance(each, (list, dict))}
    is_list = isinstance(value, list)
    return FormField(ref.kind, ref.slot, leaves, is_list, holder, tuple(ref.around))


def _error_codes(value: Any) -> Iterator[FormLeaf]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(inner, FormLeaf):
                yield from _error_codes(inner)
            elif name.endswith("error_code"):
                yield inner
    elif isinstance(value, list):
        for each in value:
            yield from _error_codes(each)


# -- requests -----------------------------------------------------------------------------------

_Special = Callable[[IdMap, Step, Form, bytes, list[Any], bytearray], bool]


class _Change(NamedTuple):
    """A field with what `requests` does to it. around: index in `Patches.arounds`; needs_holder:
    the change reads other fields of the struct."""

    change: Callable[[IdMap, Step, FieldRef, Any], Any]
    field: FormField
    around: int
    needs_holder: bool


class Patches:
    """Everything that may differ at the target in requests of a form.

    changes: in the order of `requests.translate`. arounds: a field for each different context.
    special: the rule of the API, None if it changes nothing. is_known: False if only `requests` can
    translate the request. is_plain: nothing changes but the correlation id.
    """

    def __init__(self, form: Form) -> None:
        self.is_known, self.special = _special(form)
        fields = [field for field in form.fields_of(_CHANGING) if field.leaves]
        fields.sort(key=lambda field: field.kind is not FieldKind.GENERATION)
        firsts: dict[Any, FormField] = {}
        for field in fields:
            firsts.setdefault(field.around, field)
        self.arounds = tuple(firsts.values())
        order = {around: index for index, around in enumerate(firsts)}
        self.changes = tuple(
            _Change(
                requests.CHANGES[field.kind], field, order[field.around],
                field.kind in (FieldKind.GENERATION, FieldKind.PRODUCER_ID),
            )
            for field in fields
        )  # fmt: skip
        self.is_plain = self.is_known and self.special is None and not self.changes


def patch(ids: IdMap, step: Step, frame: bytes, correlation_id: int) -> bytes | None:
    """The frame with the target's ids; None: fall back to `requests`. Raises Untranslatable."""
    exchange = step.exchange
    form = form_of(frame, "request", exchange.api_key, exchange.api_version)
    if form is None or not form.patches.is_known:
        return None
    patches = form.patches
    out = bytearray(frame)
    out[4:8] = correlation_id.to_bytes(4, "big", signed=True)
    if patches.is_plain:
        return bytes(out)
    values = form.values(frame)
    if patches.special is not None:
        if not patches.special(ids, step, form, frame, values, out):
            return None
    arounds = [field.around_of(values) for field in patches.arounds]
    for change, field, around, needs_holder in patches.changes:
        if not needs_holder:
            ref = FieldRef(field.kind, field.slot, {}, arounds[around])
        else:
            ref = field.ref(values)
            if field.kind is FieldKind.PRODUCER_ID and requests.producer_epoch(ids, ref):
                name = requests.epoch_name(ref)
                if not _put(out, field.holder[name], ref.holder[name]):
                    return None
        for leaf in field.leaves:
            value = values[leaf.value_index]
            translated = change(ids, step, ref, value)
            if translated != value and not _put(out, leaf, translated):
                return None
    return bytes(out)


def _put(out: bytearray, leaf: Any, value: Any) -> bool:
    """Overwrite a value; False if it is no leaf, or has another size."""
    if not isinstance(leaf, FormLeaf):
        return False
    if isinstance(value, UUID):
        value = value.bytes
    elif isinstance(value, str):
        try:
            value = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return False
    if isinstance(value, bytes):
        if len(value) != leaf.size:
            return False
        out[leaf.pos : leaf.pos + leaf.size] = value
        return True
    try:
        struct.pack_into(f">{leaf.code}", out, leaf.pos, value)
    except struct.error:
        return False
    return True


def _special(form: Form) -> tuple[bool, _Special | None]:
    """(is_known, special) of `Patches`."""
    key, body = form.api_key, form.body
    if key not in requests.SPECIAL:
        return True, None
    if key == ApiKey.FETCH:
        return True, (_session if "session_id" in body else None)
    if key == ApiKey.METADATA:
        return True, (_metadata if body["topics"] else None)
    if key == ApiKey.FIND_COORDINATOR:
        return True, _find_coordinator
    if key == ApiKey.JOIN_GROUP:
        return True, None  # it only renames
    if key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
        return body["topic_partitions"] is None, None
    return False, None


def _session(
    ids: IdMap, step: Step, form: Form, frame: bytes, values: list[Any], out: bytearray
) -> bool:
    """A Fetch session that the target continues."""
    if len(ids.target.nodes) > 1 or step.number in ids.crowded_fetches:
        return False  # `requests` finds the node that has the session
    session, epoch = form.body["session_id"], form.body["session_epoch"]
    found = ids.sessions.continued(
        ids.broker(step), step.number, values[session.value_index], values[epoch.value_index],
        _captured_code(step), lambda: decode_message(frame, side="request").body,
    )  # fmt: skip
    return found is not None and _put(out, session, found[0]) and _put(out, epoch, found[1])


def _captured_code(step: Step) -> int:
    """The error code of a captured response as a whole."""
    exchange = step.exchange
    if exchange.response is None:
        return 0
    form = form_of(exchange.response, "response", exchange.api_key, exchange.api_version)
    if form is not None:
        leaf = form.body.get("error_code")
        if leaf is None:
            return 0
        return int(struct.unpack_from(f">{leaf.code}", exchange.response, leaf.pos)[0])
    captured = response_of(exchange)
    return 0 if captured is None else int(captured.body.get("error_code", 0))


def _metadata(
    ids: IdMap, step: Step, form: Form, frame: bytes, values: list[Any], out: bytearray
) -> bool:
    return ids.may_create or _put(out, form.body.get("allow_auto_topic_creation"), False)


def _find_coordinator(
    ids: IdMap, step: Step, form: Form, frame: bytes, values: list[Any], out: bytearray
) -> bool:
    leaf = form.body.get("key_type")
    return leaf is None or values[leaf.value_index] in _GROUP_OR_TRANSACTION


# -- answers ------------------------------------------------------------------------------------


class Pair:
    """A captured response and an answer of one form, as values of its leaves.

    captured_codes, codes: their error codes.
    """

    __slots__ = ("answered", "captured", "captured_codes", "codes", "form")

    def __init__(self, form: Form, captured: list[Any], answered: list[Any]) -> None:
        self.form, self.captured, self.answered = form, captured, answered
        self.captured_codes = {captured[leaf.value_index] for leaf in form.error_codes}
        self.codes = {answered[leaf.value_index] for leaf in form.error_codes}


def pair_of(step: Step, answer: bytes) -> Pair | None:
    """Both responses of a step; None if they are not of one form."""
    exchange = step.exchange
    captured = exchange.response
    if captured is None or len(captured) != len(answer):
        return None
    form = form_of(captured, "response", exchange.api_key, exchange.api_version)
    if form is None or not form.fits(int.from_bytes(answer)):
        return None
    return Pair(form, form.values(captured), form.values(answer))


def is_final(ids: IdMap, step: Step, pair: Pair) -> bool:
    """Return whether `Retry.reason` is certainly ""."""
    if pair.codes & (TRANSIENT - pair.captured_codes):
        return False
    if step.exchange.api_key in REJOINING_APIS and pair.codes & REBALANCING:
        return False
    if OUT_OF_SEQUENCE in pair.codes or step.exchange.api_key == ApiKey.SHARE_FETCH:
        return False
    if step.exchange.api_key != ApiKey.FETCH:
        return step.step_class != READ
    if pair.codes & SESSION_LOST:
        return False
    return any(pair.codes) or _brings_all(ids, pair)


def _brings_all(ids: IdMap, pair: Pair) -> bool:
    """Return whether each partition of a Fetch with captured data records has them, in the same
    order."""
    for field in pair.form.records:
        for leaf in field.leaves:
            captured, answered = pair.captured[leaf.value_index], pair.answered[leaf.value_index]
            last = last_data(captured)
            if last < 0:
                continue
            log = _log(ids, field, pair)
            if log is None:
                return False
            if not ids.reaches(log, last, last if captured == answered else last_data(answered)):
                return False
    return True


def _log(ids: IdMap, field: FormField, pair: Pair) -> Log | None:
    """The partition of a field by the capture's name; None if the answer names another one."""
    captured, answered = field.around_of(pair.captured), field.around_of(pair.answered)
    if captured.topic or captured.topic_id is None:
        is_same = ids.topic(captured.topic) == answered.topic
    else:
        is_same = ids.topic_id(captured.topic_id) == answered.topic_id
    if captured.partition != answered.partition or not is_same:
        return None
    return ids.topic_name(captured.topic, captured.topic_id), captured.partition


def learn_pair(ids: IdMap, step: Step, pair: Pair) -> bool:
    """Learn from a final answer; False: fall back to `answers`."""
    if step.exchange.api_key == ApiKey.PRODUCE:
        return _learn_produce(ids, step, pair)
    if step.exchange.api_key == ApiKey.FETCH:
        return _learn_fetch(ids, step, pair)
    return False


def _learn_fetch(ids: IdMap, step: Step, pair: Pair) -> bool:
    session, code = pair.form.body.get("session_id"), pair.form.body.get("error_code")
    if session is None or code is None:
        return False
    answer = {
        "session_id": pair.answered[session.value_index],
        "error_code": pair.answered[code.value_index],
    }
    captured_id = pair.captured[session.value_index]
    ids.sessions.answered(ids.broker(step), step.number, captured_id, answer, is_final=True)
    return True


def _learn_produce(ids: IdMap, step: Step, pair: Pair) -> bool:
    """Offsets of batches, if both brokers took all of them."""
    if any(pair.codes) or any(pair.captured_codes):
        return False
    base_offsets: dict[Log, tuple[int, int, int]] = {}
    for field in pair.form.base_offsets:
        log = _log(ids, field, pair)
        if log is None or log in base_offsets:
            return False
        (base,) = field.leaves
        start = field.holder.get("log_start_offset")
        base_offsets[log] = (
            pair.captured[base.value_index],
            pair.answered[base.value_index],
            pair.answered[start.value_index] if isinstance(start, FormLeaf) else -1,
        )
    for log, (captured, answered, log_start) in base_offsets.items():
        expected = ids.offsets.expect(log, captured)
        if expected is not None:
            ids.expected[step.number, log] = expected
        ids.offsets.produced(log, captured, answered)
        ids.offsets.target_starts(log, log_start)
    return True
