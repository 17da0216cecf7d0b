"""Records of Kafka's internal topics agree with the requests that caused them."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from tests.truth import request_log
from tests.truth.material import Capture
from tests.truth.rows import Row

CLUSTER = Capture("cluster/cluster")  # three nodes: whatever one writes, the others fetch
OFFSET_COMMIT, TXN_OFFSET_COMMIT, INIT_PRODUCER_ID, JOIN_GROUP = 8, 28, 22, 11
BROKER_REGISTRATION, METADATA, WRITE_SHARE_GROUP_STATE = 62, 3, 85
LISTENER = itemgetter("name", "host", "port", "security_protocol")
LOGGED_LISTENER = itemgetter("name", "host", "port", "securityProtocol")
FEATURE = itemgetter("name", "min_supported_version", "max_supported_version")
LOGGED_FEATURE = itemgetter("name", "minSupportedVersion", "maxSupportedVersion")


def _logged(*api_keys: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Requests and responses of some APIs."""
    for entry in request_log.load(CLUSTER.request_log_path):
        if entry.key[4] in api_keys:
            yield entry.request, entry.response


def _values(name: str) -> list[tuple[Row, Row]]:
    """Keys and values of the records with that name that are no tombstones."""
    rows = CLUSTER.rows(f"internal/{name}")
    found = [(row.get("key"), row["value"]) for row in rows if row["value"] is not None]
    assert found, name
    return found


def test_offset_commits_are_those_that_clients_asked_for(say: Callable[[str], None]) -> None:
    """Group, topic, partition, offset, epoch and metadata of each, and each that was accepted."""
    asked, accepted = set(), set()
    for request, response in _logged(OFFSET_COMMIT, TXN_OFFSET_COMMIT):
        for topic, answer in zip(request["topics"], response["topics"], strict=True):
            for part, outcome in zip(topic["partitions"], answer["partitions"], strict=True):
                commit = (
                    *(request["groupId"], topic["name"], part["partitionIndex"]),
                    *(part["committedOffset"], part["committedLeaderEpoch"]),
                    part["committedMetadata"],
                )
                asked.add(commit)
                if outcome["errorCode"] == 0:
                    accepted.add(commit)
    found = {
        (
            *(key["group"], key["topic"], key["partition"]),
            *(value["offset"], value["leader_epoch"], value["metadata"]),
        )
        for key, value in _values("OffsetCommit")
    }
    clients = {commit[0] for commit in asked}
    assert {commit for commit in found if commit[0] in clients} <= asked
    assert accepted <= found, accepted - found
    say(f"{CLUSTER}: {len(accepted)} accepted offset commits are in __consumer_offsets")


def test_topics_are_those_of_metadata() -> None:
    """Metadata records have all topics and partitions of logged Metadata responses."""
    names = {
        topic["topicId"]: topic["name"]
        for _, response in _logged(METADATA)
        for topic in response["topics"]
        if topic["errorCode"] == 0
    }
    records = {value["topic_id"]: value["name"] for _, value in _values("TopicRecord")}
    assert names.items() <= records.items()
    places = {(value["topic_id"], value["partition_id"]) for _, value in _values("PartitionRecord")}
    assert places >= {
        (topic["topicId"], part["partitionIndex"])
        for _, response in _logged(METADATA)
        for topic in response["topics"]
        for part in topic["partitions"]
        if topic["errorCode"] == 0
    }


def test_broker_registrations_are_those_that_brokers_sent() -> None:
    """Incarnation, rack, listeners and features of each node, each time that it started."""
    sent = {
        (
            *(request["brokerId"], request["incarnationId"], request["rack"]),
            tuple(map(LOGGED_LISTENER, request["listeners"])),
            frozenset(map(LOGGED_FEATURE, request["features"])),
            response["brokerEpoch"],
        )
        for request, response in _logged(BROKER_REGISTRATION)
        if response["errorCode"] == 0
    }
    found = {
        (
            *(value["broker_id"], value["incarnation_id"], value["rack"]),
            tuple(map(LISTENER, value["end_points"])),
            frozenset(map(FEATURE, value["features"])),
            value["broker_epoch"],
        )
        for _, value in _values("RegisterBrokerRecord")
    }
    assert found == sent


def test_producers_of_transactions_have_their_logged_ids() -> None:
    """The transaction log's records have the producer IDs of logged InitProducerId responses."""
    given = {
        (request["transactionalId"], response["producerId"])
        for request, response in _logged(INIT_PRODUCER_ID)
        if response["errorCode"] == 0 and request["transactionalId"] is not None
    }
    found = {
        (key["transactional_id"], value["producer_id"]) for key, value in _values("TransactionLog")
    }
    assert given <= found
    assert {name for name, _ in found} == {name for name, _ in given}


def test_members_of_classic_groups_are_those_that_joined() -> None:
    """Each member of each generation got the id, and the generation, as an answer to a join."""
    joined = {
        (request["groupId"], response["generationId"], response["memberId"])
        for request, response in _logged(JOIN_GROUP)
        if response["errorCode"] == 0
    }
    found = {
        (key["group"], value["generation"], member["member_id"])
        for key, value in _values("GroupMetadata")
        for member in value["members"]
    }
    assert found
    assert found == joined


def test_states_of_share_groups_are_those_that_were_written(say: Callable[[str], None]) -> None:
    """Each offset with its state and count, by group, topic id and partition (the coordinator
    joins and splits batches of neighbours)."""
    written = {
        (request["groupId"], topic["topicId"], part["partition"], offset, *state)
        for request, _ in _logged(WRITE_SHARE_GROUP_STATE)
        for topic in request["topics"]
        for part in topic["partitions"]
        for batch in part["stateBatches"]
        for state in [(batch["deliveryState"], batch["deliveryCount"])]
        for offset in range(batch["firstOffset"], batch["lastOffset"] + 1)
    }
    found = {
        (key["group_id"], key["topic_id"], key["partition"], offset, *state)
        for key, value in _values("ShareUpdate")
        for batch in value["state_batches"]
        for state in [(batch["delivery_state"], batch["delivery_count"])]
        for offset in range(batch["first_offset"], batch["last_offset"] + 1)
    }
    assert found == written, sorted(found ^ written)[:5]
    say(f"{CLUSTER}: {len(found)} states of share groups are in __share_group_state")
