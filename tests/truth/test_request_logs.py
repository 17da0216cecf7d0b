"""Every request that a broker logged is one row, paired with its response, equal field by field."""

from collections import Counter
from collections.abc import Callable, Iterable

from tests.truth import definitions
from tests.truth.compare import Comparison, records_sizes, text_records_sizes
from tests.truth.matching import direct, match
from tests.truth.material import CHECKED, LOGGED, Capture, each
from tests.truth.request_log import Entry
from tests.truth.rows import Row

every_logged_capture = each("capture", LOGGED)
every_checked_capture = each("capture", CHECKED)

PRODUCE, FETCH = 0, 1
SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE = 17, 18, 36
SHOWN = 12  # differences that a failure lists


def _by_api(rows: Iterable[Row]) -> Counter[str]:
    """Counts in the form of the manifests ("18 v0": 6)."""
    return Counter(f"{row['api_key']} v{row['api_version']}" for row in rows)


def _uncounted(capture: Capture) -> Counter[str]:
    """Whole request frames that the independent check did not take for Kafka's."""
    headers = [
        p["not_kafka"] for p in capture.check["stream_problems"]["sample"] if "not_kafka" in p
    ]
    return Counter(f"{int(h[:4], 16)} v{int(h[4:8], 16)}" for h in headers)


def _cut_requests(capture: Capture) -> int:
    """Streams of requests that end inside a frame."""
    problems = capture.check["stream_problems"]["sample"]
    return sum("partial frame" in (p.get("requests") or "") for p in problems)


def _has_request(row: Row) -> bool:
    return row["request_decode_status"] not in ("absent", "partial")


def _is_login(row: Row) -> bool:
    """What the authenticator answers, not the broker (ApiVersions only before the login)."""
    return row["api_key"] in (SASL_HANDSHAKE, SASL_AUTHENTICATE, API_VERSIONS)


def _is_unanswered(row: Row) -> bool:
    """True without a whole response that was due. The check counts a cut one as absent."""
    missing = row["status"] in ("connection_closed", "response_missing")
    return missing or row["response_decode_status"] == "partial"


@every_logged_capture
def test_every_logged_request_is_one_row(capture: Capture) -> None:
    """Address, correlation id, api key and version, client id; and nothing is left in the log."""
    found = match(capture)
    assert not found.only_in_log, [str(entry) for entry in found.only_in_log[:SHOWN]]
    assert len(found.pairs) == len(direct(capture))
    differ = [
        f"{entry}: client id {row['client_id']!r}, api name {row['api_name']!r}"
        for entry, row in found.pairs
        if (row["client_id"] or "") != entry.client_id
        or row["api_name"] != definitions.api_names()[row["api_key"]]
    ]
    assert not differ, differ[:SHOWN]


@every_checked_capture
def test_every_row_without_a_log_entry_is_explained(capture: Capture) -> None:
    """Logins, requests in flight at a shutdown, requests that the broker closed on: as counted."""
    found = match(capture)
    check = capture.check
    uncounted = _uncounted(capture) - Counter(
        f"{entry.key[4]} v{entry.key[5]}" for entry, _ in found.pairs
    )
    whole = [row for row in found.only_in_capture if _has_request(row)]
    assert _by_api(whole) == Counter(check["only_in_capture"]["by_api"]) + uncounted
    logins = {row["connection_id"] for row in whole if row["api_key"] == SASL_HANDSHAKE}
    unexplained = [
        row
        for row in whole
        if not (_is_unanswered(row) or (_is_login(row) and row["connection_id"] in logins))
    ]
    assert not unexplained, unexplained[:SHOWN]
    cut = [row for row in found.only_in_capture if row["request_decode_status"] == "partial"]
    assert len(cut) <= _cut_requests(capture)
    assert [row for row in found.only_in_capture if row["status"] == "request_missing"] == []
    assert len(found.sasl_tokens) == check["raw_sasl_tokens"]
    assert len(found.envelopes) == check["envelopes_in_capture"]


@every_checked_capture
def test_counts_are_those_of_the_independent_check(capture: Capture) -> None:
    """Connections, and messages by API and version, are those of an independent decoder."""
    found = match(capture)
    check = capture.check
    assert len(capture.rows("connections")) == check["connections"]
    rows = [row for _, row in found.pairs] + found.only_in_capture + found.envelopes
    whole = [row for row in rows if _has_request(row)]
    by_api = _by_api(whole) - _uncounted(capture)
    assert by_api == Counter(check["requests_by_api_version"])
    unanswered = _by_api(row for row in whole if _is_unanswered(row))
    assert unanswered - _uncounted(capture) == Counter(check["unanswered"]["by_api"])
    no_answer_due = [row for row in whole if row["status"] == "no_response_expected"]
    assert len(no_answer_due) == check["acks0_produce"]
    answered = [row for row in whole if row["status"] == "paired" and not _is_unanswered(row)]
    uncounted = Counter(_uncounted(capture)) & _by_api(answered)
    assert len(answered) == check["responses"] + uncounted.total()


