"""Verdicts on clients, from transcripts and offered versions in handmade tables."""

from collections import defaultdict
from typing import Any

import pytest

from kdissect.protocol.releases import spoken_versions
from tests.builders.tables import Row, connection, exchange, tables

JAVA = "apache-kafka-java"


class Scene:
    """Connections and their requests; `rows` are those of the dissected capture."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = defaultdict(list)

    def connect(
        self,
        *said: tuple[int, int],
        client_id: str | None = "app",
        offers: dict[int, tuple[int, int]] | None = None,
        software: tuple[str | None, str | None] = (None, None),
        whole: bool = True,
        asks_with: int = 3,
        protocol_type: str | None = None,
        group_id: str | None = None,
        **more: Any,
    ) -> None:
        """A connection with requests of (api key, version), `offers` as its first answer."""
        place = {"connection_id": len(self.rows["connections"]) + 1, "client_id": client_id}
        row = connection(place["connection_id"], handshake_seen=whole)
        row["client_software_name"], row["client_software_version"] = software
        row["client_ids"] = [client_id] if client_id else []
        self.rows["connections"].append(row | more)
        hello = [(18, asks_with)] if offers is not None else []
        for number, (api_key, version) in enumerate([*hello, *said]):
            exchange_id = len(self.rows["exchanges"]) + 1
            api = {"api_key": api_key, "api_version": version, "group_id": group_id}
            sure = {"version_source": "request_header", "version_confidence": 1.0}
            made = exchange(exchange_id, second=exchange_id, **place, **api, **sure)
            self.rows["exchanges"].append(made | {"request_pos": number * 100})
            if api_key == 11 and protocol_type is not None:
                join = {"exchange_id": exchange_id, "request": {"protocol_type": protocol_type}}
                self.rows["apis__JoinGroup"].append(join)
            if api_key == 18 and offers is not None:
                keys = [
                    {"api_key": key, "min_version": first, "max_version": last}
                    for key, (first, last) in offers.items()
                ]
                ids = {"exchange_id": exchange_id, "connection_id": place["connection_id"]}
                answer = {"response": {"error_code": 0, "api_keys": keys}}
                self.rows["apis__ApiVersions"].append(ids | answer)

    def assess(self, target: str = "4.0") -> Row:
        return tables(**self.rows).readiness(target)

    def verdicts(self, target: str = "4.0") -> dict[str | None, str]:
        return {each["client_id"]: each["verdict"] for each in self.assess(target)["clients"]}


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_higher_version_was_offered(scene: Scene) -> None:
    """The broker offered Produce 0 to 11 and the client took 2: it breaks."""
    scene.connect((0, 2), offers={0: (0, 11)})
    document = scene.assess()
    assert (document["release"], document["verdict"]) == ("4.0.2", "breaks")
    (client,) = document["clients"]
    (finding,) = client["findings"]
    assert (finding["api_name"], finding["api_version"]) == ("Produce", 2)
    assert (finding["taken"], finding["offered"]) == ([3, 12], [0, 11])
    assert finding["first_exchange_id"] == "2"
    assert "Produce 3 (kafka-clients 2.1 or newer)" in client["upgrade"]
    assert scene.verdicts("3.9") == {"app": "ok"}


@pytest.mark.parametrize(
    ("software", "offered", "verdict"),
    [
        ((None, None), 2, "unknown"),
        ((JAVA, "2.4.0"), 2, "ok"),
        ((JAVA, "4.3.1"), 2, "ok"),
        ((JAVA, "1.1.1"), 2, "ok"),
        ((JAVA, "7.5.1-ccs"), 2, "ok"),
        ((JAVA, "unknown"), 2, "unknown"),
        (("librdkafka", "2.3.0"), 2, "ok"),
        (("confluent-kafka-python", "1.9.0-librdkafka-1.9.0"), 2, "ok"),
        (("confluent-kafka-python", "2.16.1-rdkafka-2.16.0"), 2, "ok"),
        (("librdkafka", "1.5.0"), 2, "unknown"),
        (("node-rdkafka", "v2.9.1-librdkafka-v1.4.2"), 2, "unknown"),
        (("kgo", "v1.2.3"), 2, "unknown"),
        ((JAVA, "3.9.0"), 11, "breaks"),  # it could do better, and did not
    ],
)
def test_software_that_is_known(
    scene: Scene, software: tuple[str, str], offered: int, verdict: str
) -> None:
    """At the highest version of an old broker the client's own release decides."""
    scene.connect((0, 2), offers={0: (0, offered)}, software=software)
    assert scene.verdicts() == {"app": verdict}


