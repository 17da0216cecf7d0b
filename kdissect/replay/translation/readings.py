"""What the frames of one form mean, found once: where ids, names, offsets and error codes lie.

A `Reading` is `field_kinds.spots` over a form instead of over a message: places of values instead
of values. With the values of a frame it gives the same spots, without lists and dicts being made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from kdissect.codec.message import Message
from kdissect.codec.message_codec import Slot
from kdissect.codec.message_forms import FORMS_MAX, Form, FormLeaf, Ref, form_of
from kdissect.replay.model import Exchange
from kdissect.replay.workload.field_kinds import Around, FieldKind, Spot, spots
from kdissect.replay.workload.messages import entries, request_of


class Place(NamedTuple):
    """A spot of a form: leaves of its value, or of the elements of its list.

    holder: the plain fields of the struct around, each a leaf or a value; around: as a tuple.
    """

    kind: FieldKind
    slot: Slot
    leaves: tuple[FormLeaf, ...]
    is_list: bool
    holder: dict[str, Any]
    around: tuple[Any, ...]

    def around_of(self, values: list[Any]) -> Around:
        """What the structs around say in a frame with these values."""
        return Around(*[values[it.place] if type(it) is FormLeaf else it for it in self.around])

    def spot(self, values: list[Any]) -> Spot:
        """The spot in a frame with these values; its holder has plain fields only."""
        holder = {
            name: values[it.place] if type(it) is FormLeaf else it
            for name, it in self.holder.items()
        }
        if self.is_list:
            holder[self.slot.name] = [values[leaf.place] for leaf in self.leaves]
        return Spot(self.kind, self.slot, holder, self.around_of(values))


class Reading:
    """The meaning of a form.

    body: as of the form, with a `FormLeaf` for each value of the top struct.

    places: in wire order. codes: the leaves of all error codes; records, base_offsets: of those
    fields.
    """

    __slots__ = ("base_offsets", "body", "codes", "form", "places", "records")

    def __init__(self, form: Form) -> None:
        self.form = form
        message: Message = object.__new__(Message)
        message.api_key, message.api_version, message.side = (
            form.api_key, form.api_version, form.side,
        )  # fmt: skip
        message.header, message.body, message.surplus = form.header, form.body, b""
        self.places = tuple(_place(spot) for spot in spots(message))
        self.codes = tuple(_codes(form.body))
        self.body = _plain(form.body)
        self.records = self.of({FieldKind.RECORDS})
        self.base_offsets = tuple(
            place for place in self.of({FieldKind.OFFSET}) if place.slot.name == "base_offset"
        )

    def of(self, kinds: Collection[FieldKind]) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.kind in kinds)


def _place(spot: Spot) -> Place:
    value = spot.holder[spot.slot.name]
    leaves = tuple(it.leaf for it in entries(value) or [value] if isinstance(it, Ref))
    around = tuple(it.leaf if isinstance(it, Ref) else it for it in spot.around)
    holder = {
        name: value
        for name, value in _plain(spot.holder).items()
        if not isinstance(value, (list, dict))
    }
    return Place(spot.kind, spot.slot, leaves, isinstance(value, list), holder, around)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: it.leaf if isinstance(it, Ref) else it for name, it in values.items()}


def _codes(value: Any) -> Iterator[FormLeaf]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, Ref):
                if name.endswith("error_code"):
                    yield inner.leaf
            else:
                yield from _codes(inner)
    elif isinstance(value, list):
        for each in value:
            yield from _codes(each)


reading_of = lru_cache(FORMS_MAX)(Reading)


def spots_of(exchange: Exchange, kinds: Collection[FieldKind]) -> Iterator[Spot]:
    """The spots of some kinds in a captured request, in wire order; of `Spot.holder` only its plain
    fields. None where the request cannot be decoded."""
    form = None
    if exchange.request is not None:
        form = form_of(exchange.request, "request", exchange.api_key, exchange.api_version)
    if form is not None:
        assert exchange.request is not None
        values = None
        for place in reading_of(form).places:
            if place.kind in kinds:
                if values is None:
                    values = form.values(exchange.request)
                yield place.spot(values)
        return
    request = request_of(exchange)
    if request is not None:
        yield from (spot for spot in spots(request) if spot.kind in kinds)
