"""The state after a run agrees with its responses, and with other runs."""

from typing import Any

import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batches import content_digest
from kdissect.replay.comparison.claims import compare_states
from kdissect.replay.comparison.judge import RunFacts
from kdissect.replay.target.state import LogContent, State, StoredBatch
from tests.builders.messages import numbered_batch as batch
from tests.replay.comparison import made_run
from tests.replay.comparison.made_run import Body
from tests.replay.made import MS

VERSIONS = {
    ApiKey.PRODUCE: 9, ApiKey.OFFSET_COMMIT: 8, ApiKey.TXN_OFFSET_COMMIT: 3, ApiKey.END_TXN: 3,
    ApiKey.CREATE_TOPICS: 5, ApiKey.DELETE_TOPICS: 5, ApiKey.DELETE_RECORDS: 2,
    ApiKey.INIT_PRODUCER_ID: 3, ApiKey.METADATA: 9, ApiKey.INCREMENTAL_ALTER_CONFIGS: 1,
    ApiKey.OFFSET_DELETE: 0, ApiKey.ADD_PARTITIONS_TO_TXN: 3, ApiKey.DESCRIBE_TRANSACTIONS: 0,
    ApiKey.LIST_TRANSACTIONS: 0, ApiKey.DELETE_GROUPS: 2, ApiKey.JOIN_GROUP: 5,
}  # fmt: skip


TOPIC = "topic", "orders"
RETENTION = "config", "orders", "retention.ms"
COMMIT = "commit", "billing", "orders", 0
LEDGER = "transactional-id", "ledger"


def orders(**partition: Any) -> list[Body]:
    """Partition 0 of topic orders, in a message."""
    return [{"name": "orders", "partitions": [{"partition_index": 0, **partition}]}]


class Run(made_run.Run):
    """Exchanges one after the other, 10 ms each unless their times are given."""

    def ask(
        self, api_key: ApiKey, request: Body, answer: Body | None,
        times_ms: tuple[float, float] | None = None, version: int = -1,
    ) -> None:  # fmt: skip
        begin, end = times_ms or (len(self.outcomes) * 20, len(self.outcomes) * 20 + 10)
        version = VERSIONS[api_key] if version < 0 else version
        self.add(begin / 1000, api_key, version, request, answer or {})
        outcome = self.outcomes[-1]
        outcome.answered_ns = int(end * MS)
        if answer is None:
            outcome.answer, outcome.answered_ns, outcome.error = None, -1, "timeout"

    def write(self, count: int, base: int | None, code: int = 0, owner: str = "") -> None:
        """A batch of one record for each offset of orders-0; base: the response's, or None."""
        partition = {"index": 0, "records": batch(0, count)}
        topics = [{"name": "orders", "partition_data": [partition]}]
        request = {"acks": -1, "timeout_ms": 1, "topic_data": topics,
                   "transactional_id": owner or None}  # fmt: skip
        result = {"index": 0, "error_code": code, "base_offset": base}
        answer = {"responses": [{"name": "orders", "partition_responses": [result]}]}
        self.ask(ApiKey.PRODUCE, request, None if base is None else answer)

    def commit(self, offset: int, times_ms: tuple[float, float] | None = None) -> None:
        request = {"group_id": "billing", "topics": orders(committed_offset=offset)}
        self.ask(ApiKey.OFFSET_COMMIT, request, {"topics": orders(error_code=0)}, times_ms)

    def create(self, count: int, **configs: str) -> None:
        listed = [{"name": name, "value": value} for name, value in configs.items()]
        topic = {"name": "orders", "num_partitions": count, "replication_factor": 1,
                 "assignments": [], "configs": listed}  # fmt: skip
        self.ask(
            ApiKey.CREATE_TOPICS,
            {"topics": [topic], "timeout_ms": 1, "validate_only": False},
            {"topics": [{"name": "orders", "error_code": 0}]},
        )

    def found(self, state: State, held: tuple[str, ...] = ()) -> list[str]:
        """The findings as text."""
        found = RunFacts(self.ids(), self.outcomes).claims.check(state, set(held))
        return [f"{each.keys[0]}: {each.captured} -> {each.answered}" for each in found]


@pytest.fixture
def run() -> Run:
    return Run()


def stored(base: int, count: int, first: int = 0, **more: Any) -> StoredBatch:
    """The batch of `Run.write`, or with another first value."""
    digest = content_digest(batch(first, count))
    return StoredBatch(base, count, digest, more.get("is_aborted", False), False)


