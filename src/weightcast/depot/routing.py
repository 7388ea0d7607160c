"""Finding the handler of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weightcast.depot.exchange import Handler, Route
from weightcast.errors import InvalidInput


class Routes:
    """The routes of a depot. A `{name}` stands for one whole segment of a path; a segment as it is goes before one."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes: dict[tuple[str, ...], dict[str, Handler]] = {}
        for route in routes:
            pattern = tuple(route.pattern.split("/")[1:])
            handlers = self._routes.setdefault(pattern, {})
            if route.method in handlers:
                raise InvalidInput(f"the route {route.method} {route.pattern} is given twice.")
            handlers[route.method] = route.handler
        self._order: dict[int, list[tuple[str, ...]]] = {}  # by the number of segments
        for pattern in sorted(self._routes, key=lambda pattern: [_is_name(segment) for segment in pattern]):
            self._order.setdefault(len(pattern), []).append(pattern)

    def find(self, method: str, path: Sequence[str]) -> tuple[Handler, Mapping[str, str]] | list[str]:
        """The handler and the values of the names in its pattern; else the methods that the path has: none if it is none.

        HEAD is answered by whoever answers GET.
        """
        allowed: set[str] = set()
        for pattern in self._order.get(len(path), ()):
            values = _match(pattern, path)
            if values is None:
                continue
            handlers = self._routes[pattern]
            handler = handlers.get(method) or (handlers.get("GET") if method == "HEAD" else None)
            if handler is not None:
                return handler, values
            allowed.update(handlers, ("HEAD",) if "GET" in handlers else ())
        return sorted(allowed)


def _is_name(segment: str) -> bool:
    return segment.startswith("{") and segment.endswith("}")


def _match(pattern: tuple[str, ...], path: Sequence[str]) -> dict[str, str] | None:
    values = {}
    for wanted, given in zip(pattern, path, strict=True):
        if _is_name(wanted):
            values[wanted[1:-1]] = given
        elif wanted != given:
            return None
    return values
