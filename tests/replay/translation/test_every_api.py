"""Every id in every message that clients exchange with brokers has its counterpart elsewhere.

For each version of each API an exchange is made whose fields hold ids as a list says that was
written by hand. It is replayed against a cluster with other ids, and with other names, behind
exchanges from which those can be learnt.
"""

from typing import Any
from uuid import UUID

import pytest

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.codec.record_encoder import encode_batch
from kdissect.protocol import catalog
from kdissect.protocol.model import Field, Type
from kdissect.replay.model import Exchange, Skipped, TopicFacts, TranslateOptions, Workload
from kdissect.replay.workload.messages import response_of
from tests.builders.workloads import exchange, workload
from tests.oracles.message_fields import FIELDS, holders
from tests.replay.other_cluster import OtherCluster, expected, replay

KEYS = {api.name: key for key, api in catalog.apis().items()}
SIDES = ("request", "response")
ORDERS, CLIENT = UUID(int=0x1234), UUID(int=0x5678)
BATCH = encode_batch(
    [{"offset": 120, "timestamp_ms": 5, "key": None, "value": b"v", "headers": []}],
    producer_id=7, producer_epoch=2, base_sequence=0,
)  # fmt: skip
IDS: dict[str, Any] = {
    "topic": "orders", "topic-id": ORDERS, "partition": 0, "group": "billing",
    "transactional-id": "tx", "member": "m-1", "node": 1, "records": BATCH, "producer-id": 7,
    "producer-epoch": 2, "generation": 5, "group-epoch": 5, "leader-epoch": 4, "offset": 120,
    "session": 9, "coordinator-key": "billing", "config-resource": "1", "acl-resource": "billing",
    "endpoint-epoch": 3, "subscription": b"\0\0\0\0\0\1\0\6orders\xff\xff\xff\xff",
    "assignment": b"\0\0\0\0\0\1\0\6orders\0\0\0\1\0\0\0\0\xff\xff\xff\xff",
}  # fmt: skip
TOKENS = {
    "token_id": "token", "hmac": b"secret", "client_instance_id": CLIENT, "subscription_id": 77,
}  # fmt: skip
GROUP, BROKER = 3, 4  # a type of ACL's resources, a type of configs' resources
# What else has to be there for a message to mean something.
PLAIN = {
    "error_code": 0, "protocol_type": "consumer",
    "key_type": 0, "timestamp": 5, "acks": -1, "session_epoch": -1, "share_session_epoch": 0,
    "group_instance_id": None, "instance_id": None, "type": 0, "group_type": "classic",
}  # fmt: skip
Renames = dict[tuple[str, str], str]
RENAMES: Renames = {
    ("topic", "orders"): "sales", ("group", "billing"): "debts", ("transactional-id", "tx"): "tx-2",
}  # fmt: skip


def filled(fields: Any, version: int, kinds: dict[str, str], path: str = "") -> dict[str, Any]:
    """A struct whose ids are those of IDS; every list has one element."""
    body = {}
    for field in fields:
        if version in field.versions:
            value = _filled(field, version, kinds, path + field.name)
            if value is not None:
                body[field.name] = value
    return body


def _filled(field: Field, version: int, kinds: dict[str, str], path: str) -> Any:
    if field.type is Type.STRUCT:
        value: Any = filled(field.fields, version, kinds, f"{path}.")
    elif path in kinds:
        value = TOKENS[field.name] if kinds[path] == "token" else IDS[kinds[path]]
    elif field.name.startswith("resource_type"):
        value = GROUP if "acl-resource" in kinds.values() else BROKER
    elif field.name in PLAIN:
        value = PLAIN[field.name]
    else:
        return None
    return [value] if field.is_array else value


def made(api_name: str, version: int, **asked: Any) -> tuple[Message, Message]:
    """A request and its response; `asked` has the request's further fields."""
    found = []
    for side in SIDES:
        fields = catalog.api(KEYS[api_name]).side(side).fields
        body = filled(fields, version, FIELDS[api_name, side])
        body.update(asked if side == "request" else {})
        header = {"client_id": "c"} if side == "request" else {}
        found.append(Message(KEYS[api_name], version, side, header, body))
    return found[0], found[1]


