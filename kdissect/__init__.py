"""kdissect turns packet captures of Apache Kafka traffic into tables.

    >>> import kdissect
    >>> t = kdissect.read("captures/orders.pcap")
    >>> t.exchanges.to_pandas()

The names below are loaded at their first use, so that importing the package is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdissect.api import Table, Tables, dissect, read
    from kdissect.api import open_tables as open
    from kdissect.catalogue import publish
    from kdissect.codec.message import Message, decode_message, encode_message
    from kdissect.datasource import register
    from kdissect.errors import CaptureError, DecodeError, EncodeError, Error, OutputError
    from kdissect.folder_stream import stream
    from kdissect.pipeline.options import Limits

__version__ = "0.1.0"

_PUBLIC = {
    "CaptureError": "kdissect.errors",
    "DecodeError": "kdissect.errors",
    "EncodeError": "kdissect.errors",
    "Error": "kdissect.errors",
    "Limits": "kdissect.pipeline.options",
    "Message": "kdissect.codec.message",
    "OutputError": "kdissect.errors",
    "Table": "kdissect.api",
    "Tables": "kdissect.api",
    "decode_message": "kdissect.codec.message",
    "dissect": "kdissect.api",
    "encode_message": "kdissect.codec.message",
    "open": "kdissect.api:open_tables",
    "publish": "kdissect.catalogue",
    "read": "kdissect.api",
    "register": "kdissect.datasource",
    "stream": "kdissect.folder_stream",
}

__all__ = [
    "CaptureError",
    "DecodeError",
    "EncodeError",
    "Error",
    "Limits",
    "Message",
    "OutputError",
    "Table",
    "Tables",
    "__version__",
    "decode_message",
    "dissect",
    "encode_message",
    "open",
    "publish",
    "read",
    "register",
    "stream",
]


if not TYPE_CHECKING:  # a checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        place = _PUBLIC.get(name)
        if place is None:
            raise AttributeError(f"module 'kdissect' has no attribute {name!r}")
        module, _, attribute = place.partition(":")
        value = getattr(import_module(module), attribute or name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
