"""Which versions each release takes: the facts against other sources, and their notation."""

import csv
import os
from pathlib import Path

import pytest

from kdissect.protocol import releases
from kdissect.protocol.catalog import apis
from kdissect.protocol.model import VersionRange
from tests.material import CAPTURES, DEFINITIONS, needs_material
from tests.truth.request_log import read_lines
from tools import release_facts

PAIRS = DEFINITIONS / "pairs.csv"
JARS = "KDISSECT_KAFKA_JARS"  # a folder of kafka-clients-*.jar and slf4j-api-*.jar


def test_the_text_is_as_the_formatter_writes_it() -> None:
    """Reading and writing give the file back."""
    text = releases.FACTS.read_text()
    assert release_facts.format_facts(releases.parse_facts(text)) == text


def test_the_notation() -> None:
    """A change holds until the next; before the first an API is not there."""
    facts = releases.parse_facts(
        """
        releases = ["2.4.0", "3.0.0", "4.0.0"]
        [X]
        key = 4
        "2.4.0" = [0, 1]
        "4.0.0" = []
        [Y]
        key = 5
        "3.0.0" = [2, 3]
        """
    )
    assert facts.names == {4: "X", 5: "Y"}
    expected = {"2.4.0": VersionRange(0, 1), "3.0.0": VersionRange(0, 1), "4.0.0": None}
    assert facts.spoken[4] == expected
    assert facts.spoken[5]["2.4.0"] is None
    assert facts.spoken[5]["4.0.0"] == VersionRange(2, 3)


@pytest.mark.parametrize(
    ("target", "release"),
    [
        ("4.0", "4.0.2"),
        ("4.0.0", "4.0.0"),
        ("v4.0.1", "4.0.1"),
        ("2.4", "2.4.1"),
        ("2.6.0", "2.6.3"),
        ("3.9.5", "3.9.2"),
        ("3.6.1", "3.6.0"),
        ("4.3", "4.3.1"),
    ],
)
def test_targets(target: str, release: str) -> None:
    """A minor means its newest patch, an unknown patch the newest known before it."""
    assert releases.find_release(target) == release


@pytest.mark.parametrize("target", ["2.3", "4.4", "5.0", "4", "", "latest", "4.0.0.1"])
def test_unknown_targets(target: str) -> None:
    """The error names the known releases."""
    with pytest.raises(ValueError, match=r"2\.4 to 4\.3"):
        releases.find_release(target)


def test_every_release_from_2_4_to_4_3() -> None:
    """All minors are there, and no version that the definitions lack."""
    minors = {release.rpartition(".")[0] for release in releases.targets()}
    wanted = {f"2.{n}" for n in range(4, 9)} | {f"3.{n}" for n in range(10)}
    assert minors == wanted | {f"4.{n}" for n in range(4)}
    for release in releases.targets():
        spoken = releases.spoken_versions(release)
        assert len(spoken) >= 48
        for key, versions in spoken.items():
            known = apis()[key].request.versions
            assert known.first <= versions.first <= versions.last <= known.last, (release, key)


def test_kip_896() -> None:
    """What 4.0 removed, as KIP-896 lists it; 4.0.1 brought JoinGroup 0 and 1 back."""
    before, after = (releases.spoken_versions(each) for each in ("3.9.2", "4.0.2"))
    assert {key for key in before if key not in after} == {4, 5, 6, 7}
    raised = {key: after[key].first for key in before if key in after and after[key].first}
    lowest_one = {2, 9, 20, 27, 29, 30, 31, 32, 34, 35, 38, 39, 40, 41}
    lowest = {0: 3, 1: 4, 8: 2, 19: 2, 23: 2, 56: 2}
    assert raised == dict.fromkeys(lowest_one, 1) | lowest
    assert releases.spoken_versions("4.0.0")[11].first == 2


@needs_material
@pytest.mark.parametrize("release", ["3.9.1", "4.3.1"])
def test_against_the_definitions_of_a_release(release: str) -> None:
    """The versions in a release's message definitions, drafts left out."""
    wanted: dict[int, set[int]] = {}
    with PAIRS.open() as stream:
        for row in csv.DictReader(stream):
            drafts = row["unstable_in"].split()
            if row[f"in_{release}"] == "1" and release not in drafts:
                wanted.setdefault(int(row["api_key"]), set()).add(int(row["api_version"]))
    spoken = releases.spoken_versions(release)
    assert {key: set(range(v.first, v.last + 1)) for key, v in spoken.items()} == wanted


@needs_material
@pytest.mark.parametrize(
    ("log", "release"),
    [
        ("old_clients/java_2_0_1", "3.9.1"),
        ("other_clients/librdkafka", "4.3.1"),
        ("zookeeper/zk_3_9_1_ibp_2_4", "3.9.1"),
    ],
)
def test_versions_are_those_of_recorded_brokers(log: str, release: str) -> None:
    """A broker's own answer to ApiVersions; Produce from 0 on is there for old clients' sake."""
    spoken = releases.spoken_versions(release)
    checked = 0
    for row in read_lines(CAPTURES / f"{log}.requests.jsonl.gz"):
        if row["api_key"] != 18:
            continue
        for each in row["response"].get("apiKeys") or ():
            key, offered = each["apiKey"], VersionRange(each["minVersion"], each["maxVersion"])
            if key == 0 and release.startswith("4."):
                offered = VersionRange(3, offered.last)
            if key in (22, 27):  # InitProducerId 6 is a draft; brokers may leave 27 out
                continue
            assert spoken[key] == offered, key
            checked += 1
    assert checked > 50


@pytest.mark.heavy
@pytest.mark.skipif(JARS not in os.environ, reason=f"{JARS} names no folder of Kafka's jars")
def test_against_the_jars() -> None:
    """The maintainer's command finds the same again."""
    folder = Path(os.environ[JARS])
    classpath = sorted(folder.glob("slf4j-api-*.jar"))
    checked = 0
    for jar in sorted(folder.glob("kafka-clients-*.jar")):
        release = jar.stem.removeprefix("kafka-clients-")
        if release in releases.releases():
            found = release_facts.facts_of_jar(jar, classpath)
            assert {k: v for k, (_, v) in found.items()} == releases.spoken_versions(release)
            checked += 1
    assert checked


def test_releases_are_found_by_their_offers() -> None:
    """A broker is known by the versions in its ApiVersions answer, whatever APIs it leaves out."""
    offered = {
        key: (versions.first, versions.last)
        for key, versions in releases.spoken_versions("3.9.1").items()
    }
    assert releases.releases_offering(offered) == ["3.9.0", "3.9.1", "3.9.2"]
    del offered[18], offered[32]
    assert releases.releases_offering(offered) == ["3.9.0", "3.9.1", "3.9.2"]
    assert releases.releases_offering({0: (0, 13), 1: (4, 18), 2: (1, 11)})[-1] == "4.3.1"
    assert releases.taken({0: (0, 13), 1: (4, 18)}) == {0: (3, 13), 1: (4, 18)}
    assert releases.taken(offered) == offered
    assert releases.taken({0: (0, 99), 1: (4, 18)}) == {0: (0, 99), 1: (4, 18)}
    assert releases.releases_offering({1: (3, 17)}) == []
    assert releases.releases_offering({}) == []
    assert releases.releases_accepting(1, 18)[0] == "4.1.0"
    assert releases.releases_accepting(1, 3)[-1] == "3.9.2"
    assert releases.releases_accepting(1, 99) == releases.releases_accepting(999, 0) == []
