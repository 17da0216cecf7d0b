"""The inventory of clients, against the requests that the brokers logged."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.truth import definitions, request_log
from tests.truth.material import JSON_LOGGED, each
from tests.truth.request_log import Entry

PRODUCE, FETCH, API_VERSIONS = 0, 1, 18
MEMBERS = (8, 11, 12, 13, 14, 28, 68, 76, 78, 79, 88)  # APIs of members of groups
FIRST_WITH_IDS = 13  # version of Produce and of Fetch that has topic ids (KIP-516)
every_capture = each("capture", JSON_LOGGED, repeated={"cluster/cluster"})
# Brokers log neither an Envelope nor a login, nor requests that they refuse: the odd client's.
UNLOGGED = {"ENVELOPE", "SASLHANDSHAKE", "SASLAUTHENTICATE", "APIVERSIONS"}
Clients = dict[tuple[str, str], dict[str, set[str]]]


def _values(entry: Entry, entity: str) -> Iterator[str]:
    """Names of topics or groups in a logged request."""
    layout = definitions.layout(entry.key[4], "Request", entry.key[5])
    for inner, struct in definitions.structs(layout, entry.request):
        for member in inner.fields:
            if member.entity == entity and struct.get(member.log_name):
                yield struct[member.log_name]


def _logged(capture: Any) -> Clients:
    """Address and client id -> column of the inventory -> values."""
    clients: Clients = defaultdict(lambda: defaultdict(set))
    for entry in request_log.load(capture.request_log_path):
        api_key, api_version = entry.key[4:]
        if entry.is_forwarded or not definitions.has_version(api_key, api_version):
            continue
        client = clients[entry.key[0], entry.client_id]
        client["api_versions"].add(f"{entry.api_name.replace('_', '')} V{api_version}")
        if entry.principal != "User:ANONYMOUS":
            client["principals"].add(entry.principal)
        if api_key == API_VERSIONS and "clientSoftwareName" in entry.request:
            words = (entry.request["clientSoftwareName"], entry.request["clientSoftwareVersion"])
            if any(words):
                client["software"].add(" ".join(words))
        if api_key in (PRODUCE, FETCH) and api_version < FIRST_WITH_IDS:
            column = "topics_written" if api_key == PRODUCE else "topics_read"
            client[column].update(_values(entry, "topicName"))
        if api_key in MEMBERS:
            client["groups"].update(_values(entry, "groupId"))
    return clients


@every_capture
def test_the_inventory_has_what_brokers_logged(capture: Any) -> None:
    """Each logged client is there, with its software, user, API versions, topics and groups."""
    found: Clients = defaultdict(lambda: defaultdict(set))
    for row in capture.tables.inventory().to_pylist():
        client = found[row["client_ip"], row["client_id"] or ""]
        for column in ("software", "principals", "topics_written", "topics_read", "groups"):
            client[column].update(row[column] or ())
        client["api_versions"].update(text.upper() for text in row["api_versions"] or ())
    logged = _logged(capture)
    assert logged.keys() <= found.keys()
    for key, client in logged.items():
        for column, values in client.items():
            if column == "principals":
                assert found[key][column] <= values, (key, column)
            else:
                assert values <= found[key][column], (key, column)
        unlogged = found[key]["api_versions"] - client["api_versions"]
        apis = {text.split()[0] for text in unlogged}
        assert apis <= UNLOGGED or key[1] == "odd-client", (key, apis)
        assert found[key]["software"] == client["software"], key
        assert found[key]["groups"] == client["groups"], key
