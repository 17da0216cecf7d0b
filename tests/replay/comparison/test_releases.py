"""What a release changes by design is told apart from findings."""

from dataclasses import replace

import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.releases import spoken_versions
from kdissect.replay.comparison.kinds import RULE, Releases, kinds_of, tolerate_changes
from kdissect.replay.model import ABSENT, Difference, Judgement, Outcome, Verdict
from tests.replay.comparison.made_run import Run

CONFIGS = "results[].configs[].value"
UPGRADE = Releases(("3.9.0", "3.9.1"), ("4.3.1",))


def judged(api: int, *differences: Difference, releases: Releases = UPGRADE) -> Outcome:
    run = Run()
    run.add(0, api, 1, {}, {})
    [outcome] = run.outcomes
    outcome.judgement = Judgement(Verdict.DIFFERENT, list(differences))
    offered = {
        key: (spoken.first, spoken.last)
        for key, spoken in spoken_versions(releases.target[-1]).items()
    }
    tolerate_changes(replace(releases, offered=offered), [outcome])
    return outcome


@pytest.mark.parametrize(
    ("api", "one", "is_change"),
    [
        (ApiKey.DESCRIBE_CONFIGS,
         Difference("results[].configs[]", ("1", "zookeeper.connect"), "", ABSENT), True),
        (ApiKey.DESCRIBE_CONFIGS,
         Difference("results[].configs[]", ("1", "retention.ms"), "", ABSENT), False),
        (ApiKey.DESCRIBE_CONFIGS,
         Difference(CONFIGS, ("t", "message.timestamp.after.max.ms"), str((1 << 63) - 1),
                    "3600000"), True),
        (ApiKey.DESCRIBE_CONFIGS,
         Difference(CONFIGS, ("t", "message.timestamp.after.max.ms"), str((1 << 63) - 1), "5"),
         False),
        (ApiKey.API_VERSIONS,
         Difference("api_keys[].max_version", ("Produce",), 11, 13), True),
        (ApiKey.API_VERSIONS,
         Difference("api_keys[].max_version", ("Produce",), 11, 12), False),
        (ApiKey.API_VERSIONS, Difference("api_keys[]", ("LeaderAndIsr",), {}, ABSENT), True),
        (ApiKey.API_VERSIONS, Difference("api_keys[]", ("Produce",), {}, ABSENT), False),
        (ApiKey.METADATA, Difference("topics[].error_code", ("t",), 0, 3), False),
    ],
)  # fmt: skip
def test_only_what_the_list_says_is_a_change(api: int, one: Difference, is_change: bool) -> None:
    """By name and by value; and not when both are of one release."""
    outcome = judged(api, one)
    [told] = outcome.judgement.differences
    assert (told.rule == RULE, bool(told.note)) == (is_change, is_change)
    assert outcome.judgement.verdict is (Verdict.TOLERATED if is_change else Verdict.DIFFERENT)
    same = judged(api, one, releases=Releases(("4.3.1",), ("4.3.1",)))
    assert same.judgement.differences == [one]


def test_an_older_target_shows_the_same_changes_the_other_way_round() -> None:
    back = Releases(UPGRADE.target, UPGRADE.captured)
    one = Difference("results[].configs[]", ("1", "zookeeper.connect"), ABSENT, "")
    outcome = judged(ApiKey.DESCRIBE_CONFIGS, one, releases=back)
    assert outcome.judgement.verdict is Verdict.TOLERATED


@pytest.mark.parametrize(
    ("one", "is_change"),
    [
        (Difference("api_keys[]", ("Envelope",), {}, ABSENT), True),
        (Difference("api_keys[]", ("DescribeQuorum",), ABSENT, {}), True),
        (Difference("api_keys[]", ("Produce",), {}, ABSENT), False),
        (Difference("topics[].topic_id", ("t",), "", "t"), True),
        (Difference("topics[].topic_id", ("t",), "t", "u"), False),
    ],
)
def test_from_zookeeper_to_kraft(one: Difference, is_change: bool) -> None:
    """Also at the same release; a broker with ZooKeeper is known by what it offers."""
    spoken = spoken_versions("3.9.1")
    kraft = {key: (each.first, each.last) for key, each in spoken.items()}
    del kraft[ApiKey.UPDATE_METADATA]
    releases = Releases.between({**kraft, ApiKey.UPDATE_METADATA: (0, 8)}, kraft)
    assert (releases.leaves_zookeeper, releases.differ) == (True, True)
    assert not Releases.between(kraft, kraft).leaves_zookeeper
    releases = Releases(UPGRADE.captured, UPGRADE.captured, leaves_zookeeper=True)
    outcome = judged(ApiKey.API_VERSIONS, one, releases=releases)
    assert [each.rule == RULE for each in outcome.judgement.differences] == [is_change]


def test_a_change_is_told_once() -> None:
    """The versions of all APIs are one line, and all configs that are gone by one change; each
    default has its own."""
    outcome = judged(
        ApiKey.DESCRIBE_CONFIGS,
        *(Difference("results[].configs[]", (name, f"zookeeper.{config}"), "", ABSENT)
          for name, config in (("1", "connect"), ("2", "connect"), ("1", "set.acl"))),
        *(Difference(CONFIGS, ("1", f"{log}message.timestamp.after.max.ms"), str((1 << 63) - 1),
                     "3600000")
          for log in ("", "log.")),
        Difference("api_keys[].max_version", ("Produce",), 11, 13),
        Difference("api_keys[].max_version", ("Fetch",), 17, 18),
        Difference("api_keys[]", ("LeaderAndIsr",), {}, ABSENT),
    )  # fmt: skip
    kinds = kinds_of([outcome], tolerated=True)
    assert [len(each.found) for each in kinds] == [3, 1, 1, 3]
