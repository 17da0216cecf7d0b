"""A proxy between clients and a broker that changes answers on their way: a test tool.

The broker has to advertise the proxy's address, so that clients stay behind it.
"""

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kdissect.codec.message import Message, decode_message, encode_message
from tests.replay.made import end_loop

_OWN = b"kdissect"  # client id of requests that are not of the workload
Alter = Callable[[Message], bool]
"""Changes a decoded response in place; whether it did."""


class Proxy:
    """Frames to `upstream` and back; responses to the workload go through `alter`, those to the
    replay's own requests do not. delay_s: how much later every response comes."""

    def __init__(
        self, port: int, upstream: int, alter: Alter | None = None, delay_s: float = 0.0
    ) -> None:
        self.port, self._upstream, self.alter = port, upstream, alter
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection("127.0.0.1", self._upstream)
        asked: deque[tuple[int, int, bool]] = deque()

        async def requests() -> None:
            while True:
                frame = await _frame(reader)
                api_key = int.from_bytes(frame[:2], "big")
                is_quiet = not (api_key or decode_message(frame, side="request").body["acks"])
                if not is_quiet:
                    asked.append((api_key, int.from_bytes(frame[2:4], "big"), _OWN in frame[:40]))
                out.write(len(frame).to_bytes(4, "big") + frame)

        async def responses() -> None:
            while True:
                frame = await _frame(there)
                api_key, api_version, is_own = asked.popleft()
                await asyncio.sleep(self._delay_s)
                if not is_own:
                    frame = self._altered(frame, api_key, api_version)
                writer.write(len(frame).to_bytes(4, "big") + frame)

        tasks = [asyncio.ensure_future(requests()), asyncio.ensure_future(responses())]
        with suppress(asyncio.CancelledError):  # at the end of the proxy
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()
        out.close()

    def _altered(self, frame: bytes, api_key: int, api_version: int) -> bytes:
        if self.alter is None:
            return frame
        message = decode_message(frame, side="response", api_key=api_key, api_version=api_version)
        return encode_message(message) if self.alter(message) else frame

    @contextmanager
    def running(self) -> Iterator["Proxy"]:
        listener = socket.create_server(("127.0.0.1", self.port))

        async def begin() -> None:
            await asyncio.start_server(self._serve, sock=listener)

        self._loop.run_until_complete(begin())
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(5)
            end_loop(self._loop)
            listener.close()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
