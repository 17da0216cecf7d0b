"""`kdissect extract`: the packets of exchanges or connections, as pcapng for Wireshark."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kdissect.cli.app import app
from kdissect.cli.common import (
    AsJson,
    Clients,
    FromTime,
    Groups,
    Hosts,
    KeyLogs,
    LimitItems,
    Ports,
    Quiet,
    Topics,
    ToTime,
    check_choice,
    limits_of,
    say,
    with_examples,
)

EXAMPLES = """
Examples:

  kdissect extract trace.pcap --exchange 4611686018427387905 --out one.pcapng

  kdissect extract '/data/dump-*.pcap.gz' --client orders-7 --topic payments --out payments.pcapng

  kdissect extract trace.pcap --group billing --anonymize --out to-share.pcapng

  kdissect extract trace.pcap --connection 10.0.0.7:51234 --out connection.pcapng
"""


@app.command("extract", cls=with_examples(EXAMPLES))
def extract_command(
    captures: Annotated[
        list[str],
        typer.Argument(metavar="CAPTURE...", help="Files, folders or globs; '-' is stdin."),
    ],
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="The pcapng to write.")],
    exchange: Annotated[
        list[int] | None,
        typer.Option("--exchange", metavar="ID", help="An exchange_id; repeatable."),
    ] = None,
    connection: Annotated[
        list[str] | None,
        typer.Option(
            "--connection",
            metavar="ID",
            help="A connection_id, or the IP:PORT of an end; repeatable.",
        ),
    ] = None,
    client: Clients = None,
    topic: Topics = None,
    group: Groups = None,
    from_time: FromTime = None,
    to_time: ToTime = None,
    host: Hosts = None,
    port: Ports = None,
    keylog: KeyLogs = None,
    anonymize: Annotated[
        bool,
        typer.Option(
            "--anonymize",
            help="Tell the conversations again in new packets: addresses, names, ids, keys and "
            "values are replaced, the same way everywhere.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE where it is there already.")
    ] = False,
    spool: Annotated[
        str | None,
        typer.Option(
            "--spool", metavar="DIR", help="Folder for uncompressed copies of compressed captures."
        ),
    ] = None,
    limit: LimitItems = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """The original packets of exchanges or connections, as pcapng with comments for Wireshark.

    Values of one option are alternatives; different options must all hold. Without
    --anonymize packets are copied as they are: passwords and records in them too.
    """
    check_choice(host, from_time, to_time)
    limits = limits_of(limit)
    from kdissect.extract import extract
    from kdissect.extract.selection import Choice
    from kdissect.pipeline.filters import time_ns
    from kdissect.pipeline.options import Options

    choice = Choice(
        exchanges=tuple(exchange or ()),
        connections=tuple(connection or ()),
        clients=tuple(client or ()),
        topics=tuple(topic or ()),
        groups=tuple(group or ()),
    )
    options = Options(
        ports=tuple(port or ()),
        keylog=tuple(keylog or ()),
        payload="none",
        hosts=tuple(host or ()),
        time_from_ns=None if from_time is None else time_ns(from_time),
        time_to_ns=None if to_time is None else time_ns(to_time),
        limits=limits,
    )
    done = extract(
        captures, out, choice, options, anonymize=anonymize, overwrite=overwrite, spool=spool
    )
    if done.left_out_count:
        say(f"warning: {done.left_out_count} frames are left out, since they cannot be read")
    if not done.packet_count:
        say("warning: nothing in the captures matches; the file has no packets")
    if as_json:
        document = {
            "format_version": 1,
            "path": done.path,
            "packets": done.packet_count,
            "exchanges": done.exchange_count,
            "connections": done.connection_count,
            "secrets_bytes": done.secrets_byte_count,
            "left_out_frames": done.left_out_count,
        }
        typer.echo(json.dumps(document, indent=1))
    elif not quiet:
        counts = (
            _counted(done.packet_count, "packet"),
            _counted(done.exchange_count, "exchange"),
            _counted(done.connection_count, "connection"),
        )
        typer.echo(f"{counts[0]} of {counts[1]} on {counts[2]} to {done.path}")


def _counted(number: int, one: str) -> str:
    return f"{number} {one}{'' if number == 1 else 's'}"
