"""What the fields of Kafka's messages hold, written by hand from Kafka's protocol documentation.

The sources are the protocol guide (https://kafka.apache.org/protocol), the descriptions of fields
in Kafka's message definitions, and the KIPs named below. No table of the product was used, so what
a table of the product lacks is missed here.

A heading names one or more APIs, and a side of theirs; an API may stand under several headings.
A line has a kind and the fields that hold it, as paths in the body of all versions. Lists are
transparent. Fields that are plain values (times, limits, texts, codes) are in no line. Only APIs
that clients send are listed: replay never sends those among brokers and controllers.

    topic, topic-id, partition, group, transactional-id, member, node, records
    producer-id, producer-epoch
    generation        of a classic group, or a member's epoch (KIP-848, KIP-932, KIP-1071)
    group-epoch       counts changes of a group or of its assignment
    leader-epoch      counts leaders of a partition (KIP-320)
    offset            of a record, or of a log's start or end
    session           id of a fetch session (KIP-227)
    coordinator-key   a group or a transactional id; `key_type` beside it or above says which
    config-resource   a topic, group or node; `resource_type` beside it says which
    acl-resource      a topic, group or transactional id; `resource_type` (`_filter`) says which
    token             what a broker made up: tokens (KIP-48), ids of telemetry (KIP-714)
    endpoint-epoch    of the endpoints of a streams group, as its coordinator counts (KIP-1071)
    subscription      bytes in the consumer protocol, with names of topics
    assignment        the same
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TEXT = """
Produce request
    transactional-id  transactional_id
    topic             topic_data.name
    topic-id          topic_data.topic_id
    partition         topic_data.partition_data.index
    records           topic_data.partition_data.records
Produce response
    topic             responses.name
    topic-id          responses.topic_id
    partition         responses.partition_responses.index
    offset            responses.partition_responses.base_offset
    offset            responses.partition_responses.log_start_offset
    node              responses.partition_responses.current_leader.leader_id node_endpoints.node_id
    leader-epoch      responses.partition_responses.current_leader.leader_epoch

Fetch request
    node              replica_id replica_state.replica_id
    topic             topics.topic forgotten_topics_data.topic
    topic-id          topics.topic_id forgotten_topics_data.topic_id
    partition         topics.partitions.partition forgotten_topics_data.partitions
    leader-epoch      topics.partitions.current_leader_epoch topics.partitions.last_fetched_epoch
    offset            topics.partitions.fetch_offset topics.partitions.log_start_offset
    offset            topics.partitions.high_watermark
Fetch response
    session           session_id
    topic             responses.topic
    topic-id          responses.topic_id
    partition         responses.partitions.partition_index
    offset            responses.partitions.high_watermark responses.partitions.last_stable_offset
    offset            responses.partitions.log_start_offset
    offset            responses.partitions.diverging_epoch.end_offset
    offset            responses.partitions.snapshot_id.end_offset
    offset            responses.partitions.aborted_transactions.first_offset
    leader-epoch      responses.partitions.diverging_epoch.epoch
    leader-epoch      responses.partitions.current_leader.leader_epoch
    leader-epoch      responses.partitions.snapshot_id.epoch
    node              responses.partitions.current_leader.leader_id
    node              responses.partitions.preferred_read_replica node_endpoints.node_id
    producer-id       responses.partitions.aborted_transactions.producer_id
    records           responses.partitions.records

ListOffsets request
    node              replica_id
    topic             topics.name
    partition         topics.partitions.partition_index
    leader-epoch      topics.partitions.current_leader_epoch
ListOffsets response
    topic             topics.name
    partition         topics.partitions.partition_index
    offset            topics.partitions.old_style_offsets topics.partitions.offset
    leader-epoch      topics.partitions.leader_epoch

Metadata request
    topic             topics.name
    topic-id          topics.topic_id
Metadata response
    node              brokers.node_id controller_id topics.partitions.leader_id
    node              topics.partitions.replica_nodes topics.partitions.isr_nodes
    node              topics.partitions.offline_replicas
    topic             topics.name
    topic-id          topics.topic_id
    partition         topics.partitions.partition_index
    leader-epoch      topics.partitions.leader_epoch

