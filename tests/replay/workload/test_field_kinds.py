"""The kinds of fields are those of a handwritten list."""

from collections.abc import Iterator

import pytest

from kdissect.protocol import catalog
from kdissect.protocol.model import Field, Type
from kdissect.replay.workload.field_kinds import FieldKind, kind_of
from kdissect.replay.workload.messages import INTERNAL_APIS, TARGET_OWN_APIS
from tests.oracles.message_fields import FIELDS

KEYS = {api.name: key for key, api in catalog.apis().items()}
KINDS = {kind.name.lower().replace("_", "-"): kind for kind in FieldKind}
# Kafka's own marks of fields, where it has them.
ENTITIES = {
    "topicName": "topic", "groupId": "group", "brokerId": "node", "producerId": "producer-id",
    "transactionalId": "transactional-id",
}  # fmt: skip


def leaves(fields: tuple[Field, ...], path: str = "") -> Iterator[tuple[str, Field]]:
    for field in fields:
        if field.type is Type.STRUCT:
            yield from leaves(field.fields, f"{path}{field.name}.")
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
    assert set(listed) <= set(fields)
    for path, field in fields.items():
        kind = listed.get(path, "")
        assert kind_of(KEYS[api_name], field) is KINDS.get(kind), path
        assert kind == ENTITIES.get(field.entity, kind), path