@pytest.mark.parametrize(
    ("api_key", "how", "why"),
    [
        # a Java client 1.1 speaks DescribeAcls 0 only
        (29, {"offers": {29: (0, 0)}, "software": (JAVA, "1.1.1")}, "speaks none that the target"),
        (0, {}, "never asks"),  # without ApiVersions, seen from its first packet
    ],
)
def test_software_that_has_one_version(
    scene: Scene, api_key: int, how: dict[str, Any], why: str
) -> None:
    """The client breaks, and the finding says why."""
    scene.connect((api_key, 0), **how)
    (client,) = scene.assess()["clients"]
    assert client["verdict"] == "breaks"
    assert why in client["findings"][0]["why"]


def test_a_connection_from_the_middle(scene: Scene) -> None:
    """An ApiVersions before the capture is unknown; another connection may have one."""
    scene.connect((0, 2), whole=False)
    assert scene.verdicts() == {"app": "unknown"}
    scene.connect((0, 9), client_id="other", offers={0: (0, 11), 3: (0, 12)})
    assert scene.verdicts() == {"app": "breaks", "other": "ok"}


def test_a_connection_with_a_gap(scene: Scene) -> None:
    """Only a gap at the start of a connection can hide its ApiVersions."""
    scene.connect((0, 2), (0, 2))
    del scene.rows["exchanges"][1]
    assert scene.verdicts() == {"app": "breaks"}
    scene.connect((0, 2), (0, 2), client_id="begun")
    del scene.rows["exchanges"][1]
    assert scene.verdicts() == {"app": "breaks", "begun": "unknown"}


def test_names_from_other_connections(scene: Scene) -> None:
    """A connection from the middle is of the client that says hello on another."""
    scene.connect((0, 2), whole=False)
    scene.connect(
        (3, 9), offers={0: (0, 2), 3: (0, 9)}, software=(JAVA, "3.0.0"), principal="User:a"
    )
    (client,) = scene.assess()["clients"]
    assert client["software_name"] == JAVA
    assert client["principal"] == "User:a"
    assert client["connection_count"] == 2
    assert client["verdict"] == "ok"


@pytest.mark.parametrize(
    ("how", "verdict", "upgrade"),
    [
        ({"offers": {0: (3, 13), 1: (4, 18)}}, "ok", None),
        ({}, "breaks", "let it ask which versions a broker offers, or limit it to Produce 8, "
         "Fetch 11"),
        ({"whole": False}, "unknown", "let it ask which versions a broker offers, or limit it to "
         "Produce 8, Fetch 11"),
    ],
    ids=["negotiates", "never asks", "begun before the capture"],
)  # fmt: skip
def test_versions_above_the_target_s(
    scene: Scene, how: dict[str, Any], verdict: str, upgrade: str | None
) -> None:
    """Clients that ask which versions a broker offers come down by themselves; others do not."""
    scene.connect((0, 13), (1, 18), **how)
    (client,) = scene.assess("2.4")["clients"]
    assert (client["verdict"], client["upgrade"]) == (verdict, upgrade)


