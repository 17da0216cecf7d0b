"""Detects SASL in a stream: a handshake by its mechanisms, tokens without headers by their shape.

After SaslHandshake v0 a token has only a size prefix (KIP-43), so after a gap its content is the
only evidence. Tokens come one at a time at the beginning of a connection, before all requests
except ApiVersions and SaslHandshake, each in a segment of its own. Only there these shapes are
looked for (RFC 4616, 5802, 7628, 4121):

    client  PLAIN        [authzid] NUL authcid NUL password
            SCRAM, OAUTHBEARER   a GS2 header, "n," or "y,", or "p="; then "c="; ^A for an error
            GSSAPI       an ASN.1 application tag whose length fits, or a wrap token
    broker  all          nothing, for success
            SCRAM        "r=", then "v=" or "e="
            OAUTHBEARER  "{", the error as JSON
            GSSAPI       as above

The list of mechanisms in a SaslHandshake response, and the mechanism in its request, end exactly
with their frames. Their names have at most 20 capitals, digits, hyphens and underscores (RFC 4422,
3.1).
"""

from __future__ import annotations

from kdissect.jit import inlined, int64, kernel
from kdissect.kafka.walk import Stream
from kdissect.tcp.byte_ranges import peek

TOKEN_BYTES_READ = 256  # bytes of a token that are tested for text
MECHANISM_MAX = 20  # RFC 4422, 3.1: characters of a mechanism's name
MECHANISMS_MAX = 64  # per broker
UNSUPPORTED_MECHANISM, ILLEGAL_STATE = 33, 34  # error codes of a SaslHandshake response

# RFC 2743, 3.1: tag of an initial token. RFC 4121, 4.2.6.2: token id of a wrap token.
GSS_TAG, GSS_WRAP = 0x60, 0x0504
OBJECT_IDENTIFIER = 6
SEPARATOR = 1  # RFC 7628, 3.1: ^A separates key-value pairs


@inlined
def _is_name(byte: int) -> bool:
    return 65 <= byte <= 90 or 48 <= byte <= 57 or byte == 45 or byte == 95


@kernel
def end_of_mechanism(stream: Stream, index: int, pos: int, end: int) -> int:
    """Position after the mechanism's name at `pos` (int16 length, text); -1 if it is none."""
    length = peek(stream.pieces, index, stream.stop, pos, 2)
    if not 0 < length <= MECHANISM_MAX or pos + 2 + length > end:
        return -1
    for place in range(pos + 2, pos + 2 + length):
        if not _is_name(peek(stream.pieces, index, stream.stop, place, 1)):
            return -1
    return int64(pos + 2 + length)


@kernel
def is_mechanisms(stream: Stream, index: int, pos: int, size: int) -> bool:
    """Return whether the frame at `pos` is a SaslHandshake response: error code, names of
    mechanisms."""
    pieces = stream.pieces
    stop = stream.stop
    error = peek(pieces, index, stop, pos + 8, 2)
    if error != 0 and error != UNSUPPORTED_MECHANISM and error != ILLEGAL_STATE:
        return False
    count = peek(pieces, index, stop, pos + 10, 4)
    if not 0 < count <= MECHANISMS_MAX:
        return False
    at = int64(pos + 14)
    end = pos + 4 + size
    for _ in range(count):
        at = end_of_mechanism(stream, index, at, end)
        if at < 0:
            return False
    return at == end


@inlined
def _is_gss(word: int, size: int) -> bool:
    """Return whether a token of `size` bytes that begins with the 32 bits of `word` is a GSSAPI
    token.

    An initial token is 0x60, its length in DER, and an object identifier (RFC 2743, 3.1); a wrap
    token is 5, 4, flags, 255 (RFC 4121, 4.2.6.2).
    """
    if word >> 24 == GSS_TAG:
        # DER: one byte below 128; otherwise 0x81 and one byte, or 0x82 and two bytes
        length = (word >> 16) & 255
        if length < 128:
            return length == size - 2 and (word >> 8) & 255 == OBJECT_IDENTIFIER
        if length == 0x81:
            return (word >> 8) & 255 == size - 3 and word & 255 == OBJECT_IDENTIFIER
        return length == 0x82 and word & 0xFFFF == size - 4
    return word >> 16 == GSS_WRAP and (word >> 8) & 255 < 8 and word & 255 == 255


@kernel
def _is_text(stream: Stream, index: int, pos: int, size: int) -> bool:
    """Return whether the first bytes of a token are text, or OAUTHBEARER's separator."""
    for place in range(pos + 4, pos + 4 + min(size, TOKEN_BYTES_READ)):
        byte = peek(stream.pieces, index, stream.stop, place, 1)
        if (byte < 32 and byte != SEPARATOR) or byte == 127:
            return False
    return True


@kernel
def is_client_token(stream: Stream, index: int, pos: int, size: int) -> bool:
    """Return whether the frame of `size` bytes at `pos` has the shape of a client's token; see the
    module."""
    pieces = stream.pieces
    stop = stream.stop
    if size == 1:
        return peek(pieces, index, stop, pos + 4, 1) == SEPARATOR
    if size < 4:
        return False
    word = peek(pieces, index, stop, pos + 4, 4)
    if word < 0:
        return False
    first, second = word >> 24, (word >> 16) & 255
    if _is_gss(word, size):
        return True
    comma, equals = 44, 61
    is_text_token = (first == 110 or first == 121) and second == comma  # n, y
    is_text_token |= (first == 112 or first == 99) and second == equals  # p, c
    if is_text_token:
        return _is_text(stream, index, pos, size)
    # PLAIN (RFC 4616): exactly two NULs; authcid and password are not empty
    if size > TOKEN_BYTES_READ:
        return False
    zeros = 0
    run = 0  # bytes since the last NUL
    for place in range(pos + 4, pos + 4 + size):
        byte = peek(pieces, index, stop, place, 1)
        if byte == 0:
            if zeros > 0 and run == 0:
                return False  # authcid is empty
            zeros += 1
            run = 0
        elif byte < 32 or byte == 127:
            return False
        else:
            run += 1
    return zeros == 2 and run > 0


@kernel
def is_broker_token(stream: Stream, index: int, pos: int, size: int) -> bool:
    """Return whether the frame of `size` bytes at `pos` has the shape of a broker's token that is
    not empty."""
    if size < 4:
        return False
    word = peek(stream.pieces, index, stream.stop, pos + 4, 4)
    if word < 0:
        return False
    first, second = word >> 24, (word >> 16) & 255
    if _is_gss(word, size):
        return True
    is_text_token = (first == 114 or first == 118 or first == 101) and second == 61  # r= v= e=
    is_text_token |= first == 123  # {
    return is_text_token and _is_text(stream, index, pos, size)
