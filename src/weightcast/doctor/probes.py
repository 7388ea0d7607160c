"""What a child process of the doctor does: load one thing, and say what it found on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version

import msgspec

from weightcast.doctor.children import Loaded

SERVE = ("fastapi", "jinja2", "tokenizers", "uvicorn", "zmq")


def load_torch() -> Loaded:
    """torch, what it was built for, and the devices that it sees."""
    import torch  # noqa: PLC0415 - what this is about

    built = torch.version.cuda or getattr(torch.version, "hip", None) or ""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Loaded(state="loaded", version=str(torch.__version__), cuda=built, devices=tuple(devices))


def load_numba() -> Loaded:
    """The compiler of the delta kernels. They are not compiled here: that takes long the first time."""
    import numba  # noqa: PLC0415

    return Loaded(state="loaded", version=numba.__version__)


def load_zmq() -> Loaded:
    """ZeroMQ, with the library inside of it."""
    import zmq  # noqa: PLC0415

    zmq.Context().term()
    return Loaded(state="loaded", version=zmq.__version__)


def load_nixl() -> Loaded:
    """NIXL, its plugins, and whether an agent with UCX can be made."""
    from weightcast.transports.nixl.agent import Agent  # noqa: PLC0415
    from weightcast.transports.nixl.library import load_nixl as bindings  # noqa: PLC0415

    nixl = bindings()
    plugins = nixl.nixlAgent("weightcast-doctor", nixl.nixlAgentConfig()).getAvailPlugins()
    Agent().close()
    return Loaded(state="loaded", plugins=tuple(sorted(plugins)))


def load_serve() -> Loaded:
    """Everything that the server needs beside torch."""
    for name in SERVE:
        import_module(name)
    return Loaded(state="loaded", version=", ".join(f"{name} {version(name)}" for name in SERVE if name != "zmq"))


PROBES: dict[str, Callable[[], Loaded]] = {
    "torch": load_torch,
    "numba": load_numba,
    "zmq": load_zmq,
    "nixl": load_nixl,
    "serve": load_serve,
}


def main() -> None:
    """Run the probe that the argument names. Whatever libraries print goes to standard error: the answer stays alone."""
    answers = os.dup(1)
    os.dup2(2, 1)
    found = PROBES[sys.argv[1]]()
    with os.fdopen(answers, "wb") as out:
        out.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