def test_apis_that_the_target_lacks(scene: Scene) -> None:
    """A missing group protocol breaks a client; missing telemetry or admin APIs do not."""
    scene.connect((68, 1), (1, 13), (8, 9), (9, 9), client_id="consumer", offers={})
    scene.connect((71, 0), (72, 0), (60, 1), (75, 0), (69, 0), client_id="admin", offers={})
    scene.connect((999, 0), (0, 9), client_id="strange", offers={})
    document = scene.assess("3.6")
    assert scene.verdicts("3.6") == {"consumer": "breaks", "admin": "ok", "strange": "ok"}
    assert document["clients"][0]["findings"][0]["why"] == "brokers have it from 3.7 on"
    assert document["clients"][0]["upgrade"] == "do without ConsumerGroupHeartbeat on 3.6"


def test_clients_of_one_id_are_separate_by_software_and_principal(scene: Scene) -> None:
    """Clients of one ID are separate by software and by principal."""
    scene.connect((0, 9), offers={0: (0, 9)}, software=(JAVA, "2.8.0"), principal="User:a")
    scene.connect((0, 9), offers={0: (0, 9)}, software=(JAVA, "2.8.0"), principal="User:b")
    scene.connect((0, 2), offers={0: (0, 9)}, software=("old", "1"), principal="User:b")
    clients = scene.assess()["clients"]
    expected = [("User:b", "breaks"), ("User:a", "ok"), ("User:b", "ok")]
    assert [(each["principal"], each["verdict"]) for each in clients] == expected


def test_brokers_do_not_count(scene: Scene) -> None:
    """By their requests, by the names that servers use, and by the same caller's other calls."""
    scene.connect((4, 1), client_id="1")
    scene.connect((19, 1), client_id="1", offers={19: (0, 1)}, software=(JAVA, "1.1.0"))
    scene.connect((1, 3), client_id="broker-1-fetcher-0", offers={1: (0, 3)})
    scene.connect((27, 0), client_id="marker", offers={})
    scene.connect(client_id="marker", offers={})
    document = scene.assess()
    assert document["clients"] == []
    assert document["verdict"] == "unknown"
    named = {each["client_id"]: each for each in document["internal"]}
    assert set(named) == {"1", "broker-1-fetcher-0", "marker"}
    expected = ["LeaderAndIsr", "CreateTopics"]
    assert [each["api_name"] for each in named["1"]["not_taken"]] == expected


def test_one_broker_request_hides_no_client(scene: Scene) -> None:
    """A broker's request hides neither the caller's other connections nor other software."""
    scene.connect((4, 1), client_id="app", offers={})
    scene.connect((0, 2), client_id="app", offers={0: (0, 9)})
    scene.connect((4, 1), client_id="kgo", offers={}, software=("kgo", "1"))
    assert scene.verdicts()["app"] == "breaks"
    assert scene.verdicts()["kgo"] == "breaks"


def test_unsure_versions_do_not_count(scene: Scene) -> None:
    """A version that was guessed is neither a finding nor evidence."""
    scene.connect((0, 2), offers={0: (0, 9)})
    scene.rows["exchanges"][1] |= {"version_source": "inferred", "version_confidence": 0.5}
    document = scene.assess()
    (client,) = document["clients"]
    assert (client["verdict"], client["findings"]) == ("unknown", [])
    assert [each["api_name"] for each in client["never_seen"]] == ["Produce"]
    assert document["unseen"]["undetermined_exchange_count"] == 1


def test_tls_without_its_secrets(scene: Scene) -> None:
    """What cannot be seen is said, and leaves the whole open. A refused handshake hides nothing."""
    scene.connect((0, 9), offers={0: (0, 9)})
    hidden = {"connection_id": 99, "client_ip": "10.0.0.2", "is_kafka": False, "is_tls": True}
    refused = {"connection_id": 98, "response_segment_count": 1, "response_missing_byte_count": 0}
    scene.rows["connections"].append(hidden | refused)
    assert scene.assess()["verdict"] == "ok"
    scene.rows["connections"].append(hidden | {"tls_cipher": "TLS_AES_128_GCM_SHA256"})
    document = scene.assess()
    assert document["unseen"]["tls_addresses"] == ["10.0.0.2"]
    assert (document["verdict"], document["counts"]["ok"]) == ("unknown", 1)