OffsetCommit request
    group             group_id
    generation        generation_id_or_member_epoch
    member            member_id
    topic             topics.name
    topic-id          topics.topic_id
    partition         topics.partitions.partition_index
    offset            topics.partitions.committed_offset
    leader-epoch      topics.partitions.committed_leader_epoch
OffsetCommit response
    topic             topics.name
    topic-id          topics.topic_id
    partition         topics.partitions.partition_index

OffsetFetch request
    group             group_id groups.group_id
    member            groups.member_id
    generation        groups.member_epoch
    topic             topics.name groups.topics.name
    topic-id          groups.topics.topic_id
    partition         topics.partition_indexes groups.topics.partition_indexes
OffsetFetch response
    group             groups.group_id
    topic             topics.name groups.topics.name
    topic-id          groups.topics.topic_id
    partition         topics.partitions.partition_index groups.topics.partitions.partition_index
    offset            topics.partitions.committed_offset groups.topics.partitions.committed_offset
    leader-epoch      topics.partitions.committed_leader_epoch
    leader-epoch      groups.topics.partitions.committed_leader_epoch

FindCoordinator request
    coordinator-key   key coordinator_keys
FindCoordinator response
    node              node_id coordinators.node_id
    coordinator-key   coordinators.key

JoinGroup request
    group             group_id
    member            member_id
    subscription      protocols.metadata
JoinGroup response
    generation        generation_id
    member            leader member_id members.member_id
    subscription      members.metadata

Heartbeat request
    group             group_id
    generation        generation_id
    member            member_id

LeaveGroup request
    group             group_id
    member            member_id members.member_id
LeaveGroup response
    member            members.member_id

SyncGroup request
    group             group_id
    generation        generation_id
    member            member_id assignments.member_id
    assignment        assignments.assignment
SyncGroup response
    assignment        assignment

DescribeGroups request
    group             groups
DescribeGroups response
    group             groups.group_id
    member            groups.members.member_id
    subscription      groups.members.member_metadata
    assignment        groups.members.member_assignment

ListGroups response
    group             groups.group_id

CreateTopics request
    topic             topics.name
    partition         topics.assignments.partition_index
    node              topics.assignments.broker_ids
CreateTopics response
    topic             topics.name
    topic-id          topics.topic_id

DeleteTopics request
    topic             topics.name topic_names
    topic-id          topics.topic_id
DeleteTopics response
    topic             responses.name
    topic-id          responses.topic_id

DeleteRecords request
    topic             topics.name
    partition         topics.partitions.partition_index
    offset            topics.partitions.offset
DeleteRecords response
    topic             topics.name
    partition         topics.partitions.partition_index
    offset            topics.partitions.low_watermark

InitProducerId request
    transactional-id  transactional_id
    producer-id       producer_id
    producer-epoch    producer_epoch
InitProducerId response
    producer-id       producer_id ongoing_txn_producer_id
    producer-epoch    producer_epoch ongoing_txn_producer_epoch

OffsetForLeaderEpoch request
    node              replica_id
    topic             topics.topic
    partition         topics.partitions.partition
    leader-epoch      topics.partitions.current_leader_epoch topics.partitions.leader_epoch
OffsetForLeaderEpoch response
    topic             topics.topic
    partition         topics.partitions.partition
    leader-epoch      topics.partitions.leader_epoch
    offset            topics.partitions.end_offset

AddPartitionsToTxn request
    transactional-id  transactions.transactional_id v3_and_below_transactional_id
    producer-id       transactions.producer_id v3_and_below_producer_id
    producer-epoch    transactions.producer_epoch v3_and_below_producer_epoch
    topic             transactions.topics.name v3_and_below_topics.name
    partition         transactions.topics.partitions v3_and_below_topics.partitions
AddPartitionsToTxn response
    transactional-id  results_by_transaction.transactional_id
    topic             results_by_transaction.topic_results.name results_by_topic_v3_and_below.name
    partition         results_by_transaction.topic_results.results_by_partition.partition_index
    partition         results_by_topic_v3_and_below.results_by_partition.partition_index

