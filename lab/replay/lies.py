"""Gate: lies that a proxy tells before a real broker, or before each of three, are reported."""

import argparse
import copy
import json
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kdissect.codec.message import Message
from lab.replay.captures import RECORDED
from lab.replay.record import FOLDER
from lab.replay.runs import findings, run, target
from tests.broker.kafka_broker import free_ports
from tests.broker.proxy import Proxy
from tests.broker.replaying import Replayed
from tests.replay.lies import Liar, Lie, lies

SHARE_FOUND = 0.97
DEFAULT = ("librdkafka", "java_4_3_1_on_3_9_1")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="TEXT", help="parts of lies; without: all")
    parser.add_argument("--capture", action="append", help=f"without: {', '.join(DEFAULT)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="recordings of `record`")
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=1)
    parser.add_argument("--sample", type=int, help="so many of the lies, drawn by --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pace", default="max")
    parser.add_argument("--list", action="store_true", help="print the lies only")
    parser.add_argument("--show", action="store_true", help="the first finding of each run")


def main(given: argparse.Namespace) -> int:
    """Return the count of lies that passed beyond the allowed share."""
    told = [lie for lie in lies() if not given.names or any(one in str(lie) for one in given.names)]
    if given.list:
        print(*told, sep="\n")
        return 0
    found = passed = 0
    for name in given.capture or DEFAULT:
        chosen = _with_room(name, told, given)
        print(f"{name}: {len(chosen)} lies have room", flush=True)
        if given.sample and given.sample < len(chosen):
            chosen = random.Random(given.seed).sample(chosen, given.sample)
        for lie, liar, done in _all(name, chosen, given):
            is_found = done.status == 1
            found, passed = found + is_found, passed + (not is_found)
            word = "found " if is_found else f"exit {done.status}" if done.status else "PASSED"
            print(f"{word} {done.seconds:6.1f} s {name}: {lie} ({liar.count})", flush=True)
            if given.show or done.status > 1:
                lines = findings(done)[:1] or done.errors.splitlines()[-1:]
                print(*(f"    {line[:300]}" for line in lines), sep="\n", flush=True)
    share = found / max(found + passed, 1)
    print(f"{found} of {found + passed} lies are reported on {given.nodes} nodes ({share:.1%})")
    return 0 if share >= SHARE_FOUND else passed


def _with_room(name: str, told: list[Lie], given: argparse.Namespace) -> list[Lie]:
    """Those of some lies for which an honest run has an answer with room."""
    liars = [Liar(lie) for lie in told]

    def look(message: Message) -> bool:
        for each in liars:
            if each.lie.api == message.api_name and not each.count:
                each(copy.deepcopy(message))
        return False

    with _behind_proxies(name, given) as proxies:
        for proxy in proxies:
            proxy.alter = look
        done = _replay(name, f"127.0.0.1:{proxies[0].port}", given)
    if done.status:
        print(f"the honest run has exit code {done.status}", *findings(done)[:3], sep="\n    ")
    return [each.lie for each in liars if each.count]


def _all(
    name: str, chosen: list[Lie], given: argparse.Namespace
) -> Iterator[tuple[Lie, Liar, Replayed]]:
    """Each lie on a target of its own; the next target starts while a replay runs."""
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        started: Future[tuple[ExitStack, list[Proxy]]] | None = None
        for number, lie in enumerate(chosen):
            now = started.result() if started else _start(name, given)
            started = None
            if number + 1 < len(chosen):
                started = pool.submit(_start, name, given)
                stack.callback(lambda one=started: one.result()[0].close())
            mine, proxies = now
            liar = Liar(lie)
            for proxy in proxies:
                proxy.alter = liar
            with mine:
                yield lie, liar, _replay(name, f"127.0.0.1:{proxies[0].port}", given)


def _start(name: str, given: argparse.Namespace) -> tuple[ExitStack, list[Proxy]]:
    with ExitStack() as stack:
        proxies = stack.enter_context(_behind_proxies(name, given))
        return stack.pop_all(), proxies


@contextmanager
def _behind_proxies(name: str, given: argparse.Namespace) -> Iterator[list[Proxy]]:
    """The proxies that the nodes of a fresh target advertise."""
    path = given.folder / f"{name}.pcap"
    if path.exists():
        about = json.loads(path.with_suffix(".json").read_text())
        version, options = about["kafka_version"], {"settings": about["settings"]}
    else:
        recorded = next(each for each in RECORDED if each.name == name)
        version, options = recorded.kafka_version, recorded.broker()
    ports = free_ports(given.nodes)
    with ExitStack() as stack:
        nodes = stack.enter_context(target(version, given.nodes, advertised=ports, **options))
        yield [
            stack.enter_context(Proxy(port, node.ports["PLAINTEXT"]).running())
            for port, node in zip(ports, nodes, strict=True)
        ]


def _replay(name: str, address: str, given: argparse.Namespace) -> Replayed:
    path = given.folder / f"{name}.pcap"
    options: list[str] = []
    if not path.exists():
        recorded = next(each for each in RECORDED if each.name == name)
        path, options = recorded.path, recorded.options()
    return run(path, address, *options, "--pace", given.pace)
