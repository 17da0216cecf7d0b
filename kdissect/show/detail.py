"""The two messages of an exchange in full: trees of fields, with their bytes beside them or not."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import numpy as np
import pyarrow as pa

from kdissect.codec.group_protocols import DECODED
from kdissect.codec.internal_records import METADATA_TOPIC
from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.codec.message_columns import body_type
from kdissect.codec.redaction import TEXT, is_secret, may_hold_secrets, redact_column
from kdissect.errors import DecodeError
from kdissect.pipeline.options import Options
from kdissect.protocol import catalog
from kdissect.protocol.error_codes import error_name
from kdissect.protocol.model import RESPONSE, SIDES, Definition
from kdissect.show import style
from kdissect.show.byte_tree import TAG_COUNT, ByteTree, Node, Path, value_at, value_nodes
from kdissect.tables.embedded import add_decoded
from kdissect.tables.message_chunk import FrameBuffer
from kdissect.tables.schemas import Row
from kdissect.text import rfc3339, visible

VALUES_SHOWN = 32  # of a list of numbers or names; how many more there are is said
BYTES_SHOWN = 32  # of a value in the tree
RAW_SHOWN = 64  # of a field beside its name
RAW_WIDTH = 8
RAW_COLUMN = 6 + 2 + 3 * RAW_WIDTH + 1 + RAW_WIDTH + 2
_ENTRY, _LAST, _BAR, _GAP = "├─ ", "└─ ", "│  ", "   "


class Detailer:
    """Makes the lines of an exchange's messages."""

    def __init__(self, options: Options, raw: bool, colour: bool) -> None:
        self._options, self._raw, self._colour = options, raw, colour

    def lines(self, frames: FrameBuffer, row: int, topics: list[str]) -> Iterator[str]:
        """The lines of exchange `row` of `frames`, which touches `topics`."""
        bodies = self._decoded_inside(frames, row)
        for side, name in enumerate(SIDES):
            size, packet, pos = (
                int(frames.exchanges[name][row][item]) for item in ("size", "packet", "pos")
            )
            if size < 0:
                continue
            head = f"  {name}: {size} bytes, packet {packet}, stream position {pos}"
            yield self._painted(head, style.BOLD)
            holds_metadata = METADATA_TOPIC in topics
            message = _MessageView(self._options, frames, row, side, bodies[side], holds_metadata)
            yield from self._tree(message)

    def _decoded_inside(self, frames: FrameBuffer, row: int) -> list[Row | None]:
        """Request and response body as dicts, with the messages decoded from their bytes fields.

        None for a body without such fields. Examples are a member's subscription and assignment.
        """
        api_key = int(frames.exchanges["api_key"][row])
        if api_key not in catalog.apis():
            return [None, None]
        bodies = []
        for side in (0, 1):
            column = pa.nulls(1, body_type(api_key, SIDES[side]))
            if row in frames.readable(api_key, side):
                column = frames.decode(api_key, side, np.array([row])).body
            bodies.append(column)
        reveal = self._options.reveal_secrets
        request, response, _ = add_decoded(api_key, bodies[0], bodies[1], reveal)
        decoded: list[Row | None] = []
        for side, column in enumerate((request, response)):
            if column.type.equals(bodies[side].type):
                decoded.append(None)
                continue
            decoded.append((column if reveal else redact_column(column)).to_pylist()[0])
        return decoded

    def _painted(self, part: str, colour: str) -> str:
        return style.painted(part, colour, self._colour)

    # -- trees ------------------------------------------------------------------------------

    def _tree(self, message: _MessageView) -> Iterator[str]:
        nodes = message.nodes()
        if not self._raw:
            nodes = [node for node in nodes if node.path[-1] != TAG_COUNT]
        last_of: dict[Path, Path] = {}
        for node in nodes:
            last_of[node.path[:-1]] = node.path
        for number, node in enumerate(nodes):
            lead = ""
            for depth in range(1, node.depth):
                is_last = last_of[node.path[: depth - 1]] == node.path[:depth]
                lead += _GAP if is_last else _BAR
            is_last = last_of[node.path[:-1]] == node.path
            follows = nodes[number + 1].start if number + 1 < len(nodes) else node.end
            has_children = number + 1 < len(nodes) and nodes[number + 1].depth > node.depth
            label = self._label(message, node)
            branch = self._painted(lead + (_LAST if is_last else _ENTRY), style.DIM)
            if not self._raw:
                yield f"  {branch}{label}"
            else:
                inner = lead + (_GAP if is_last else _BAR)
                end = node.end if node.is_leaf or not has_children else min(follows, node.end)
                yield from self._raw_lines(message, node, end, branch + label, inner)

    def _label(self, message: _MessageView, node: Node) -> str:
        name = self._painted(visible(node.name), style.CYAN)
        if message.is_hidden(node):
            return f"{name}: {self._painted(TEXT, style.YELLOW)}"
        if node.is_records:
            size = None if node.value is None else len(node.value)
            return f"{name}: {'null' if size is None else f'{size} bytes of records'}"
        if node.is_leaf:
            note = self._painted(" (not sent)", style.DIM) if node.is_default else ""
            shown = value_text(node.value)
            return f"{name}: {shown}{self._remark(node)}{note}"
        if node.count is not None:
            return f"{name}: {node.count} element{'' if node.count == 1 else 's'}"
        return name

    def _remark(self, node: Node) -> str:
        value = node.value
        if not isinstance(value, int) or isinstance(value, bool):
            return ""
        if node.name.endswith("error_code"):
            shown = f" {error_name(value)}"
            return self._painted(shown, style.RED if value else style.DIM)
        if "timestamp" in node.name and 10**11 < value < 10**14:
            when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=value)
            return self._painted(f" {rfc3339(when, 'milliseconds')}", style.DIM)
        return ""

    # -- bytes ------------------------------------------------------------------------------

    def _raw_lines(
        self, message: _MessageView, node: Node, end: int, label: str, inner: str
    ) -> Iterator[str]:
        """`label` with the node's bytes on its left; those that do not fit on lines below."""
        size = end - node.start
        if size <= 0:
            yield f"  {'':{RAW_COLUMN}}{label}"
            return
        hidden = message.hides_raw(node)
        shown = 0 if hidden else min(size, RAW_SHOWN)
        at = node.start
        if hidden:
            left = f"{at:06x}  {TEXT}"
            yield f"  {self._painted(left.ljust(RAW_COLUMN), style.DIM)}{label}"
            return
        for done in range(0, shown, RAW_WIDTH):
            row = bytes(message.data[at + done : at + min(done + RAW_WIDTH, shown)])
            plain = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
            left = f"{at + done:06x}  {row.hex(' '):{3 * RAW_WIDTH}} {plain:{RAW_WIDTH}}  "
            rest = label if done == 0 else self._painted(inner.rstrip(), style.DIM)
            yield f"  {self._painted(left, style.DIM)}{rest}".rstrip()
        if size > shown:
            left = f"{at + shown:06x}  … {size - shown} more bytes"
            yield f"  {self._painted(left.ljust(RAW_COLUMN), style.DIM)}"