def after(start: int, end: int, *batches: tuple[int, int], **more: Any) -> State:
    """A state with the log orders-0; batches: (base offset, record count)."""
    content = LogContent(start, end, tuple(stored(*each) for each in batches))
    return State({TOPIC: 1}, {("orders", 0): content}, **more)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (after(0, 5, (0, 2), (2, 3)), ""),
        (after(0, 2, (0, 2)), "ends at 5 or later -> ends at 2"),
        (after(0, 5, (2, 3)), "5 records -> 3 records"),
        (after(0, 10, (0, 2), (2, 3), (5, 2), (7, 3)), "5 records -> 10 records"),
        (after(2, 5, (2, 3)), "starts at 0 -> starts at 2"),
        (after(0, 5, (0, 2), (2, 2)), "3 records from offset 2 -> other records"),
    ],
    ids=["as acknowledged", "end missing", "lost", "doubled", "start missing", "others"],
)
def test_a_log_has_the_acknowledged_records(run: Run, state: State, expected: str) -> None:
    """Two batches of 2 and 3 records were acknowledged at 0 and 2."""
    run.write(2, 0)
    run.write(3, 2)
    found = run.found(state)
    assert bool(found) is bool(expected)
    assert expected in " ".join(found)


def test_a_batch_without_an_answer_may_be_there_or_not(run: Run) -> None:
    """Two records are certain and three possible: 2 and 5 are right, 1 and 6 are not."""
    run.write(2, 0)
    run.write(3, None)
    assert run.found(after(0, 2, (0, 2))) == run.found(after(0, 5, (0, 2), (2, 3))) == []
    assert run.found(after(0, 2, (0, 1)))
    assert "2 to 5 records -> 6 records" in run.found(after(0, 6, (0, 2), (2, 3), (5, 1)))[0]


def test_a_refused_batch_is_not_counted(run: Run) -> None:
    """MESSAGE_TOO_LARGE appends nothing; NOT_ENOUGH_REPLICAS_AFTER_APPEND may have appended."""
    run.write(2, 0)
    run.write(3, -1, code=10)
    assert run.found(after(0, 5, (0, 2), (2, 3)))
    run.write(3, -1, code=20)
    assert run.found(after(0, 5, (0, 2), (2, 3))) == []


def test_a_topic_with_earlier_records_or_retention_is_not_counted(run: Run) -> None:
    """More records are no finding if some were there before, nor fewer under retention.ms."""
    run.write(2, 100)
    assert run.found(after(0, 102, (0, 100), (100, 2)), held=("orders",)) == []
    shrinking = after(101, 102, (101, 1))
    shrinking.facts[RETENTION] = "1"
    assert run.found(shrinking) == []
    assert run.found(after(0, 102, (101, 1)), held=("orders",))


@pytest.mark.parametrize("config", ["cleanup.policy", "retention.ms", "retention.bytes"])
def test_only_compaction_may_delete_any_records(run: Run, config: str) -> None:
    """Three batches of two records. Retention deletes the first ones, and none in the middle;
    policy "delete" without retention.ms none at all."""
    for base in (0, 2, 4):
        run.write(2, base)
    gone, hole = after(2, 6, (2, 2), (4, 2)), after(0, 6, (0, 2), (4, 2))
    others = after(0, 6, (0, 2), (2, 2))
    others.logs["orders", 0] = LogContent(0, 6, (stored(0, 2), stored(2, 2, 9), stored(4, 2)))
    for state in (gone, hole, others):
        state.facts["config", "orders", config] = "delete" if "policy" in config else "1"
    assert bool(run.found(gone)) is ("policy" in config)
    assert "2 records from offset 2 -> none" in " ".join(run.found(hole))
    assert "2 records from offset 2 -> other records" in " ".join(run.found(others))
    for state in (gone, hole, others):
        state.facts["config", "orders", "cleanup.policy"] = "compact,delete"
        assert run.found(state) == []


def test_a_batch_may_begin_before_the_start_of_its_log(run: Run) -> None:
    """Retention cuts between two batches of one request, and DeleteRecords within a batch, of which
    a Fetch returns all records."""
    run.write(4, 0)
    for batches, is_right in (((0, 4),), True), (((2, 2),), True), (((3, 1),), False), ((), False):
        state = after(2, 4, *batches)
        state.facts[RETENTION] = "1"
        assert bool(run.found(state)) is not is_right


