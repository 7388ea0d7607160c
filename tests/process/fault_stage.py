"""Depots, wires and receivers of the fault trials, and how a fault is done to them and undone."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from .fault_draws import Trial
from .fault_hosts import TOKEN, DepotChild, Hosts
from .fault_receivers import Replica, make_replica
from .fault_relay import RATE, Relay
from .fault_versions import CHAIN, Published, publish
from .fault_wire import Wire

STALL_S = 0.8
RELAY_STALL_S = 1.5  # what a relay has not got yet, it is slow to send
BUCKET_NBYTES = 1 << 20

_USUAL_S, _USUAL_NBYTES = 0.2, 3_000_000  # of an update of which nothing is known yet
_JOIN_S = 30.0

SEEDS = {"main": 1, "old": 2}


def publish_all(stores: Path) -> None:
    """What all depots serve."""
    for name, seed in SEEDS.items():
        publish(stores / name, seed)


class Stage:
    """Everything that the trials need. Whatever a trial does to it is undone by `heal`."""

    def __init__(self, stores: Path, directory: Path, hosts: Hosts, *, checksum: bool) -> None:
        """`stores` are those that `publish_all` made; `directory` is for what is written here."""
        self.hosts, self.checksum, self.directory, self._stores = hosts, checksum, directory, stores
        self.token_file = directory / "token"
        self.token_file.write_text(TOKEN)
        self.published = Published.at(stores / "main", SEEDS["main"])
        self._usual: dict[tuple[object, ...], float] = {}
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()

    def _open(self, stack: ExitStack) -> None:
        names = ["main", "second", "old", *(["nixl"] if find_spec("nixl_cu12") else [])]
        ports = self.hosts.ports([*names, "relay"])
        self.depots = {name: self._depot(name, ports[name]) for name in names}
        for depot in self.depots.values():
            stack.callback(depot.end)
        older = self.depots["old"].address
        self.wires = {name: Wire(self.depots[name].address, older) for name in names if name != "old"}
        near = self.hosts.near_address
        self.wires["upstream"] = Wire(self.depots["main"].address, older, listen=near, rate=RATE)
        self.relay = Relay(self.hosts, self.directory, ports["relay"], self.token_file, self.wires["upstream"])
        stack.callback(self.relay.end)
        self.wires["relay"] = Wire(self.relay.depot.address, older)
        for wire in self.wires.values():
            stack.callback(wire.close)
        kinds = ["whole", "ranks", "relay", *(["nixl"] if "nixl" in names else [])]
        self.replicas = {kind: make_replica(kind, self.published) for kind in kinds}
        stack.callback(self.quiet)

    @property
    def old_store(self) -> Path:
        """Other bytes under the same names."""
        return self._stores / "old"

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _depot(self, name: str, port: int) -> DepotChild:
        store = self._stores / ("old" if name == "old" else "main")
        if name == "nixl":  # with a store of its own, as bytes of it will be changed
            store = shutil.copytree(store, self.directory / "nixl")
            words = ("process.fault_depot", store, "{listen}", self.token_file)
        else:
            words = ("weightcast", "depot", "--store", store, "--listen", "{listen}", "--token-file", self.token_file)
        return DepotChild(self.hosts, port, self.directory / f"{name}.log", *words)

    def need(self, trial: Trial, *, wait: bool = True) -> None:
        """Start the depots of a trial that do not run yet."""
        names = ["nixl" if trial.receiver == "nixl" else "main"]
        names += ["second"] if trial.depots == 2 else []
        names += ["old"] if trial.fault is not None and trial.kind == "replayed" else []
        for name in names:
            self.depots[name].start(wait=False)
        for name in names if wait else ():
            self.depots[name].wait_ready()

    # -- receivers ------------------------------------------------------------------------------------------------------

    def source(self, receiver: str, *, depots: int = 1, direct: bool = True) -> str:
        """The URL that receivers are given: straight to the depot, or through a wire."""
        name = {"nixl": "nixl", "relay": "relay"}.get(receiver, "main")
        depot = self.relay.depot if name == "relay" else self.depots[name]
        hosts = [depot.host if direct else self.wires[name].host]
        if depots == 2:
            hosts.append(self.depots["second"].host if direct else self.wires["second"].host)
        scheme, more = ("nixl", self._nic()) if receiver == "nixl" else ("http", "&connections=2")
        stall_s = RELAY_STALL_S if receiver == "relay" else STALL_S
        options = f"stall_s={stall_s}&bucket_nbytes={BUCKET_NBYTES}&token_file={self.token_file}{more}"
        return f"{scheme}://{','.join(hosts)}?{options}"

    def _nic(self) -> str:
        """The device on the way to the depot's host: a wire is on the loopback, but NIXL's own data does not pass it."""
        return "&nic=eth0" if self.hosts.apart else ""

    def anew(self, kind: str) -> Replica:
        """A replica that has never been loaded, in the place of the one there is."""
        self.replicas[kind].close()
        self.replicas[kind] = make_replica(kind, self.published)
        return self.replicas[kind]

    def quiet(self) -> bool:
        """Let go of all that is only kept for later; whether nothing of it is left."""
        for replica in self.replicas.values():
            replica.close()
        self.relay.end()
        left = sum(wire.lines for wire in self.wires.values())
        if "nixl" in self.replicas:
            from weightcast.transports.nixl.graveyard import GRAVEYARD

            left += len(GRAVEYARD)
        return left == 0

    # -- what is usual --------------------------------------------------------------------------------------------------

    def usual(self, trial: Trial, *, far: bool) -> float:
        """What such an update takes when nothing happens: bytes of answers on the wire of the fault, or seconds."""
        usual = self._usual.get(_sort(trial, trial.mode, far=far), _USUAL_NBYTES if trial.wired else _USUAL_S)
        return usual / 2 if trial.wired and trial.depots == 2 else usual

    def note_usual(self, trial: Trial, mode: str, seconds: float, *, far: bool) -> None:
        """An update took so long, and nothing happened."""
        if trial.depots == 1:
            found = float(self.wires[wire_of(trial)].seen) if trial.wired else seconds
            key = _sort(trial, mode, far=far)
            self._usual[key] = min(found, 1.3 * self._usual.get(key, found))

    def heal(self) -> list[str]:
        """Undo whatever was done. Tells which depots had died that nobody had killed."""
        for wire in self.wires.values():
            wire.arm(None)
        depots = [*self.depots.values(), self.relay.depot]
        for depot in depots:
            depot.go_on()
            if depot.killed and depot.process is not None:
                depot.process.wait(10)
        ended = [depot for depot in depots if depot.process is not None and not depot.alive]
        died = [f"{depot.host} ended with {depot.status}: {depot.told()[-800:]}" for depot in ended if not depot.killed]
        for depot in ended:
            depot.start(wait=False)
        for depot in ended:
            depot.wait_ready()
        if self.hosts.apart:
            self.hosts.wait_linked(next(depot.address[1] for depot in depots if depot.alive))
        return died


def _sort(trial: Trial, mode: str, *, far: bool) -> tuple[object, ...]:
    """Updates that take about the same. Ranks that commit in place fetch everything, and twice."""
    everything = far or (trial.receiver == "ranks" and mode == "inplace")
    return trial.receiver, trial.wired, trial.at_relay, everything


def wire_of(trial: Trial) -> str:
    """The wire that a fault happens on."""
    if trial.receiver == "relay":
        return "relay" if trial.at_relay else "upstream"
    return "nixl" if trial.receiver == "nixl" else "main"


class Strike:
    """The fault of a trial, from when it is armed until it is undone. `struck_s` is when it happened, if it did."""

    def __init__(self, stage: Stage, trial: Trial, *, far: bool) -> None:
        self._stage, self._trial = stage, trial
        self._usual = stage.usual(trial, far=far)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._mend: list[Callable[[], None]] = []
        self.struck_s = 0.0

    def arm(self) -> None:
        """From now on it can happen."""
        trial, stage = self._trial, self._stage
        if trial.fault is not None:
            trial.fault.at = int(trial.moment * self._usual)
            stage.wires[wire_of(trial)].arm(trial.fault)
        elif trial.kind in ("corrupt", "replayed"):
            self._tamper()
        else:
            self._thread = threading.Thread(target=self._later, name="strike", daemon=True)
            self._thread.start()

    def undo(self) -> None:
        """It is over."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            assert not self._thread.is_alive()
        for mend in self._mend:
            mend()
        if self._trial.fault is not None:
            self.struck_s = self._trial.fault.struck_s

    def _victim(self) -> DepotChild:
        if self._trial.receiver == "relay" and self._trial.at_relay:
            return self._stage.relay.depot
        return self._stage.depots["nixl" if self._trial.receiver == "nixl" else "main"]

    def _later(self) -> None:
        trial, hosts, victim = self._trial, self._stage.hosts, self._victim()
        if self._over.wait(trial.moment * self._usual):
            return
        self.struck_s = time.monotonic()
        if trial.kind == "killed":
            victim.kill()
            return
        if trial.kind == "stopped":
            victim.stop()
            mend = victim.go_on
        else:
            hosts.set_link(trial.end, up=False)

            def mend() -> None:
                hosts.set_link(trial.end, up=True)

        if trial.passes_s:
            self._over.wait(trial.passes_s)
            mend()
        else:
            self._mend.append(mend)

    def _tamper(self) -> None:
        """Change bytes of a version where they lie: that is what NIXL reads."""
        trial, root = self._trial, self._stage.directory / "nixl" / "versions"
        made_of = [version for version in CHAIN if version[0] == trial.wanted[0] and version <= trial.wanted]
        files = [
            path
            for version in made_of
            for path in sorted((root / version).iterdir())
            if path.suffix in (".safetensors", ".bin")
        ]
        path = files[trial.place % len(files)]
        before = path.read_bytes()
        if trial.kind == "corrupt":
            changed = bytearray(before)
            changed[trial.place % len(before)] ^= 1 << trial.place % 8
        else:
            old = self._stage.old_store / "versions" / path.parent.name / path.name
            changed = bytearray(old.read_bytes()[: len(before)])
        _overwrite(path, changed)
        self._mend.append(lambda: _overwrite(path, before))
        self.struck_s = time.monotonic()


def _overwrite(path: Path, data: bytes | bytearray) -> None:
    """Write to the very file, which is mapped elsewhere."""
    with path.open("r+b") as file:
        file.write(data)