class _MessageView:
    """One side of an exchange: its nodes, and the parts to hide."""

    def __init__(
        self,
        options: Options,
        frames: FrameBuffer,
        row: int,
        side: int,
        inside: Row | None,
        holds_metadata: bool,
    ) -> None:
        exchange = frames.exchanges[row]
        start, end = int(frames.start[row, side]), int(frames.end[row, side])
        self.data = memoryview(frames.buf[start:end].tobytes())
        self.api_version = int(frames.versions(side)[row])
        self._options, self._side = options, side
        self._api_key = int(exchange["api_key"])
        self._is_token = bool(exchange["is_sasl_token"])
        self._is_whole = bool(exchange[SIDES[side]]["is_whole"])
        self._inside, self._holds_metadata = inside, holds_metadata
        self._structs: dict[Path, Row] = defaultdict(dict)  # their plain values
        self._is_faulty = False

    def nodes(self) -> list[Node]:
        data = self.data
        if self._is_token:
            return [Node(("token",), 0, len(data), bytes(data), is_leaf=True)]
        walk = ByteTree(data)
        header, version, body = self._definitions()
        pos = walk.message("header", header, version, 0)
        if body is not None and walk.error is None:
            pos = walk.message("body", body, self.api_version, pos)
        self._is_faulty = walk.error is not None
        if pos < len(data) or walk.error is not None or not self._is_whole:
            walk.nodes.append(self._rest(walk, pos, body is not None))
        nodes = []
        for node in walk.nodes:
            self._structs[node.path[:-1]][node.name] = node.value
            nodes.append(node)
            inside = self._decoded_value(node)
            if inside is not None:
                nodes += value_nodes(inside, (*node.path, node.name + DECODED), node.end)
        return nodes

    def _definitions(self) -> tuple[Definition, int, Definition | None]:
        """(header's definition and version, body's definition)."""
        api = catalog.apis().get(self._api_key)
        is_request = self._side == 0
        header = catalog.REQUEST_HEADER if is_request else catalog.RESPONSE_HEADER
        if api is None or self.api_version not in api.side(SIDES[self._side]).versions:
            return header, 1 if is_request else 0, None
        if is_request:
            return header, api.request_header_version(self.api_version), api.request
        return header, api.response_header_version(self.api_version), api.response

    def _rest(self, walk: ByteTree, pos: int, is_known: bool) -> Node:
        error: DecodeError | None = walk.error
        if not self._is_whole:
            name = "… bytes of this message are missing in the capture"
        elif error is not None:
            name = f"… cannot be read from byte {pos} on: {error.reason}"
        elif not is_known:
            name = "body of an unknown API or version"
        else:
            name = "bytes after the end of the message"
        return Node((name,), pos, len(self.data), bytes(self.data[pos:]), is_leaf=True)

    # -- secrets ----------------------------------------------------------------------------

    def is_hidden(self, node: Node) -> bool:
        """Return whether the value may be a secret."""
        if self._options.reveal_secrets or not node.is_leaf or node.is_decoded:
            return False
        if self._is_token:
            return True
        if node.path[0] not in ("header", "body") or node.name.startswith(UNKNOWN_TAGS):
            return may_hold_secrets(self._api_key, self._side)
        if node.path[0] == "header" or node.is_default or not isinstance(node.value, (str, bytes)):
            return False
        # a response that is cut behind the value does not say whether the config is sensitive
        is_flagged = self._is_faulty and self._side == RESPONSE and node.name == "value"
        return is_secret(node.name, {"is_sensitive": is_flagged, **self._structs[node.path[:-1]]})

    def hides_raw(self, node: Node) -> bool:
        """Return whether the bytes may hold a secret, or records that are not to be shown."""
        if self.is_hidden(node):
            return True
        if not node.is_records and node.path[0] in ("header", "body"):
            return False
        is_metadata = self._holds_metadata and not self._options.reveal_secrets
        is_records = node.is_records or catalog.may_hold_records(self._api_key, self._side)
        return is_records and (is_metadata or self._options.payload != "full")

    def _decoded_value(self, node: Node) -> object:
        """The message decoded from a bytes field, None if the field contains no message."""
        if self._inside is None or not node.is_leaf or node.path[0] != "body":
            return None
        *outer, name = node.path[1:]
        return value_at(self._inside, (*outer, f"{name}{DECODED}")) or None


def value_text(value: object) -> str:
    """A value on one line, safe for a terminal."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return f'"{visible(value)}"'
    if isinstance(value, (bytes, bytearray)):
        return bytes_text(bytes(value), BYTES_SHOWN)
    if isinstance(value, UUID):
        return base64.urlsafe_b64encode(value.bytes).decode("ascii").rstrip("=")
    if isinstance(value, list):
        shown = ", ".join(value_text(item) for item in value[:VALUES_SHOWN])
        more = len(value) - VALUES_SHOWN
        return f"[{shown}{f', … {more} more' if more > 0 else ''}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {value_text(item)}" for name, item in value.items()) + "}"
    return visible(str(value))


def bytes_text(data: bytes, most: int) -> str:
    """Bytes as text if they are text, else as hexadecimal, with the count of omitted ones."""
    part = data[:most]
    more = f" … {len(data) - most} more bytes" if len(data) > most else ""
    try:
        text = part.decode("utf-8") if not more else part.decode("utf-8", "ignore")
    except UnicodeDecodeError:
        text = ""
    if text and all(char.isprintable() or char in "\t\n\r" for char in text):
        return f'"{visible(text)}"{more}'
    return f"{part.hex(' ')}{more}" if data else "(empty)"
