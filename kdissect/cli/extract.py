"""`kdissect extract`: copies the packets of exchanges or connections to a pcapng for Wireshark."""

from __future__ import annotations

from dataclasses import asdict

from kdissect.cli.options import ReadingOptions, ResultOptions, SelectionOptions
from kdissect.cli.output import say
from kdissect.cli.verbs import verb


@verb("""
  kdissect extract trace.pcap --exchange 4611686018427387905 --out one.pcapng
  kdissect extract '/data/dump-*.pcap.gz' --client orders-7 --topic payments --out payments.pcapng
  kdissect extract trace.pcap --group billing --anonymize --out to-share.pcapng
  kdissect extract trace.pcap --connection 10.0.0.7:51234 --out connection.pcapng
""")
def extract_command(
    captures: list[str],
    out: str,
    selected: SelectionOptions,
    capture: ReadingOptions,
    result: ResultOptions,
    anonymize: bool = False,
    spool: str | None = None,
    overwrite: bool = False,
) -> None:
    """Copy the packets of exchanges or connections to a pcapng for Wireshark, with comments.

    Values of one option are alternatives; different options must all hold. Without
    --anonymize packets are copied as they are, with passwords and records.
    """
    from kdissect.extract import extract
    from kdissect.text import plural

    done = extract(
        captures,
        out,
        selected.selection(),
        capture.options(),
        anonymize=anonymize,
        overwrite=overwrite,
        spool=spool,
    )
    if done.left_out_frames:
        say(f"warning: {plural(done.left_out_frames, 'frame')} left out: not readable")
    if not done.packets:
        say("warning: nothing in the captures matches; the file has no packets")
    line = (
        f"{plural(done.packets, 'packet')} of {plural(done.exchanges, 'exchange')} "
        f"on {plural(done.connections, 'connection')} to {done.path}"
    )
    if done.secrets_bytes:
        line += ", with the secrets of their TLS sessions"
    result.put({"format_version": 1, **asdict(done)}, [line])