AddOffsetsToTxn request
    transactional-id  transactional_id
    producer-id       producer_id
    producer-epoch    producer_epoch
    group             group_id

EndTxn request
    transactional-id  transactional_id
    producer-id       producer_id
    producer-epoch    producer_epoch
EndTxn response
    producer-id       producer_id
    producer-epoch    producer_epoch

TxnOffsetCommit request
    transactional-id  transactional_id
    group             group_id
    producer-id       producer_id
    producer-epoch    producer_epoch
    generation        generation_id
    member            member_id
    topic             topics.name
    partition         topics.partitions.partition_index
    offset            topics.partitions.committed_offset
    leader-epoch      topics.partitions.committed_leader_epoch
TxnOffsetCommit response
    topic             topics.name
    partition         topics.partitions.partition_index

DescribeAcls request
    acl-resource      resource_name_filter
DescribeAcls response
    acl-resource      resources.resource_name

CreateAcls request
    acl-resource      creations.resource_name

DeleteAcls request
    acl-resource      filters.resource_name_filter
DeleteAcls response
    acl-resource      filter_results.matching_acls.resource_name

DescribeConfigs request
    config-resource   resources.resource_name
DescribeConfigs response
    config-resource   results.resource_name

AlterConfigs request
    config-resource   resources.resource_name
AlterConfigs response
    config-resource   responses.resource_name

AlterReplicaLogDirs request
    topic             dirs.topics.name
    partition         dirs.topics.partitions
AlterReplicaLogDirs response
    topic             results.topic_name
    partition         results.partitions.partition_index

DescribeLogDirs request
    topic             topics.topic
    partition         topics.partitions
DescribeLogDirs response
    topic             results.topics.name
    partition         results.topics.partitions.partition_index

CreatePartitions request
    topic             topics.name
    node              topics.assignments.broker_ids
CreatePartitions response
    topic             results.name

CreateDelegationToken response
    token             token_id hmac

RenewDelegationToken request
    token             hmac

ExpireDelegationToken request
    token             hmac

DescribeDelegationToken response
    token             tokens.token_id tokens.hmac

DeleteGroups request
    group             groups_names
DeleteGroups response
    group             results.group_id

ElectLeaders request
    topic             topic_partitions.topic
    partition         topic_partitions.partitions
ElectLeaders response
    topic             replica_election_results.topic
    partition         replica_election_results.partition_result.partition_id

IncrementalAlterConfigs request
    config-resource   resources.resource_name
IncrementalAlterConfigs response
    config-resource   responses.resource_name

AlterPartitionReassignments request
    topic             topics.name
    partition         topics.partitions.partition_index
    node              topics.partitions.replicas
AlterPartitionReassignments response
    topic             responses.name
    partition         responses.partitions.partition_index

ListPartitionReassignments request
    topic             topics.name
    partition         topics.partition_indexes
ListPartitionReassignments response
    topic             topics.name
    partition         topics.partitions.partition_index
    node              topics.partitions.replicas topics.partitions.adding_replicas
    node              topics.partitions.removing_replicas

OffsetDelete request
    group             group_id
    topic             topics.name
    partition         topics.partitions.partition_index
OffsetDelete response
    topic             topics.name
    partition         topics.partitions.partition_index

DescribeQuorum request
    topic             topics.topic_name
    partition         topics.partitions.partition_index
DescribeQuorum response
    topic             topics.topic_name
    partition         topics.partitions.partition_index
    node              topics.partitions.leader_id topics.partitions.current_voters.replica_id
    node              topics.partitions.observers.replica_id nodes.node_id
    leader-epoch      topics.partitions.leader_epoch

DescribeCluster response
    node              controller_id brokers.broker_id

DescribeProducers request
    topic             topics.name
    partition         topics.partition_indexes
DescribeProducers response
    topic             topics.name
    partition         topics.partitions.partition_index
    producer-id       topics.partitions.active_producers.producer_id
    producer-epoch    topics.partitions.active_producers.producer_epoch
    offset            topics.partitions.active_producers.current_txn_start_offset

UnregisterBroker request
    node              broker_id

DescribeTransactions request
    transactional-id  transactional_ids
