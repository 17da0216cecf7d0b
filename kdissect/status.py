"""The codes of success and failure that kernels and their plain-Python twins share."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """The result of reading some bytes. OK is 0, so a status array of zeros means success."""

    OK = 0
    NEED_DATA = 1
    TRUNCATED = 2  # the bytes end inside a value
    VARINT_OVERFLOW = 3  # more than 5 (32-bit) or 10 (64-bit) bytes, or bits beyond the type
    NEGATIVE_LENGTH = 4  # a length below -1, or null where null is not allowed
    COUNT_IMPOSSIBLE = 5  # more elements than the remaining bytes can hold
    DUPLICATE_TAG = 6  # tags must ascend strictly (KIP-482)
    TAG_SIZE_MISMATCH = 7  # a tagged field does not fill its announced size
    UNKNOWN_API = 8
    UNKNOWN_VERSION = 9
    LIMIT = 10  # a limit of the options was reached
    ROOM_NEEDED = 11  # internal: a builder is full and must grow before it resumes
    CORRUPT = 12  # a codec refused the bytes
    UNKNOWN_CODEC = 13
    UNKNOWN_MAGIC = 14
    PARTIAL = 15  # a record batch cut off at the end of a fetch response (normal)
    BAD_CRC = 16
    COUNT_MISMATCH = 17
    INVALID_PRESENCE = 18
    INVALID_UTF8 = 19  # a string's bytes are no UTF-8; decoded with U+FFFD
    SIZE_MISMATCH = 20  # an element does not fill its announced size


REASONS: dict[Status, str] = {
    Status.OK: "ok",
    Status.NEED_DATA: "more bytes needed",
    Status.TRUNCATED: "the bytes end inside the value",
    Status.VARINT_OVERFLOW: "varint overflow",
    Status.NEGATIVE_LENGTH: "negative length",
    Status.COUNT_IMPOSSIBLE: "element count impossible",
    Status.DUPLICATE_TAG: "tags not ascending",
    Status.TAG_SIZE_MISMATCH: "tagged field does not fill its size",
    Status.UNKNOWN_API: "unknown api key",
    Status.UNKNOWN_VERSION: "unknown api version",
    Status.LIMIT: "limit reached",
    Status.ROOM_NEEDED: "builder full",
    Status.CORRUPT: "corrupt compressed data",
    Status.UNKNOWN_CODEC: "unknown codec",
    Status.UNKNOWN_MAGIC: "unknown magic",
    Status.PARTIAL: "cut at the end",
    Status.BAD_CRC: "wrong crc",
    Status.COUNT_MISMATCH: "record count mismatch",
    Status.INVALID_PRESENCE: "invalid presence byte of a nullable struct",
    Status.INVALID_UTF8: "invalid UTF-8",
    Status.SIZE_MISMATCH: "element does not fill its size",
}
