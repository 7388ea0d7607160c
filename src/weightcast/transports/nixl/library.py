"""Loading NIXL: under whichever name it is installed, and without what its import does to a process."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType

from weightcast.errors import InvalidInput, MissingExtra
from weightcast.transports.nixl.leaving import guard_exit

_NAMES = ("nixl_cu12", "nixl_cu13", "nixl")
# UCX reads over TCP in segments of 8 KiB unless it is told otherwise: several times slower.
_TUNING = {"UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m"}

_lock = threading.Lock()
_loaded_by: int | None = None


def load_nixl() -> ModuleType:
    """The bindings of NIXL: the Python class around them lacks a setting that we need. Raises `MissingExtra`.

    A fork of a process that has loaded it cannot use it, and is told so by `InvalidInput`: UCX would hang there for good.
    """
    global _loaded_by  # noqa: PLW0603 - a process loads it once
    if _loaded_by not in (None, os.getpid()):  # before the lock, which a thread of the parent may have held
        raise InvalidInput("NIXL cannot be used in a fork of a process that has used it: start the process with spawn.")
    with _lock:
        name = next((name for name in _NAMES if importlib.util.find_spec(name) is not None), None)
        if name is None:
            raise MissingExtra("nixl-cu12", "nixl", "moving weights with NIXL")
        guard_exit()
        for variable, value in _TUNING.items():
            os.environ.setdefault(variable, value)  # UCX cannot be told otherwise; what the user has set stays
        _leave_logging_alone(name)
        _loaded_by = os.getpid()
        bindings: ModuleType = import_module(f"{name}._api").nixlBind
        return bindings


def _leave_logging_alone(name: str) -> None:
    """Keep NIXL from configuring `logging`: that would close the handlers of everybody, and print on standard output."""
    package = importlib.util.find_spec(name)
    path = Path(package.origin).with_name("logging.py") if package is not None and package.origin else None
    inner = f"{name}.logging"
    if path is None or not path.exists() or inner in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(inner, path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__["_logging_configured"] = True
    sys.modules[inner] = module