def earlier_messages() -> list[tuple[Message, Message]]:
    """From which a translation learns: topics, leaders, producers, offsets, members, tokens."""
    return [
        made("Metadata", 12),
        made("InitProducerId", 4, producer_id=-1, producer_epoch=-1),
        made("Produce", 9),
        made("Fetch", 13),
        made("JoinGroup", 9, member_id=""),
        made("GetTelemetrySubscriptions", 0, client_instance_id=UUID(int=0)),
        made("CreateDelegationToken", 3),
        made("StreamsGroupHeartbeat", 0, endpoint_information_epoch=-1),
    ]


def as_workload(pairs: list[tuple[Message, Message]]) -> Workload:
    exchanges: list[Exchange] = []
    for at, (request, response) in enumerate(pairs):
        exchanges.append(exchange(0, request, 10 * at, 10 * at + 5, response))
    found = workload(exchanges)
    found.facts.brokers = {1: ("b", 9092), 2: ("b", 9093)}
    found.facts.topics = {"orders": TopicFacts("orders", [str(ORDERS)], 1)}
    return found


def by_old(renames: Renames) -> dict[str, str]:
    return {old: new for (_, old), new in renames.items()}


def versions(api_name: str) -> range:
    first, last = catalog.api(KEYS[api_name]).request.versions
    return range(first, last + 1)


NEVER_SENT = {"UnregisterBroker"}  # of a node of the capture
APIS = sorted({api_name for api_name, _ in FIELDS} - NEVER_SENT)


@pytest.mark.parametrize(
    "renames",
    [
        pytest.param(RENAMES, id="renamed"),
        pytest.param({}, id="same names", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.parametrize("api_name", APIS)
def test_ids_reach_another_cluster(api_name: str, renames: Renames) -> None:
    """A request gets the other cluster's IDs, and its response counts as the same."""
    earlier = earlier_messages()
    some = versions(api_name)
    found = as_workload([*earlier, *(made(api_name, version) for version in some)])
    cluster = OtherCluster(found, 1000, renames=by_old(renames))
    done = replay(found, cluster, options=TranslateOptions(renames=renames))
    assert done.unready == []
    for number, version in enumerate(some, len(earlier)):
        step = done.plan.steps[number]
        sent = done.sent[number]
        assert not isinstance(sent, Skipped), (version, sent)
        wanted = expected(cluster, step.exchange)
        assert wanted is not None
        bodies = [decode_message(each, side="request").body for each in (sent, wanted)]
        assert bodies[0] == bodies[1], version
        judge, captured = done.judge, response_of(step.exchange)
        assert judge is not None
        assert captured is not None
        differences = judge.differences(step, captured, cluster.moved(captured))
        assert all(each.rule for each in differences), (version, differences)


@pytest.mark.parametrize(("api_name", "side"), FIELDS)
def test_messages_have_every_field_of_the_list(api_name: str, side: str) -> None:
    """In one version at least, and the other cluster calls its value otherwise."""
    renames = by_old(RENAMES)
    pairs_of_messages = {version: made(api_name, version) for version in versions(api_name)}
    found = as_workload([*earlier_messages(), *pairs_of_messages.values()])
    cluster = OtherCluster(found, 1000, renames=renames)
    moved = set()
    for version, messages in pairs_of_messages.items():
        frame = encode_message(messages[SIDES.index(side)])
        how: Any = {"side": side, "api_key": KEYS[api_name], "api_version": version}
        was, now = decode_message(frame, **how), cluster.moved(decode_message(frame, **how))
        for path, kind in FIELDS[api_name, side].items():
            pairs = zip(holders(was.body, path), holders(now.body, path), strict=True)
            if any(kind == "partition" or a[name] != b[name] for (a, name), (b, _) in pairs):
                moved.add(path)
    assert moved == set(FIELDS[api_name, side])
