"""Handmade plans, a translator that counts, and a server with scripted faults."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.protocol import catalog
from kdissect.replay import model
from kdissect.replay.target.cluster import Target
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.translator import Translator
from tests.builders.messages import a_request, a_response, response_frame
from tests.builders.workloads import exchange, planned

HEARTBEAT, METADATA, API_VERSIONS = 12, 3, 18
MS = 1_000_000
T = TypeVar("T")


class PlanMaker:
    """Steps one after the other; `plan` when all are there."""

    def __init__(self) -> None:
        self.steps: list[model.Step] = []
        self.connections: list[model.Connection] = []

    def add(
        self,
        connection: int,
        at_ms: float = 0.0,
        *,
        after: tuple[int, ...] = (),
        sent_after: tuple[int, ...] = (),
        expects_response: bool = True,
        answered: bool = True,
        skipped: model.Skipped | None = None,
        **body: Any,
    ) -> int:
        """A Heartbeat; its number."""
        while len(self.connections) <= connection:
            number = len(self.connections)
            self.connections.append(
                model.Connection(number, ("10.0.0.1", 1000 + number), ("10.0.0.2", 9092))
            )
        number, at_ns = len(self.steps), int(at_ms * MS)
        owner = self.connections[connection]
        one = exchange(
            connection, a_request(HEARTBEAT, 4, group_id="g", **body), int(at_ms), int(at_ms) + 1,
            a_response(HEARTBEAT, 4) if answered else None,
        )  # fmt: skip
        one.exchange_id, one.index = 1000 + number, len(owner.exchanges)
        one.expects_response = expects_response
        owner.exchanges.append(one)
        self.steps.append(
            model.Step(number, connection, one, "Heartbeat", "groups", at_ns, expects_response,
                 skipped=skipped, depends_on=after, sent_after=sent_after)
        )  # fmt: skip
        return number

    def plan(self) -> model.ReplayPlan:
        lanes: list[list[int]] = [[] for _ in self.connections]
        for step in self.steps:
            lanes[step.connection].append(step.number)
        workload = model.Workload("made", "capture", self.connections, model.WorkloadFacts())
        return model.ReplayPlan(workload, model.PlanOptions(), self.steps, lanes)


class Counting(Translator):
    """A translator that changes nothing and logs its calls in order."""

    def __init__(self, maker: PlanMaker | None = None) -> None:
        super().__init__(IdMap((maker or PlanMaker()).plan()))
        self.said: list[tuple[str, int]] = []
        self.retries: dict[int, int] = {}
        self.refused: dict[int, model.Skipped] = {}

    def request(self, step: model.Step) -> bytes | model.Skipped:
        if step.number in self.refused:
            return self.refused[step.number]
        self.said.append(("sent", step.number))
        frame = step.exchange.request
        assert frame is not None
        return frame

    def unready(self, step: model.Step, response: bytes) -> dict[Any, str]:
        left = self.retries.get(step.number, 0)
        self.retries[step.number] = left - 1
        return {"a place": "not yet"} if left > 0 else {}

    def not_final(self, step: model.Step, response: bytes) -> None: ...

    def learn(self, step: model.Step, response: bytes) -> None:
        self.said.append(("answered", step.number))

    def failed(self, step: model.Step) -> None:
        self.said.append(("failed", step.number))


def translated(*exchanges: model.Exchange) -> tuple[Translator, list[model.Step]]:
    """A translator and the steps of a plan that sends these."""
    plan = planned(*exchanges)
    return Translator(IdMap(plan)), plan.steps


def sent_again(translator: Translator, step: model.Step, answer: Message) -> bool:
    """Whether a request is sent again after an answer, which the translator notes then."""
    frame = encode_message(answer)
    is_unready = bool(translator.unready(step, frame))
    if is_unready:
        translator.not_final(step, frame)
    return is_unready


Answer = Callable[[int, bytes], "bytes | float | Callable[[], bool] | None"]
"""(number of the request, frame) -> the answer; seconds to wait before the usual one, or what has
to hold before it; None to end the connection; b"" for none."""


def empty_answer(frame: bytes) -> bytes:
    """What a broker with nothing in it says."""
    api_key = int.from_bytes(frame[:2], "big")
    api_version = int.from_bytes(frame[2:4], "big")
    body: dict[str, Any] = {}
    if api_key == API_VERSIONS:
        body["api_keys"] = [
            {"api_key": key, "min_version": api.request.versions[0],
             "max_version": api.request.versions[1]}
            for key, api in catalog.apis().items()
        ]  # fmt: skip
    return response_frame(api_key, api_version, int.from_bytes(frame[4:8], "big"), **body)


NODE = {"node_id": 1, "host": "127.0.0.1", "port": 1}


def answering(body_of: Callable[[int, dict[str, Any]], dict[str, Any] | None]) -> Answer:
    """Answers with the body that `body_of` gives for an API key and a request's body; None: an
    empty one."""

    def answer(number: int, frame: bytes) -> bytes:
        request = decode_message(frame, side="request")
        body = body_of(request.api_key, request.body)
        if body is None:
            return empty_answer(frame)
        correlation_id = int.from_bytes(frame[4:8], "big")
        return response_frame(request.api_key, request.api_version, correlation_id, **body)

    return answer


class FakeBroker:
    """Answers in order, on a thread of its own, as `answer` says (default: with nothing in it)."""

    def __init__(self, answer: Answer | None = None, ssl: Any = None) -> None:
        self._answer, self._ssl = answer, ssl
        self.port = 0
        self.connections = self.requests = 0
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                frame = await reader.readexactly(size)
                self.requests += 1
                told = self._answer(self.requests, frame) if self._answer else 0.0
                if told is None:
                    return
                if callable(told):
                    while not told():
                        await asyncio.sleep(0.01)
                    told = 0.0
                if isinstance(told, float):
                    await asyncio.sleep(told)
                    told = empty_answer(frame)
                if told:
                    writer.write(len(told).to_bytes(4, "big") + told)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def close(self) -> None:
        """No more connections; those that are there end."""

        def stop() -> None:
            assert self._server is not None
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()

        self._loop.call_soon_threadsafe(stop)

    @contextmanager
    def running(self) -> Iterator["FakeBroker"]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=2000)
        self.port = listener.getsockname()[1]

        async def begin() -> None:
            self._server = await asyncio.start_server(self._serve, sock=listener, ssl=self._ssl)

        self._loop.run_until_complete(begin())
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(60)
            end_loop(self._loop)


def with_target(answer: Answer | None, work: Callable[[Target], Awaitable[T]]) -> T:
    """The result of work with a probed target, which is a fake broker."""

    async def run(port: int) -> T:
        target = Target("127.0.0.1", port)
        await target.probe()
        result = await work(target)
        target.close()
        return result

    with FakeBroker(answer).running() as server:
        return asyncio.run(asyncio.wait_for(run(server.port), 120))


def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the waiting tasks of an event loop whose thread has ended."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=5))
    loop.close()


def verdict_of(outcome: model.Outcome) -> str:
    """In a word, without a comparison."""
    if outcome.skipped is not None:
        return "skipped"
    return "answered" if outcome.answer is not None else "failed"
