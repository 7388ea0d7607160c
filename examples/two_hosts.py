"""A trainer's host, a relay and an engine's host: network namespaces of this machine, with links of 200 Mbit/s.

    sudo .venv/bin/python examples/two_hosts.py [--mbit N] [--versions N]

On the trainer's host a depot serves the store that the trainer publishes to. The relay mirrors it, and passes pieces on as
they come. On the engine's host a process takes each version from the relay over HTTP, and another one by NIXL if that is
installed. Printed is what crossed the link of each host, headers included: a full version first, then deltas.

Needs: root and iproute2 (ip, tc); pip install 'weightcast[fast]', and for nixl:// 'weightcast[nixl]'
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import ml_dtypes
import numpy as np

from weightcast import LiveModel, Store
from weightcast.errors import NotFound

HOSTS = {"trainer": "10.77.1.1", "relay": "10.77.1.2", "engine": "10.77.1.3"}
PORT = 8300
PATIENCE_S = 120.0
LAYERS, WIDTH = 2, 2048


def model() -> dict[str, np.ndarray]:
    """16 MiB of BF16. A `torch.nn.Module` does as well."""
    return {f"layer_{number}": np.zeros((WIDTH, WIDTH), dtype=ml_dtypes.bfloat16) for number in range(LAYERS)}


# -- the trainer: its weights, and how a step changes them ----------------------------------------------------------------


def step(weights: dict[str, np.ndarray], number: int) -> None:
    """The first sets all weights; each later one moves one in a hundred a little, as a step of RL does in BF16."""
    random = np.random.default_rng(number)
    for tensor in weights.values():
        if number == 1:
            tensor[:] = random.normal(0, 0.02, tensor.shape)
        else:
            chosen = random.integers(0, tensor.size, tensor.size // 100)
            tensor.reshape(-1)[chosen] *= ml_dtypes.bfloat16(1.01)


# -- the engine: run on its own host, as `two_hosts.py --engine SOURCE` ---------------------------------------------------


def serve(source: str) -> None:
    """For each version that standard input names: take what the source has until that one is live, and say so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    print("ready", flush=True)
    with LiveModel(model(), source=source) as live:
        for line in sys.stdin:
            wanted, until = line.strip(), time.monotonic() + PATIENCE_S
            while live.version != wanted:
                assert time.monotonic() < until, f"{wanted} did not come"
                with suppress(NotFound):  # it has nothing yet
                    live.update()  # to its newest version; nothing moves if that is live already
                time.sleep(0.05)
            print(live.root_digest(), flush=True)


# -- the hosts ------------------------------------------------------------------------------------------------------------


def sh(*words: object, check: bool = True) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if check and done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def namespace(host: str) -> str:
    return f"wc-example-{os.getpid()}-{host}"


def add_host(host: str, opened: ExitStack) -> None:
    opened.callback(remove_host, host)  # also if adding it is interrupted
    sh("ip", "netns", "add", namespace(host))