DescribeTransactions response
    transactional-id  transaction_states.transactional_id
    producer-id       transaction_states.producer_id
    producer-epoch    transaction_states.producer_epoch
    topic             transaction_states.topics.topic
    partition         transaction_states.topics.partitions

ListTransactions request
    producer-id       producer_id_filters
ListTransactions response
    transactional-id  transaction_states.transactional_id
    producer-id       transaction_states.producer_id

ConsumerGroupHeartbeat ShareGroupHeartbeat request
    group             group_id
    member            member_id
    generation        member_epoch
    topic             subscribed_topic_names
ConsumerGroupHeartbeat request
    topic-id          topic_partitions.topic_id
    partition         topic_partitions.partitions
ConsumerGroupHeartbeat ShareGroupHeartbeat response
    member            member_id
    generation        member_epoch
    topic-id          assignment.topic_partitions.topic_id
    partition         assignment.topic_partitions.partitions

ConsumerGroupDescribe ShareGroupDescribe request
    group             group_ids
ConsumerGroupDescribe ShareGroupDescribe response
    group             groups.group_id
    group-epoch       groups.group_epoch groups.assignment_epoch
    member            groups.members.member_id
    generation        groups.members.member_epoch
    topic             groups.members.subscribed_topic_names
    topic             groups.members.assignment.topic_partitions.topic_name
    topic-id          groups.members.assignment.topic_partitions.topic_id
    partition         groups.members.assignment.topic_partitions.partitions
ConsumerGroupDescribe response
    topic-id          groups.members.target_assignment.topic_partitions.topic_id
    topic             groups.members.target_assignment.topic_partitions.topic_name
    partition         groups.members.target_assignment.topic_partitions.partitions

GetTelemetrySubscriptions request
    token             client_instance_id
GetTelemetrySubscriptions response
    token             client_instance_id subscription_id

PushTelemetry request
    token             client_instance_id subscription_id

ListConfigResources response
    config-resource   config_resources.resource_name

DescribeTopicPartitions request
    topic             topics.name cursor.topic_name
    partition         cursor.partition_index
DescribeTopicPartitions response
    topic             topics.name next_cursor.topic_name
    topic-id          topics.topic_id
    partition         topics.partitions.partition_index next_cursor.partition_index
    node              topics.partitions.leader_id topics.partitions.replica_nodes
    node              topics.partitions.isr_nodes topics.partitions.offline_replicas
    node              topics.partitions.eligible_leader_replicas topics.partitions.last_known_elr
    leader-epoch      topics.partitions.leader_epoch

ShareFetch request
    group             group_id
    member            member_id
    topic-id          topics.topic_id forgotten_topics_data.topic_id
    partition         topics.partitions.partition_index forgotten_topics_data.partitions
    offset            topics.partitions.acknowledgement_batches.first_offset
    offset            topics.partitions.acknowledgement_batches.last_offset
ShareFetch response
    topic-id          responses.topic_id
    partition         responses.partitions.partition_index
    node              responses.partitions.current_leader.leader_id node_endpoints.node_id
    leader-epoch      responses.partitions.current_leader.leader_epoch
    records           responses.partitions.records
    offset            responses.partitions.acquired_records.first_offset
    offset            responses.partitions.acquired_records.last_offset

ShareAcknowledge request
    group             group_id
    member            member_id
    topic-id          topics.topic_id
    partition         topics.partitions.partition_index
    offset            topics.partitions.acknowledgement_batches.first_offset
    offset            topics.partitions.acknowledgement_batches.last_offset
ShareAcknowledge response
    topic-id          responses.topic_id
    partition         responses.partitions.partition_index
    node              responses.partitions.current_leader.leader_id node_endpoints.node_id
    leader-epoch      responses.partitions.current_leader.leader_epoch

StreamsGroupHeartbeat request
    group             group_id
    member            member_id
    generation        member_epoch
    endpoint-epoch    endpoint_information_epoch
    topic             topology.subtopologies.source_topics
    topic             topology.subtopologies.state_changelog_topics.name
    topic             topology.subtopologies.repartition_sink_topics
    topic             topology.subtopologies.repartition_source_topics.name
    partition         active_tasks.partitions standby_tasks.partitions warmup_tasks.partitions
    partition         task_offsets.partition task_end_offsets.partition