def test_message_formats_go_with_versions_of_produce(scene: Scene) -> None:
    """Formats 0 and 1 go with the Produce versions that carry them."""
    scene.connect((0, 2), offers={0: (0, 9)})
    batch = {"exchange_id": 2, "source": "produce", "magic": 1, "record_count": 5}
    scene.rows["record_batches"] += [batch, batch]
    wanted = {"magic": 1, "batch_count": 2, "record_count": 10}
    for target, is_taken in (("4.0", False), ("3.9", True)):
        (client,) = scene.assess(target)["clients"]
        assert client["formats"] == [{**wanted, "is_taken": is_taken}]


def test_a_capture_without_kafka_has_no_clients(scene: Scene) -> None:
    """A capture without Kafka."""
    document = scene.assess()
    assert document["clients"] == []
    assert document["counts"] == {"breaks": 0, "unknown": 0, "ok": 0}
    assert document["verdict"] == "unknown"


OFFERED_BY_4_3 = {key: (each.first, each.last) for key, each in spoken_versions("4.3.1").items()}
# What kafka-clients 0.10.2.2 sends to a 4.3.1 broker, which takes none of its Fetch versions.
OLD_MEMBER = ((3, 2), (10, 0), (11, 1), (14, 0), (12, 0), (9, 2), (8, 2))


def test_a_consumer_that_never_fetches(scene: Scene) -> None:
    """It joins and commits; its broker offers no Fetch version that it speaks."""
    scene.connect(*OLD_MEMBER, offers=OFFERED_BY_4_3, asks_with=0)
    document = scene.assess()
    (client,) = document["clients"]
    assert (document["verdict"], client["verdict"], client["findings"]) == ("unknown",) * 2 + ([],)
    (missing,) = client["never_seen"]
    assert (missing["api_name"], missing["taken"]) == ("Fetch", [4, 17])
    assert missing["role"] == "consumer in a group"
    assert missing["why"].endswith("the Java clients 0.10.2 behave so, and would break")
    assert document["established_request_count"] == 0
    assert scene.verdicts("3.9") == {"app": "ok"}
    scene.connect((1, 12), offers=OFFERED_BY_4_3)
    assert scene.verdicts() == {"app": "ok"}


@pytest.mark.parametrize(
    ("said", "unseen"),
    [
        ([(22, 1)], ["Produce"]),
        ([(0, 9)], []),
        ([(24, 0), (26, 1)], ["Produce"]),
        ([(1, 4)], []),
        ([(2, 1)], ["Fetch"]),
        ([(2, 1), (16, 0)], []),
        ([(11, 2)], ["Fetch", "OffsetCommit", "OffsetFetch"]),
        ([(12, 0), (1, 4)], ["OffsetCommit", "OffsetFetch"]),
        ([(68, 1), (8, 9)], ["Fetch", "OffsetFetch"]),
        ([(19, 3)], []),
        ([(13, 0)], ["Produce", "Fetch", "OffsetCommit", "OffsetFetch"]),
        ([(3, 9)], ["Produce", "Fetch", "OffsetCommit", "OffsetFetch"]),
    ],
    ids=lambda value: "-".join(map(str, value)) or "none",
)
def test_apis_that_a_role_needs(
    scene: Scene, said: list[tuple[int, int]], unseen: list[str]
) -> None:
    """Without them nothing is established; where the software is known, it decides."""
    scene.connect(*said, offers={})
    scene.connect(*said, client_id="java", offers={}, software=(JAVA, "3.9.0"))
    clients = {each["client_id"]: each for each in scene.assess()["clients"]}
    assert [each["api_name"] for each in clients["app"]["never_seen"]] == unseen
    assert clients["app"]["verdict"] == ("unknown" if unseen else "ok")
    assert [each["api_name"] for each in clients["java"]["never_seen"]] == unseen
    assert clients["java"]["verdict"] == "ok"


