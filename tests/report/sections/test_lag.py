"""Consumer lag from brokers' logs, and from commits with a known outcome."""

from typing import Any

import pytest

import kdissect
from kdissect.api import Tables
from kdissect.protocol.api_keys import ApiKey
from tests.builders.tables import SECOND_US, START_US, exchange, tables
from tests.cases import cases
from tests.truth import lag as truth
from tests.truth.material import Capture


def commit(number: int, second: int, offset: int, *, is_answered: bool = True) -> dict[str, Any]:
    """A commit of group ``g`` at ``t``/0."""
    at = START_US + second * SECOND_US
    partitions = [{"partition_index": 0, "committed_offset": offset}]
    return {
        "exchange_id": number,
        "request_time": at,
        "response_time": at + 1000 if is_answered else None,
        "request": {"group_id": "g", "topics": [{"name": "t", "partitions": partitions}]},
    }


def made(
    plain: list[dict[str, Any]],
    transactional: list[dict[str, Any]],
    transactions: list[dict[str, Any]],
    log_end: int = 204,
    **more: Any,
) -> Tables:
    """Commits, transactions, and an answer after a second that shows the end of the log."""
    ends: dict[str, Any] = {"exchange_id": 99, "response_time": START_US + SECOND_US}
    for side, part in (("request", {"timestamp": -1}), ("response", {"offset": log_end})):
        partitions = [{"partition_index": 0, **part}]
        ends[side] = {"topics": [{"name": "t", "partitions": partitions}]}
    numbers = [row["exchange_id"] for row in (*plain, *transactional, ends)]
    return tables(
        exchanges=[exchange(number, group_id="g") for number in numbers],
        transactions=transactions,
        apis__OffsetCommit=plain,
        apis__TxnOffsetCommit=transactional,
        apis__ListOffsets=[ends],
        **more,
    )


def transaction(outcome: str, second: int | None, *exchange_ids: int) -> dict[str, Any]:
    end = None if second is None else START_US + second * SECOND_US
    return {"outcome": outcome, "end_time": end, "exchange_ids": list(exchange_ids)}


def row_of(source: Tables) -> dict[str, Any]:
    (row,) = truth.lag_rows(source).values()
    return row


@pytest.mark.parametrize(
    ("outcome", "last", "lag", "undecided"),
    [
        ("commit", 204, 0, 0),
        ("abort", 54, 150, 0),
        ("fenced", 54, 150, 0),
        ("open", None, None, 1),
        (None, None, None, 1),
    ],
)
def test_offsets_count_once_their_transaction_committed(
    outcome: str | None, last: int | None, lag: int | None, undecided: int
) -> None:
    """Whose end the capture lacks may have committed or not."""
    ends = [transaction("commit", 3, 1)]
    if outcome is not None:
        ends.append(transaction(outcome, None if outcome == "open" else 5, 2))
    row = row_of(made([], [commit(1, 2, 54), commit(2, 4, 204)], ends))
    assert (row["last_committed"], row["lag_at_end"]) == (last, lag)
    assert row["undecided_commits"] == undecided


@pytest.mark.parametrize(
    ("sent", "lost", "last"),
    [
        (ApiKey.INIT_PRODUCER_ID, None, 54),
        (ApiKey.END_TXN, None, None),  # the capture ended before its answer
        (ApiKey.FIND_COORDINATOR, None, None),
        (ApiKey.INIT_PRODUCER_ID, "gap", None),
    ],
)
def test_offsets_of_an_open_transaction_are_not_committed(
    sent: ApiKey, lost: str | None, last: int | None
) -> None:
    """The capture has the requests to its coordinator, and no bytes of its client are missing."""
    begin = START_US + SECOND_US
    request = {"transactional_id": "x", "api_key": int(sent)}
    gap = {"kind": lost, "connection_id": 1, "direction": "request", "pos": 1, "byte_count": 1}
    source = made([commit(1, 2, 54)], [commit(2, 4, 204)], [])
    pending = {**transaction("open", None, 2), "transactional_id": "x", "begin_time": begin}
    exchanges = source["exchanges"].to_pylist()
    row = row_of(
        tables(
            exchanges=[*exchanges, exchange(3, at_us=2 * SECOND_US, **request)],
            connections=[{"connection_id": 1, "client_ip": "10.0.0.1"}],
            anomalies=[gap] if lost else [],
            transactions=[pending],
            **{
                f"apis__{name}": source[f"apis/{name}"].to_arrow()
                for name in ("OffsetCommit", "TxnOffsetCommit", "ListOffsets")
            },
        )
    )
    assert row["last_committed"] == last