def remove_host(host: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave it
    sh("ip", "netns", "delete", namespace(host), check=False)


def add_network(mbit: int, opened: ExitStack) -> None:
    """A host for each of HOSTS, and a switch between them. Every link is capped in both directions."""
    add_host("switch", opened)
    switch = namespace("switch")
    sh("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
    sh("ip", "-n", switch, "link", "set", "switch", "up")
    for host, address in HOSTS.items():
        add_host(host, opened)
        name = namespace(host)
        sh("ip", "-n", switch, "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", name)
        sh("ip", "-n", switch, "link", "set", host, "master", "switch", "up")
        sh("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "-n", name, "link", "set", "eth0", "up")
        for where, link in ((name, "eth0"), (switch, host)):
            cap = ("rate", f"{mbit}mbit", "burst", "256k", "latency", "15ms")
            sh("tc", "-n", where, "qdisc", "add", "dev", link, "root", "tbf", *cap)


def crossed(host: str, way: str) -> int:
    """Bytes that a host has sent ("tx") or received ("rx") over its link so far."""
    (link,) = json.loads(sh("ip", "-n", namespace(host), "-s", "-j", "link", "show", "dev", "eth0"))
    return link["stats64"][way]["bytes"]


@contextmanager
def running(host: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A Python program on a host."""
    command = ["ip", "netns", "exec", namespace(host), sys.executable, *map(str, words)]
    environ = {**os.environ, "UCX_TLS": "tcp"}  # NIXL would notice that these hosts are one machine, and use its memory
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def depot(host: str, store: Path, *options: str) -> Iterator[None]:
    words = ("-m", "weightcast", "-q", "depot", "--store", store, "--listen", f"{HOSTS[host]}:{PORT}", *options)
    with running(host, *words) as process:
        line = process.stdout.readline()
        assert line.startswith("serving"), f"the depot of the {host} did not start"
        yield


# -- the run --------------------------------------------------------------------------------------------------------------


def take(engine: subprocess.Popen[str], version: str) -> str:
    """Have the engine take a version. Gives the root digest of its live bytes."""
    engine.stdin.write(f"{version}\n")
    engine.stdin.flush()
    return engine.stdout.readline().strip()


def links() -> np.ndarray:
    return np.array([crossed("trainer", "tx"), crossed("relay", "tx"), crossed("engine", "rx")])


def run(directory: Path, versions: int, opened: ExitStack) -> None:
    store, weights, engines = Store(directory / "trainer"), model(), {}
    for scheme in ["http", "nixl"] if importlib.util.find_spec("nixl_cu12") else ["http"]:
        source = f"{scheme}://{HOSTS['relay']}:{PORT}"
        engines[scheme] = opened.enter_context(running("engine", __file__, "--engine", source))
        assert engines[scheme].stdout.readline(), "the engine did not start"

    opened.enter_context(depot("trainer", store.path))
    upstream, nixl = f"http://{HOSTS['trainer']}:{PORT}", "on" if "nixl" in engines else "off"
    opened.enter_context(depot("relay", directory / "relay", "--mirror", upstream, "--nixl", nixl))
    print("                                    trainer sent      relay sent   engine received")
    before, sent = links(), {}
    for number in range(1, versions + 1):
        step(weights, number)
        manifest, began = store.publish(f"step_{number}", weights), time.monotonic()
        for scheme, engine in engines.items():
            root = take(engine, manifest.version)
            seconds, after = time.monotonic() - began, links()
            columns = "".join(f"{nbytes:>16,}" for nbytes in after - before)
            print(f"{manifest.version:7} {manifest.kind:5} {scheme}://{seconds:7.2f} s  {columns}", flush=True)
            assert root == manifest.root_digest, f"the engine does not hold {manifest.version}"
            sent.setdefault(number, (after - before)[0])  # the second engine has it from the relay
            began, before = time.monotonic(), after
    full, delta = sent.pop(1), max(sent[number] for number in range(2, versions + 1))
    assert full > manifest.nbytes, "less than the version crossed the trainer's link"
    assert delta < full / 10, "a delta is not small"
    print(f"\nThe engine holds step_{versions} bit for bit. A delta took the trainer's link {full / delta:.0f} times less.")


def lacking() -> str:
    """What keeps this machine from running the example; empty if nothing does."""
    if os.geteuid() != 0:
        return "This example makes network namespaces: run it as root."
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    return f"This example needs {' and '.join(missing)}: install iproute2." if missing else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=200, help="what a link carries in a second (default: %(default)s)")
    parser.add_argument("--versions", type=int, default=3, help="how many to publish, 2 or more (default: %(default)s)")
    parser.add_argument("--engine", metavar="SOURCE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(options.engine)
        return
    if options.versions < 2 or options.mbit < 1:
        parser.error("--versions must be 2 or more, and --mbit 1 or more")
    if lacking():
        print(lacking(), file=sys.stderr)
        sys.exit(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # an exit like others: what is below cleans up
    with tempfile.TemporaryDirectory(prefix="wc-example-") as directory, ExitStack() as opened:
        add_network(options.mbit, opened)
        print(f"hosts: {', '.join(f'{host} {address}' for host, address in HOSTS.items())}; links of {options.mbit} Mbit/s")
        run(Path(directory), options.versions, opened)


if __name__ == "__main__":
    main()