def test_members_that_are_no_consumers(scene: Scene) -> None:
    """A worker of Connect joins a group and fetches nothing in its name."""
    scene.connect((11, 2), (12, 0), offers={}, protocol_type="connect")
    assert scene.verdicts() == {"app": "ok"}
    scene.connect((11, 2), (12, 0), client_id="other", offers={}, protocol_type="consumer")
    assert scene.verdicts() == {"app": "ok", "other": "unknown"}


def test_a_group_that_commits_in_transactions(scene: Scene) -> None:
    """Its producers commit for it."""
    scene.connect((11, 2), (1, 4), (9, 1), offers={}, group_id="g")
    assert scene.verdicts() == {"app": "unknown"}
    scene.connect((0, 9), (28, 2), (22, 1), client_id="producer", offers={}, group_id="g")
    assert scene.verdicts() == {"app": "ok", "producer": "ok"}


def test_a_client_that_asks_one_broker_only(scene: Scene) -> None:
    """It follows the answer on its other connections, to other brokers too."""
    scene.connect((3, 1), offers={0: (0, 2), 3: (0, 1)}, asks_with=0)
    scene.connect((0, 2), broker_ip="10.0.0.10")
    (client,) = scene.assess()["clients"]
    assert client["verdict"] == "unknown"
    assert client["connection_count"] == 2
    assert client["findings"][0]["why"].startswith("its broker offered no higher one")
    scene.connect((0, 2), client_id="never")
    assert scene.verdicts() == {"app": "unknown", "never": "breaks"}


def test_a_name_given_to_one_broker_only(scene: Scene) -> None:
    """Connections without ApiVersions are of the software that the client named elsewhere."""
    scene.connect((3, 1), offers={0: (0, 2)}, software=("kafka-python", "9.9"))
    scene.connect((0, 2))
    scene.connect((3, 1), offers={0: (0, 2)}, asks_with=0)
    named, unnamed = sorted(
        scene.assess()["clients"], key=lambda each: each["software_name"] is None
    )
    assert (named["software_name"], named["connection_count"]) == ("kafka-python", 2)
    assert unnamed["connection_count"] == 1


def test_a_failed_login(scene: Scene) -> None:
    """A connection with handshakes alone is its caller's, and shows nothing of its own."""
    scene.connect((17, 1), (36, 0), offers={}, asks_with=0)
    scene.connect((0, 9), offers={}, software=(JAVA, "3.0.0"), principal="User:a")
    (client,) = scene.assess()["clients"]
    assert (client["connection_count"], client["principal"]) == (2, "User:a")


@pytest.mark.parametrize(
    ("target", "verdict", "setting"),
    [
        ("3.6", "breaks", None),
        ("3.7", "unknown", "group.coordinator.rebalance.protocols=classic,consumer"),
        ("3.9", "unknown", "group.coordinator.rebalance.protocols=classic,consumer"),
        ("4.0", "ok", None),
    ],
)
def test_apis_that_need_a_setting(
    scene: Scene, target: str, verdict: str, setting: str | None
) -> None:
    """KIP-848: brokers before 4.0 have it off by default."""
    scene.connect((68, 0), (1, 13), (8, 9), (9, 9), offers={}, software=(JAVA, "4.1.0"))
    (client,) = scene.assess(target)["clients"]
    assert client["verdict"] == verdict
    if setting is not None:
        assert client["findings"][0]["setting"] == setting
        assert setting in client["findings"][0]["why"]
        assert setting in client["upgrade"]


def test_share_groups_need_a_setting(scene: Scene) -> None:
    """KIP-932: a preview in 4.1."""
    scene.connect((76, 1), (78, 1), offers={}, software=(JAVA, "4.2.0"))
    assert scene.verdicts("4.1") == {"app": "unknown"}
    assert scene.verdicts("4.2") == {"app": "ok"}