@pytest.mark.parametrize(
    ("commits", "in_transactions", "ends", "last", "lag", "undecided"),
    [
        # an undecided commit matters until the next one of its partition
        ([commit(3, 6, 200)], [commit(1, 2, 54)], [transaction("open", None, 1)], 200, 4, 1),
        # sent before another commit and committed after it
        ([commit(3, 3, 100)], [commit(1, 2, 54)], [transaction("commit", 9, 1)], 54, 150, 0),
        # without an answer: it may have been refused
        ([commit(1, 2, 54), commit(2, 3, 60, is_answered=False)], [], [], None, None, 1),
    ],
)
def test_which_commit_decides(
    commits: Any, in_transactions: Any, ends: Any, last: int, lag: int, undecided: int
) -> None:
    """The last one that is known to have taken effect."""
    row = row_of(made(commits, in_transactions, ends))
    assert (row["last_committed"], row["lag_at_end"]) == (last, lag)
    assert row["undecided_commits"] == undecided


@pytest.mark.parametrize(
    ("hole", "is_decided"),
    [
        ((150, 60), False),  # room for a commit
        ((250, 60), False),  # at the end of the connection
        ((150, 30), True),  # no commit is so small
        ((20, 60), True),  # before the commit
    ],
)
def test_a_commit_that_may_be_lost(hole: tuple[int, int], is_decided: bool) -> None:
    """Bytes of requests missing after the last commit may be a later commit."""
    placed = [
        exchange(1, group_id="g", request_pos=100, request_size=46, response_pos=100),
        exchange(99, at_us=5 * SECOND_US, request_pos=230, response_pos=350),
    ]
    source = made([commit(1, 2, 54)], [], [])
    gap = {"kind": "gap", "connection_id": 1, "direction": "request"}
    damaged = tables(
        exchanges=placed,
        connections=[{"connection_id": 1, "last_time": START_US + 6 * SECOND_US}],
        anomalies=[gap | dict(zip(("pos", "byte_count"), hole, strict=True))],
        apis__OffsetCommit=source["apis/OffsetCommit"].to_arrow(),
        apis__ListOffsets=source["apis/ListOffsets"].to_arrow(),
    )
    assert row_of(damaged)["lag_at_end"] == (150 if is_decided else None)


def test_no_end_of_the_log() -> None:
    """Without an end of the log there is no lag."""
    row = row_of(made([commit(1, 2, 54), commit(2, 3, 55)], [], [], log_end=-1))
    assert (row["last_committed"], row["log_end"], row["lag_at_end"]) == (55, None, None)


@pytest.mark.parametrize("how", ["another ID", "deleted"])
def test_a_topic_that_is_created_again_has_a_new_log(how: str) -> None:
    """The end of the old log, and commits to it, say nothing of the new one."""
    new_at = START_US + SECOND_US * 3 // 2
    more: dict[str, Any] = {
        "topics": [
            {"topic": "t", "topic_id": "a" * 22, "first_time": START_US},
            {"topic": "t", "topic_id": "b" * 22, "first_time": new_at},
        ]
    }
    if how == "deleted":
        response = {"responses": [{"name": "t", "error_code": 0}]}
        rows = [{"response_time": new_at, "response": response}]
        more = {"apis__DeleteTopics": rows}
    row = row_of(made([commit(1, 1, 200), commit(2, 2, 5)], [], [], **more))
    assert (row["commits"], row["last_committed"], row["lag_at_end"]) == (1, 5, None)


@cases(
    ("name", "least"),
    [("transactions/transactions", 12), ("other_clients/librdkafka", 10)],
    heavy=[
        ("share_streams/streams", 8),
        ("zookeeper/zk_3_9_1_ibp_2_4", 10),
        ("version_sweep/sweep_4_3_1", 71),
    ],
)
def test_against_the_brokers_logs(name: str, least: int) -> None:
    """The same offsets and lag as the request log of the brokers has."""
    capture = Capture(name)
    counts = truth.compare(kdissect.read(capture.path), capture.request_log_path)
    assert (counts.wrong, counts.undecided, counts.low) == ([], 0, 0)
    assert counts.right >= least