def test_deleted_records_move_the_start(run: Run) -> None:
    """DeleteRecords up to 2: the log starts there, and has the rest."""
    run.write(2, 0)
    run.write(3, 2)
    result = {"topics": orders(low_watermark=2, error_code=0)}
    run.ask(ApiKey.DELETE_RECORDS, {"topics": orders(offset=2), "timeout_ms": 1}, result)
    assert run.found(after(2, 5, (2, 3))) == []
    assert "starts at 2 -> starts at 0" in run.found(after(0, 5, (0, 2), (2, 3)))[0]


def test_a_deletion_of_records_without_an_answer_leaves_them_unknown(run: Run) -> None:
    run.write(4, 0)
    run.ask(ApiKey.DELETE_RECORDS, {"topics": orders(offset=2), "timeout_ms": 1}, None)
    run.write(2, 4)
    assert run.found(after(0, 6, (0, 4), (4, 2))) == run.found(after(4, 6, (4, 2))) == []
    assert run.found(after(0, 4, (0, 4)))


def committed(offset: int) -> State:
    return State({COMMIT: offset})


def test_the_last_committed_offset_is_the_groups(run: Run) -> None:
    """Commits one after the other: the last counts. Commits at the same time: either."""
    run.commit(5)
    run.commit(7)
    assert run.found(committed(7)) == []
    assert "7 -> 5" in run.found(committed(5))[0]
    assert "7 -> none" in run.found(State())[0]
    run.commit(9, (30, 45))  # with the one of 7, from 20 to 30
    run.commit(8, (35, 50))
    assert run.found(committed(9)) == run.found(committed(8)) == []
    assert "9 or 8 -> 7" in run.found(committed(7))[0]


def test_commits_go_with_their_group(run: Run) -> None:
    """A deleted group is not there, with none of its commits."""
    run.commit(5)
    deleted = {"results": [{"group_id": "billing", "error_code": 0}]}
    run.ask(ApiKey.DELETE_GROUPS, {"groups_names": ["billing"]}, deleted)
    assert run.found(State()) == []
    again = State({("group", "billing"): "Empty"})
    assert "none -> Empty" in run.found(again)[0]
    run.ask(ApiKey.JOIN_GROUP, {"group_id": "billing", "member_id": "m"}, {"error_code": 0})
    assert run.found(again) == []


def transactional(run: Run, *, is_committed: bool, offset: int = 3) -> None:
    """A transaction that commits an offset of billing."""
    owner = {"transactional_id": "ledger", "producer_id": 1, "producer_epoch": 0}
    topics = orders(committed_offset=offset)
    request = {**owner, "group_id": "billing", "topics": topics}
    run.ask(ApiKey.TXN_OFFSET_COMMIT, request, {"topics": orders(error_code=0)})
    run.ask(ApiKey.END_TXN, {**owner, "committed": is_committed}, {"error_code": 0})


def test_offsets_of_a_transaction_count_if_it_was_committed(run: Run) -> None:
    """The transaction ends as the answer says, and its offsets with it."""
    transactional(run, is_committed=True)
    state = committed(3)
    state.facts[LEDGER] = "CompleteCommit"
    assert run.found(state) == []
    state.facts[LEDGER] = "Ongoing"
    assert "CompleteCommit -> Ongoing" in run.found(state)[0]
    aborted = Run()
    transactional(aborted, is_committed=False)
    assert aborted.found(State({LEDGER: "CompleteAbort"})) == []
    assert aborted.found(State({LEDGER: "CompleteCommit"}))


def test_the_last_transaction_of_an_id_decides_the_offset(run: Run) -> None:
    """A transaction begins after the markers of the one before, so its offset replaces that one's,
    however soon it follows."""
    transactional(run, is_committed=True)
    transactional(run, is_committed=True, offset=2)
    states = [committed(each) for each in (2, 3)]
    for state in states:
        state.facts[LEDGER] = "CompleteCommit"
    assert run.found(states[0]) == []
    assert "2 -> 3" in run.found(states[1])[0]


