"""Connection attempts that failed: the client's SYN was refused, or nothing answered it."""

from __future__ import annotations

# A capture that lacks the broker's side of a connection shows no answer to a SYN either.
FAILED = """
  NOT coalesce(handshake_seen, false) AND syn_count > 0 AND response_byte_count = 0
  AND (coalesce(refused, false) OR unanswered_syn_count > 0)
"""
# Retries of a SYN follow after 1 s (RFC 6298, 2.1): one alone may have been answered too late.
PROVEN = "(coalesce(refused, false) OR unanswered_syn_count > 1)"
