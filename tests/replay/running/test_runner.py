"""The runner against a scripted server."""

import asyncio
import math
import socket
import struct
import threading
import time
from contextlib import ExitStack, closing
from typing import Any

import pytest

from kdissect.codec.message import encode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import SkipCode, Skipped
from kdissect.replay.planning.plan import Pace
from kdissect.replay.running.runner import NOT_WAITED, Runner, RunResult
from kdissect.replay.target import connection as connections
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import Access, ConnectFailed, connect
from kdissect.replay.translation.translator import Translator
from tests.builders.workloads import exchange, heartbeat, produce, produced
from tests.replay.made import (
    API_VERSIONS,
    HEARTBEAT,
    METADATA,
    Answer,
    Counting,
    FakeBroker,
    PlanMaker,
    answering,
    empty_answer,
    translated,
    verdict_of,
)

MAX = Pace(math.inf)


def play(
    maker: PlanMaker,
    server: FakeBroker,
    pace: Pace = MAX,
    translator: Counting | None = None,
    access: Access | None = None,
    **options: Any,
) -> tuple[RunResult, Counting]:
    said = translator or Counting()

    async def run() -> RunResult:
        target = Target("127.0.0.1", server.port, access or Access())
        runner = Runner(maker.plan(), said, target, pace, **options)
        return await asyncio.wait_for(runner.run(), 120)

    with server.running():
        return asyncio.run(run()), said


def verdicts(result: RunResult) -> list[str]:
    return [verdict_of(outcome) for outcome in result.outcomes]


def play_on_nodes(
    maker: PlanMaker,
    servers: list[FakeBroker],
    translator: Translator,
    closed: FakeBroker | None = None,
    **options: Any,
) -> RunResult:
    """Each server is a node of the target, all but the closed one run while this does. The steps of
    a connection go to the node of its number, or to the last one."""
    for connection in maker.connections:
        connection.node_id = min(connection.connection_id, len(servers) - 1)

    async def run() -> RunResult:
        nodes = {number: ("127.0.0.1", server.port) for number, server in enumerate(servers)}
        translator.ids.target.nodes |= nodes
        versions = {METADATA: (0, 9), API_VERSIONS: (0, 3)}
        first = servers[0].port
        target = Target("127.0.0.1", first, cluster=translator.ids.target, versions=versions)
        runner = Runner(maker.plan(), translator, target, MAX, **options)
        return await asyncio.wait_for(runner.run(), 120)

    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.running())
        if closed is not None:
            closed.close()
            while closed._server and closed._server.is_serving():
                time.sleep(0.01)
        return asyncio.run(run())


def test_every_step_is_answered(maker: PlanMaker) -> None:
    """Three connections, each with five requests, one connection to the target for each."""
    for number in range(15):
        maker.add(number % 3, number)
    server = FakeBroker()
    result, _ = play(maker, server)
    assert server.connections == 3
    assert verdicts(result) == ["answered"] * 15
    assert not result.ended
    assert all(outcome.latency_ns > 0 for outcome in result.outcomes)


def test_dependencies_across_connections(maker: PlanMaker) -> None:
    """>> 0 on a, 1 on b after 0, 2 on a after 1: sent in this order, each after the answer."""
    first = maker.add(0)
    second = maker.add(1, after=(first,))
    maker.add(0, after=(second,))
    _, said = play(maker, FakeBroker())
    assert said.said == [
        ("sent", 0), ("answered", 0), ("sent", 1), ("answered", 1), ("sent", 2), ("answered", 2),
    ]  # fmt: skip


def test_follows_waits_for_sending_only(maker: PlanMaker) -> None:
    """A step that follows one that waits long is sent while that one is open."""
    waiting = maker.add(0)
    maker.add(1, sent_after=(waiting,))
    slow = {1: 0.4}
    _, said = play(maker, FakeBroker(lambda number, frame: slow.get(number, 0.0)))
    assert said.said == [("sent", 0), ("sent", 1), ("answered", 1), ("answered", 0)]


