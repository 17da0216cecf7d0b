"""TLS: handshakes, records, and the plaintext of connections with known secrets."""
