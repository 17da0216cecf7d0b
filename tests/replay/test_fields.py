"""The table of fields: kinds as in a handwritten list, and mistakes in files of rules."""

from collections.abc import Iterator

import pytest

from kdissect.protocol import catalog
from kdissect.protocol.model import Field, Type
from kdissect.replay.fields import FieldKind, kind_of
from kdissect.replay.workload.messages import INTERNAL_APIS, TARGET_OWN_APIS
from tests.oracles.message_fields import FIELDS

KEYS = {api.name: key for key, api in catalog.apis().items()}
KINDS = {kind.value: kind for kind in FieldKind}
IDS = set(KINDS) - {"resource", "coordinator", "protocol", "opaque"}  # those depend on more
# Kafka's own marks of fields, where it has them.
ENTITIES = {
    "topicName": "topic", "groupId": "group", "brokerId": "node", "producerId": "producer-id",
    "transactionalId": "transactional-id",
}  # fmt: skip


def leaves(fields: tuple[Field, ...], path: str = "") -> Iterator[tuple[str, Field]]:
    """(path with [] behind the names of arrays of structs, field) of each value."""
    for field in fields:
        if field.type is Type.STRUCT:
            yield from leaves(field.fields, f"{path}{field.name}{'[]' * field.is_array}.")
        else:
            yield path + field.name, field


def test_every_api_that_is_replayed_is_in_the_list() -> None:
    """The list written by hand has both sides of each API that replay sends."""
    replayed = set(KEYS.values()) - INTERNAL_APIS - TARGET_OWN_APIS
    wanted = {(catalog.api(key).name, side) for key in replayed for side in ("request", "response")}
    assert set(FIELDS) == wanted


@pytest.mark.parametrize(("api_name", "side"), FIELDS)
def test_fields_have_the_kinds_of_the_list(api_name: str, side: str) -> None:
    """Kinds that the list has and the table has not depend on more than a field (`SPECIAL`)."""
    listed = FIELDS[api_name, side]
    fields = dict(leaves(catalog.api(KEYS[api_name]).side(side).fields))
    assert set(listed) <= {path.replace("[]", "") for path in fields}
    for path, field in fields.items():
        kind = listed.get(path.replace("[]", ""), "")
        assert kind_of(api_name, path, field) is (KINDS.get(kind) if kind in IDS else None), path
        assert kind == ENTITIES.get(field.entity, kind), path