StreamsGroupHeartbeat response
    member            member_id
    generation        member_epoch
    partition         active_tasks.partitions standby_tasks.partitions warmup_tasks.partitions
    partition         partitions_by_user_endpoint.active_partitions.partitions
    partition         partitions_by_user_endpoint.standby_partitions.partitions
    endpoint-epoch    endpoint_information_epoch
    topic             partitions_by_user_endpoint.active_partitions.topic
    topic             partitions_by_user_endpoint.standby_partitions.topic

StreamsGroupDescribe request
    group             group_ids
StreamsGroupDescribe response
    group             groups.group_id
    group-epoch       groups.group_epoch groups.assignment_epoch
    topic             groups.topology.subtopologies.source_topics
    topic             groups.topology.subtopologies.repartition_sink_topics
    topic             groups.topology.subtopologies.state_changelog_topics.name
    topic             groups.topology.subtopologies.repartition_source_topics.name
    member            groups.members.member_id
    generation        groups.members.member_epoch
    partition         groups.members.task_offsets.partition
    partition         groups.members.task_end_offsets.partition
    partition         groups.members.assignment.active_tasks.partitions
    partition         groups.members.assignment.standby_tasks.partitions
    partition         groups.members.assignment.warmup_tasks.partitions
    partition         groups.members.target_assignment.active_tasks.partitions
    partition         groups.members.target_assignment.standby_tasks.partitions
    partition         groups.members.target_assignment.warmup_tasks.partitions

DescribeShareGroupOffsets request
    group             groups.group_id
    topic             groups.topics.topic_name
    partition         groups.topics.partitions
DescribeShareGroupOffsets response
    group             groups.group_id
    topic             groups.topics.topic_name
    topic-id          groups.topics.topic_id
    partition         groups.topics.partitions.partition_index
    offset            groups.topics.partitions.start_offset
    leader-epoch      groups.topics.partitions.leader_epoch

AlterShareGroupOffsets request
    group             group_id
    topic             topics.topic_name
    partition         topics.partitions.partition_index
    offset            topics.partitions.start_offset
AlterShareGroupOffsets response
    topic             responses.topic_name
    topic-id          responses.topic_id
    partition         responses.partitions.partition_index

DeleteShareGroupOffsets request
    group             group_id
    topic             topics.topic_name
DeleteShareGroupOffsets response
    topic             responses.topic_name
    topic-id          responses.topic_id

ListGroups ApiVersions CreateDelegationToken DescribeDelegationToken request
DescribeClientQuotas AlterClientQuotas DescribeUserScramCredentials request
AlterUserScramCredentials UpdateFeatures DescribeCluster ListConfigResources request
Heartbeat ApiVersions AddOffsetsToTxn CreateAcls RenewDelegationToken response
ExpireDelegationToken DescribeClientQuotas AlterClientQuotas response
DescribeUserScramCredentials AlterUserScramCredentials UpdateFeatures UnregisterBroker response
PushTelemetry response
"""


def _parse(text: str) -> dict[tuple[str, str], dict[str, str]]:
    messages: dict[tuple[str, str], dict[str, str]] = {}
    headed: list[dict[str, str]] = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith(" "):
            kind, *paths = words
            for fields in headed:
                assert not fields.keys() & set(paths), line
                fields.update(dict.fromkeys(paths, kind))
        elif words:
            *api_names, side = words
            headed = [messages.setdefault((api_name, side), {}) for api_name in api_names]
    return messages


FIELDS = _parse(TEXT)
"""(API, side) -> path of a field -> kind."""


def holders(body: dict[str, Any], path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(struct, name of its field) of every value at a path; a version may lack it."""
    *outer, name = path.split(".")
    found: list[Any] = [body]
    for step in outer:
        found = [each.get(step) for each in found]
        found = [one for each in found for one in (each if isinstance(each, list) else [each])]
        found = [each for each in found if each is not None]
    return ((each, name) for each in found if name in each)