@every_logged_capture
def test_bodies_agree_with_the_log(capture: Capture, say: Callable[[str], None]) -> None:
    """Each request and response, field by field; produce with acks=0 has no response to compare."""
    found = match(capture)
    comparison = Comparison()
    bodies = _Bodies(capture)
    requests = responses = 0
    for entry, row in found.pairs:
        body = bodies[row]
        known = definitions.has_version(row["api_key"], row["api_version"])
        if known:
            assert row["request_decode_status"] == "ok", (str(entry), row)
            _compare(comparison, entry, row, "Request", row["api_version"], body["request"])
            requests += 1
        else:
            assert row["api_key"] == API_VERSIONS, (str(entry), row)
            assert row["request_decode_status"] == "unknown_version", (str(entry), row)
        if _is_unanswered(row):
            continue
        if row["status"] == "no_response_expected":
            assert row["api_key"] == PRODUCE, (str(entry), row)
            assert body["request"]["acks"] == 0, (str(entry), row)
            continue
        assert row["status"] == "paired", (str(entry), row)
        assert row["response_decode_status"] == "ok", (str(entry), row)
        is_fallback = row["version_source"] == "fallback_v0"
        assert known or is_fallback, (str(entry), row)
        api_version = 0 if is_fallback else row["api_version"]
        _compare(comparison, entry, row, "Response", api_version, body["response"])
        responses += 1
    assert not comparison.differences, comparison.differences[:SHOWN]
    say(
        f"{capture}: {requests} requests, {responses} responses, {comparison.fields} fields equal; "
        f"only in the capture {dict(_by_api(found.only_in_capture))}"
    )


class _Bodies:
    """The row of `apis/<ApiName>` for an exchange."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._by_id: dict[str, dict[int, Row]] = {}

    def __getitem__(self, exchange: Row) -> Row:
        name = exchange["api_name"]
        if name not in self._by_id:
            rows = self._capture.rows(f"apis/{name}")
            self._by_id[name] = {row["exchange_id"]: row for row in rows}
            assert len(self._by_id[name]) == len(rows), f"apis/{name} has an exchange twice"
        return self._by_id[name][exchange["exchange_id"]]


def _compare(
    comparison: Comparison, entry: Entry, row: Row, side: str, api_version: int, body: Row
) -> None:
    layout = definitions.layout(row["api_key"], side, api_version)
    log = entry.request if side == "Request" else entry.response
    path = f"{entry} {side.lower()}"
    if body is None:
        comparison.differences.append(f"{path}: no body")
    elif isinstance(log, dict):  # else a text; `tests/codec` has these versions from Kafka
        comparison.body(layout, log, body, path)


@every_logged_capture
def test_sizes_of_record_data_agree_with_the_log(
    capture: Capture, say: Callable[[str], None]
) -> None:
    """The batches of each partition of a Produce request or Fetch response, as many bytes."""
    sizes: dict[int, Counter[tuple[str, str, int]]] = {}
    for batch in capture.rows("record_batches"):
        place = batch["topic"], batch["topic_id"], batch["partition"]
        sizes.setdefault(batch["exchange_id"], Counter())[place] += batch["size"]
    compared = 0
    differ = []
    for entry, row in match(capture).pairs:
        if row["api_key"] == PRODUCE:
            log = entry.request
        elif row["api_key"] == FETCH and row["response_decode_status"] == "ok":
            log = entry.response
        else:
            continue
        if isinstance(log, dict):
            logged = records_sizes(log)
        elif row["api_key"] == PRODUCE:
            logged = text_records_sizes(log)
        else:
            continue  # the text of a fetch response says nothing about sizes
        found = sizes.get(row["exchange_id"], Counter())
        by_name: Counter[tuple[str, int]] = Counter()
        for (topic, topic_id, partition), size in found.items():
            name = topic if (topic, partition) in logged else topic_id
            by_name[name, partition] += size
        compared += len(logged)
        if by_name != logged:
            differ.append(f"{entry}: {dict(found)}, log {dict(logged)}")
    assert not differ, differ[:SHOWN]
    say(f"{capture}: record data of {compared} partitions as large as logged")


def test_the_comparison_notices_a_wrong_value() -> None:
    """One value of each kind changed in a body: each is a difference, as is a surplus one."""
    logged = {"partitionIndex": 0, "errorCode": 0, "highWatermark": 84, "lastStableOffset": 84}
    logged |= {"logStartOffset": 0, "abortedTransactions": None, "preferredReadReplica": -1}
    partition: Row = {definitions.snake_case(name): value for name, value in logged.items()}
    logged["recordsSizeInBytes"] = 225
    leader = {"leader_id": -1, "leader_epoch": -1}
    nothing = {"epoch": -1, "end_offset": -1}
    partition |= {"diverging_epoch": nothing, "current_leader": leader, "snapshot_id": nothing}
    topic_id = "MXE110XmTRysovVM1m_BBA"
    topic: Row = {"topic": None, "topic_id": topic_id, "partitions": [partition]}
    log: Row = {"throttleTimeMs": 0, "errorCode": 0, "sessionId": 9}
    body: Row = {definitions.snake_case(name): value for name, value in log.items()}
    log["responses"] = [{"topicId": topic_id, "partitions": [logged]}]
    body |= {"responses": [topic], "node_endpoints": []}
    layout = definitions.layout(FETCH, "Response", 18)

    def differences() -> list[str]:
        comparison = Comparison()
        comparison.body(layout, log, body, "Fetch")
        return comparison.differences

    assert differences() == []
    for place, column, wrong in (
        (body, "session_id", 8),
        (body, "error_code", False),
        (body, "node_endpoints", None),
        (topic, "topic", "a name that v18 has not"),
        (topic, "partitions", []),
        (partition, "aborted_transactions", []),
        (leader, "leader_epoch", 0),
        (partition, "current_leader", None),
    ):
        right = place[column]
        place[column] = wrong
        assert len(differences()) == 1, column
        place[column] = right