def test_pipelined_requests_stay_pipelined(maker: PlanMaker) -> None:
    """Without dependencies all requests of a connection are sent before the first answer."""
    for _ in range(4):
        maker.add(0)
    _, said = play(maker, FakeBroker(lambda number, frame: 0.1))
    assert [what for what, _ in said.said] == ["sent"] * 4 + ["answered"] * 4


def test_recorded_pace_and_lag() -> None:
    """Requests 40 ms apart wait until they are due, 20 ms apart at x2: no less, no more than the
    lag that is reported."""
    for speed in (1.0, 2.0):
        maker = PlanMaker()
        for number in range(6):
            maker.add(number % 2, 40 * number)
        server = FakeBroker()
        result, _ = play(maker, server, Pace(speed))
        dues = [int(40e6 * number / speed) for number in range(6)]
        for due, outcome in zip(dues, result.outcomes, strict=True):
            assert outcome.lag_ns == outcome.sent_ns - due >= 0


def test_an_answer_that_does_not_come(maker: PlanMaker) -> None:
    """The step fails, its connection is opened again, the rest goes on."""
    first = maker.add(0)
    second = maker.add(0, after=(first,))
    maker.add(0, after=(second,))
    answers = {2: 60.0}
    server = FakeBroker(lambda number, frame: answers.get(number, 0.0))
    result, said = play(maker, server, answer_timeout_s=1.0)
    assert server.connections == 3  # one asks whether the target is there
    assert verdicts(result) == ["answered", "failed", "answered"]
    assert result.outcomes[1].error == "no answer within 1 s"
    assert ("failed", 1) in said.said
    assert not result.ended


def test_a_target_that_stalls_ends_the_run(maker: PlanMaker) -> None:
    """Every answer missing: the run is given up after a few, and says so in every row."""
    for number in range(60):
        maker.add(number % 10)
    server = FakeBroker(lambda number, frame: 600.0)
    result, _ = play(maker, server, access=Access(connect_timeout=1.0), answer_timeout_s=0.5)
    assert server.connections == 11  # none is opened again, but one asks whether it is there
    assert result.ended == "the target is gone (no answer within 0.5 s)"
    assert sum("no answer within" in outcome.error for outcome in result.outcomes) <= 10
    assert len(result.outcomes) == 60
    assert all(outcome.error for outcome in result.outcomes)


def to_another(frame: bytes) -> bytes:
    """An answer with another correlation id."""
    return b"\0\0\xff\xff" + empty_answer(frame)[4:]


@pytest.mark.parametrize(
    ("first", "error"),
    [(None, "closed by the target"), (to_another, "an answer has correlation id 65535 where 1")],
)
def test_a_connection_that_ends(maker: PlanMaker, first: Any, error: str) -> None:
    """Requests in flight fail with the reason, and later ones use a new connection."""
    maker.add(0, after=(maker.add(0),))
    result, _ = play(
        maker, FakeBroker(lambda number, frame: 0.0 if number > 1 else first and first(frame))
    )
    assert verdicts(result) == ["failed", "answered"]
    assert result.outcomes[0].error.startswith(error)