def test_topics_and_configs_are_as_answered(run: Run) -> None:
    """A created topic has its partitions and configs; a deleted one is not there."""
    run.create(3, **{"retention.ms": "5"})
    assert run.found(State({TOPIC: 3, RETENTION: "5"})) == []
    assert "3 partitions -> 1 partition" in run.found(State({TOPIC: 1, RETENTION: "5"}))[0]
    assert "5 -> none" in run.found(State({TOPIC: 3}))[0]
    assert "3 partitions -> none" in run.found(State())[0]
    for value, told, is_right in (
        ("compact, delete", "compact,delete", True),
        ("0.10", "0.1", True),
        ("True", "true", True),
        ("producer", "Producer", False),
        ("9223372036854775807", "9223372036854775806", False),
    ):
        spelled = Run()
        spelled.create(1, **{"retention.ms": value})
        assert bool(spelled.found(State({TOPIC: 1, RETENTION: told}))) is not is_right
    run.ask(
        ApiKey.DELETE_TOPICS,
        {"topic_names": ["orders"], "timeout_ms": 1},
        {"responses": [{"name": "orders", "error_code": 0}]},
    )
    assert run.found(State()) == []
    assert "none -> 3 partitions" in run.found(State({TOPIC: 3}))[0]


@pytest.mark.parametrize("version", [5, 6], ids=["by name", "with ids"])
def test_a_deletion_without_an_answer_leaves_the_topic_unknown(run: Run, version: int) -> None:
    """The topic with its records and committed offsets may be there or not."""
    run.create(1)
    run.write(2, 0)
    run.commit(2)
    assert len(run.found(State())) == 2
    named = {"topic_names": ["orders"]} if version == 5 else {"topics": [{"name": "orders"}]}
    run.ask(ApiKey.DELETE_TOPICS, {**named, "timeout_ms": 1}, None, version=version)
    kept = committed(2)
    kept.facts[TOPIC] = 1
    kept.logs["orders", 0] = LogContent(0, 2, (stored(0, 2),))
    assert run.found(State()) == run.found(kept) == []
    run.write(3, 0)
    assert "ends at 3 or later" in run.found(after(0, 2, (0, 2)))[0]


def test_a_state_has_to_be_that_of_a_reference() -> None:
    """Offsets count from the start of the log. If references differ, either is right."""
    one, shifted = after(0, 5, (0, 2), (2, 3)), after(100, 105, (100, 2), (102, 3))
    one.facts[COMMIT], shifted.facts[COMMIT] = 4, 104
    assert compare_states(one, [shifted]) == []
    fewer = after(0, 5, (0, 2), (2, 2))
    [missing, offset] = compare_states(fewer, [one, shifted])
    assert (offset.captured, offset.answered) == ("5 records", "4 records")
    assert missing.answered == "none"
    assert compare_states(one, [shifted, fewer]) == []
    others = after(0, 5, (0, 2))
    others.logs["orders", 0] = LogContent(0, 5, (stored(0, 2), stored(2, 3, first=7)))
    others.facts[COMMIT] = 4
    [changed] = compare_states(others, [one])
    assert (changed.captured, changed.answered) == ("5 records", "5 records, but other ones")


def test_records_of_a_transaction_are_visible_if_it_was_committed(run: Run) -> None:
    """For a consumer that reads committed records only."""
    run.write(2, 0, owner="ledger")
    transactional(run, is_committed=False)
    state = after(0, 3, (0, 2))
    state.facts[LEDGER] = "CompleteAbort"
    assert "committed ones are not" in run.found(state)[0]
    state.logs["orders", 0] = LogContent(0, 3, (stored(0, 2, is_aborted=True),))
    assert run.found(state) == []


@pytest.mark.parametrize("api", [ApiKey.DESCRIBE_TRANSACTIONS, ApiKey.LIST_TRANSACTIONS])
def test_a_transaction_that_the_run_has_ended_is_not_ongoing(run: Run, api: ApiKey) -> None:
    """Until a request begins the next one."""
    asked = {"transactional_ids": ["ledger"]} if api == ApiKey.DESCRIBE_TRANSACTIONS else {}

    def show(state: str) -> None:
        shown = {"transactional_id": "ledger", "transaction_state": state}
        run.ask(api, asked, {"transaction_states": [shown]})

    transactional(run, is_committed=True)
    show("CompleteCommit")
    show("Ongoing")
    claims = RunFacts(run.ids(), run.outcomes).claims
    [(number, one)] = claims.contradictions
    assert number == run.outcomes[-1].step.number
    assert one.answered == "Ongoing"
    run.outcomes.pop()
    run.write(2, 0, owner="ledger")
    show("Ongoing")
    assert RunFacts(run.ids(), run.outcomes).claims.contradictions == []