def test_a_target_that_goes_away(maker: PlanMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection any more: the run ends, nothing hangs, every step has a row."""
    monkeypatch.setattr(connections, "RECONNECT_PAUSES_S", (0.01, 0.01))
    before = maker.add(0)
    for _ in range(20):
        before = maker.add(0, after=(before,))

    def answer(number: int, frame: bytes) -> Any:
        if number == 5:
            server.close()
            return None
        return 0.0

    server = FakeBroker(answer)
    result, _ = play(maker, server)
    assert result.ended.startswith("the target is gone (no connection to 127.0.0.1:")
    assert verdicts(result)[:4] == ["answered"] * 4
    assert all(outcome.error for outcome in result.outcomes[4:])


def test_bytes_that_are_no_kafka(maker: PlanMaker) -> None:
    """An impossible size is an error, before any allocation."""
    maker.add(0)

    class Http(FakeBroker):
        async def _serve(self, reader: Any, writer: Any) -> None:
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.2)
            writer.close()

    result, _ = play(maker, Http())
    assert "no Kafka answer" in result.outcomes[0].error


def test_skipped_steps_release_their_dependents(maker: PlanMaker) -> None:
    """Skipped in the plan or by the translator: later steps go on."""
    skipped = Skipped(SkipCode.NOT_ALLOWED, "not allowed")
    first = maker.add(0, skipped=skipped)
    second = maker.add(1, after=(first,))
    maker.add(0, after=(second,))
    said = Counting()
    said.refused[1] = Skipped(SkipCode.NOT_TRANSLATABLE, "no such topic")
    result, _ = play(maker, FakeBroker(), translator=said)
    assert verdicts(result) == ["skipped", "skipped", "answered"]


@pytest.mark.parametrize(("more", "retries"), [(1, 2), (0, 3)])
def test_not_yet_is_asked_again(maker: PlanMaker, more: int, retries: int) -> None:
    """A "not yet" is repeated over its connection, which stays open also while its last step waits
    to be sent again. The result has the earlier attempts."""
    first = maker.add(0)
    for _ in range(more):
        maker.add(0, after=(first,))
    said, server = Counting(), FakeBroker()
    said.retries[0] = retries
    result, _ = play(maker, server, translator=said)
    assert (server.requests, server.connections) == (1 + more + retries, 1)
    assert verdicts(result) == ["answered"] * (1 + more)
    assert [each.reason for each in result.outcomes[0].earlier] == ["not yet"] * retries
    assert not any(each.earlier for each in result.outcomes[1:])


def test_no_answer_was_captured_either(maker: PlanMaker) -> None:
    """The client went away with a request open: so does the replay."""
    maker.add(0, answered=False)
    result, _ = play(maker, FakeBroker(lambda number, frame: 60.0))
    outcome = result.outcomes[0]
    assert outcome.sent is not None
    assert outcome.answer is None
    assert outcome.error == NOT_WAITED


def test_a_connection_that_is_reset_at_once() -> None:
    """The kernel took the connection of a target that is killed before it can take it over: the
    socket has no address of the other side any more, and is no connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        connected = loop.sock_connect

        async def reset(sock: socket.socket, address: Any) -> None:
            await connected(sock, address)
            other, _ = listener.accept()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            other.close()

        loop.sock_connect = reset  # type: ignore[method-assign]
        with pytest.raises(ConnectFailed, match="connection reset by peer") as failed:
            await connect("127.0.0.1", listener.getsockname()[1], Access())
        assert failed.value.kind == "unreachable"

    with closing(listener):
        asyncio.run(run())


def test_a_connection_that_is_given_up_while_the_next_is_opened(
    maker: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three missing answers a connection's other steps fail, also the one for which a new
    connection is being opened just then, in vain; the rest of the run goes on."""
    monkeypatch.setattr(connections, "RECONNECT_PAUSES_S", (0.01,))
    for connection, count in ((0, 5), (1, 40)):
        before: tuple[int, ...] = ()
        for _ in range(count):
            before = (maker.add(connection, after=before),)

    def answer(number: int, frame: bytes) -> Any:
        if number == 3:
            silent._server.close()  # type: ignore[union-attr]
        return 60.0

    silent, other = FakeBroker(answer), FakeBroker(lambda number, frame: 0.05)
    result = play_on_nodes(maker, [silent, other], Counting(maker), answer_timeout_s=0.5)
    assert not result.ended
    assert verdicts(result) == [*["failed"] * 5, *["answered"] * 40]


def listing(listed: list[FakeBroker]) -> Answer:
    """Metadata has the servers that are listed by then as nodes 0, 1 and so on."""

    def body_of(api_key: int, _: dict[str, Any]) -> dict[str, Any] | None:
        nodes = enumerate(each.port for each in listed)
        brokers = [{"node_id": node, "host": "127.0.0.1", "port": port} for node, port in nodes]
        return {"brokers": brokers} if api_key == METADATA else None

    return answering(body_of)


def test_requests_leave_a_node_that_is_gone(
    maker: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata does not list it any more: they go to a node that is there."""
    monkeypatch.setattr(connections, "RECONNECT_PAUSES_S", (0.01,))
    before: tuple[int, ...] = ()
    for connection in (0, 1, 1, 1):
        before = (maker.add(connection, after=before),)
    listed: list[FakeBroker] = []
    there, gone = FakeBroker(listing(listed)), FakeBroker()
    listed.append(there)
    result = play_on_nodes(maker, [there, gone], Counting(maker), closed=gone)
    assert verdicts(result) == ["answered"] * 4
    assert not result.ended


def test_a_run_goes_on_while_a_node_answers(
    maker: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no connection to it is open. Metadata still lists the node that cannot be reached:
    its captured connection is given up after three requests."""
    monkeypatch.setattr(connections, "RECONNECT_PAUSES_S", (0.01,))
    before: tuple[int, ...] = ()
    for connection in (1, 1, 1, 1, 0):
        before = (maker.add(connection, after=before),)
    listed: list[FakeBroker] = []
    there, gone = FakeBroker(listing(listed)), FakeBroker()
    listed += [there, gone]
    result = play_on_nodes(maker, [there, gone], Counting(maker), closed=gone)
    assert verdicts(result) == [*["failed"] * 4, "answered"]
    errors = [outcome.error.partition(" to ")[0] for outcome in result.outcomes]
    given_up = "not sent: requests before it on this connection failed"
    assert errors == [*["no connection"] * 3, given_up, ""]
    assert not result.ended


def test_a_request_for_two_nodes_is_sent_to_both_or_to_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Produce of which one node is gone is not written to the other: it counts as not sent."""
    monkeypatch.setattr(connections, "RECONNECT_PAUSES_S", (0.01,))
    translator, [step] = translated(exchange(0, produce(0, 1), 0, 1, produced(0, 0, 1, 0)))
    parts = [{"partition_index": each, "leader_id": each} for each in (0, 1)]
    topics = [{"name": "t", "error_code": 0, "partitions": parts}]
    translator.ids.target.learn_metadata({"topics": topics})
    seen: list[int] = []

    def answer(number: int, frame: bytes) -> Any:
        seen.append(int.from_bytes(frame[:2], "big"))
        return 0.0

    there, gone = FakeBroker(answer), FakeBroker()
    made = PlanMaker()
    made.connections, made.steps = translator.ids.plan.workload.connections, [step]
    result = play_on_nodes(made, [there, gone], translator, closed=gone)
    assert result.outcomes[0].error.startswith("no connection")
    assert result.outcomes[0].sent is None
    assert ApiKey.METADATA in seen
    assert ApiKey.PRODUCE not in seen


def test_the_record_of_a_connection_has_the_requests_of_the_run() -> None:
    """Neither logins, which are asked, nor a request that the connection was too late for."""

    async def run(port: int) -> None:
        link = await connect("127.0.0.1", port, Access())
        await link.ask(connections.request(API_VERSIONS, 0, {}))
        frame = encode_message(heartbeat())
        posted = link.post(frame)
        await posted.answered
        link.close()
        with pytest.raises(ConnectFailed):
            await link.post(frame).answered
        assert link.record.attempts == [posted.attempt]

    with FakeBroker().running() as server:
        asyncio.run(run(server.port))


def test_a_connection_is_tried_for_as_long_as_one_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is down refuses each try only after seconds."""
    tries = []

    async def refuse(*where: Any) -> None:
        tries.append(where)
        await asyncio.sleep(0.2)
        raise ConnectFailed("unreachable", "no route to host")

    monkeypatch.setattr(connections, "connect", refuse)

    async def run() -> None:
        made = connections.Connections(lambda node: ("h", 1), Access(connect_timeout=0.5), int)
        with pytest.raises(ConnectFailed, match="no connection to h:1: no route to host"):
            await made.of({}, None)

    asyncio.run(run())
    assert len(tries) <= 2


def test_nothing_is_sent_after_an_interrupt(maker: PlanMaker) -> None:
    """After it is cancelled nothing is sent; finished steps stay, others are not reached."""
    for number in range(10):
        maker.add(0, 100 * number)

    async def run(port: int) -> RunResult:
        target = Target("127.0.0.1", port)
        runner = Runner(maker.plan(), Counting(), target, Pace())
        running = asyncio.ensure_future(runner.run())
        while runner.answered_count < 2:
            await asyncio.sleep(0.01)
        running.cancel()
        return await asyncio.wait_for(running, 120)

    with FakeBroker().running() as server:
        result = asyncio.run(run(server.port))
    assert result.is_interrupted
    assert verdicts(result)[:2] == ["answered"] * 2
    last = result.outcomes[-1].skipped
    assert last is not None
    assert last.code is SkipCode.NOT_REACHED
    assert len(result.outcomes) == 10


def test_a_long_poll_does_not_stall_others(maker: PlanMaker) -> None:
    """One connection waits until twenty requests of another have come."""
    waiting = maker.add(0, member_id="slow")
    before = maker.add(1)
    for _ in range(20):
        before = maker.add(1, after=(before,))
    server = FakeBroker(
        lambda _, frame: (lambda: server.requests == 22) if b"slow" in frame else 0.0
    )
    result, said = play(maker, server)
    assert verdicts(result) == ["answered"] * 22
    assert said.said.index(("answered", waiting)) > said.said.index(("answered", before - 1))


def test_a_fence_after_a_request_without_response(maker: PlanMaker) -> None:
    """Dependents of a Produce with acks=0 wait for the response to a later request."""
    quiet = maker.add(0, expects_response=False)
    maker.add(1, after=(quiet,))
    maker.add(0)
    seen: list[int] = []

    def answer(number: int, frame: bytes) -> Any:
        seen.append(int.from_bytes(frame[:2], "big"))
        if len(seen) == 1:
            return b""  # no answer to what expects none
        return 0.0

    result, said = play(maker, FakeBroker(answer))
    assert seen[:2] == [HEARTBEAT, API_VERSIONS]
    assert [number for what, number in said.said if what == "sent"] == [0, 2, 1]
    assert verdicts(result)[1:] == ["answered", "answered"]
    assert not result.outcomes[0].error
    assert result.outcomes[0].answer is None


def test_a_refused_request_without_response(maker: PlanMaker) -> None:
    """A broker that refuses a Produce with acks=0 ends the connection. The captured one went on
    after the first; nobody knows of the last."""
    maker.add(0, after=(maker.add(0, expects_response=False),), expects_response=False)
    refusing = FakeBroker(lambda _, frame: None if frame[1] == HEARTBEAT else 0.0)
    result, _ = play(maker, refusing)
    first, last = (outcome.error for outcome in result.outcomes)
    assert first
    assert not last


def test_steps_of_a_connection_settle_in_order(maker: PlanMaker) -> None:
    """>> 0 and 1 pipelined, 0 is asked again, 2 on b waits for 1 only: it goes after 0 as well,
    because who waits for the last of a connection waits for all before."""
    maker.add(0)
    second = maker.add(0)
    maker.add(1, after=(second,))

    again = Counting()
    again.retries[0] = 2
    result, said = play(maker, FakeBroker(), translator=again)
    assert verdicts(result) == ["answered"] * 3
    assert len(result.outcomes[0].earlier) == 2
    order = said.said
    assert order.index(("answered", 1)) < order.index(("answered", 0)) < order.index(("sent", 2))


def test_a_run_names_the_request_that_it_waits_for(maker: PlanMaker) -> None:
    """The request that has waited longest is named; after the run the answers are compared."""
    maker.add(0)
    said: list[str] = []
    seen = threading.Event()  # the answer comes after the run was looked at

    async def run(port: int) -> None:
        target = Target("127.0.0.1", port)
        runner = Runner(maker.plan(), Counting(), target, MAX)
        running = asyncio.create_task(runner.run())
        while "has waited" not in runner.activity():
            await asyncio.sleep(0.01)
        said.append(runner.activity())
        seen.set()
        await running
        said.append(runner.activity())

    with FakeBroker(lambda number, frame: 0.0 if seen.wait(120) else None).running() as server:
        asyncio.run(asyncio.wait_for(run(server.port), 120))
    assert "1 sent, 0 answered, 1 left; Heartbeat has waited for " in said[0]
    assert said[1].endswith("comparing 1 answer")
