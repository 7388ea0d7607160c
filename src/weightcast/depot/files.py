"""What a depot answers about its versions: which there are, their manifests, and ranges of their files."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from itertools import chain

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.exchange import FileRange, Reply, Request, Route
from weightcast.depot.holding import Holding, Shelf
from weightcast.depot.ranges import asked_range, asked_ranges, names_tag
from weightcast.depot.replies import failure
from weightcast.errors import InvalidInput, NotFound, VersionNotSet
from weightcast.store.layout import MANIFEST
from weightcast.store.version_file import YAML_NAME, version_yaml
from weightcast.tensors.digest import bytes_digest
from weightcast.wire.depot import PREFIX, Catalogue, file_tag

log = logs.get(__name__)

Block = memoryview | FileRange

MAX_WAIT_S = 60.0
BLOCK_NBYTES = 4 << 20  # sent at a time: measured fastest over loopback, and every block is looked at before it is sent
BLOCK_WAIT_S = 60.0  # for a block that is still on its way here
_BOUNDARY = secrets.token_hex(16)  # between ranges: in no file but by chance
_SLICE_S = 0.1  # how soon a waiting request notices that the depot closes


class FileRoutes:
    """The routes that every depot has."""

    def __init__(self, shelf: Shelf, closing: threading.Event) -> None:
        self._shelf, self._closing = shelf, closing

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("GET", "/health", self.health),
            Route("GET", f"/{YAML_NAME}", self.version_file),
            Route("GET", f"/versions/{{version}}/{MANIFEST}", self.manifest),
            Route("GET", "/versions/{version}/{file}", self.file),
            Route("GET", f"{PREFIX}/versions", self.versions),
            Route("GET", f"{PREFIX}/newest", self.newest),
        ]

    def health(self, _request: Request, _stack: ExitStack) -> Reply:
        """That it is there."""
        data = b'{"status":"ok"}'
        return Reply(200, (data,), len(data), {"Content-Type": "application/json"})

    def version_file(self, _request: Request, _stack: ExitStack) -> Reply:
        """The version to take, as a store has it."""
        newest = self._shelf.newest()
        if newest is None:
            raise VersionNotSet("this depot has no version yet. Publish one.")
        with self._shelf.holding(newest.version) as holding:
            data = version_yaml(version=newest.version, step=holding.manifest.step)
        return Reply(200, (data,), len(data), {"Content-Type": "application/yaml"})

    def versions(self, _request: Request, _stack: ExitStack) -> Reply:
        """Everything that there is."""
        newest = self._shelf.newest()
        return Reply.message(Catalogue(newest.version if newest else None, tuple(self._shelf.offers())))

    def newest(self, request: Request, _stack: ExitStack) -> Reply:
        """The version to take; with `after` and `wait`, once it is another one."""
        after, wait = request.query.get("after", ""), _seconds(request.query.get("wait", "0"))
        deadline = Deadline.after(min(wait, MAX_WAIT_S), cancelled=self._closing)
        with request.parked():
            while (found := self._shelf.newest()) is None or found.version == after:
                left = deadline.remaining()
                if left <= 0 or self._closing.is_set() or not request.connected():
                    break
                self._shelf.wait_newer(after, deadline=Deadline.after(min(left, _SLICE_S), cancelled=self._closing))
        if found is not None and found.version != after:
            return Reply.message(found)
        if found is None and not after:
            raise VersionNotSet("this depot has no version yet. Publish one.")
        return Reply(204)

    def manifest(self, request: Request, stack: ExitStack) -> Reply:
        """The sealed bytes of a manifest."""
        holding = stack.enter_context(self._shelf.holding(request.path["version"]))
        data = holding.encoded
        tag = f'"{bytes_digest(data)}"'
        if names_tag(request.headers.get("if-none-match", ""), tag, weak=True):
            return Reply(304, headers={"ETag": tag})
        log.info("manifest served", version=holding.manifest.version, root=holding.manifest.root_digest)
        return Reply(200, (data,), len(data), {"Content-Type": "application/json", "ETag": tag})

    def file(self, request: Request, stack: ExitStack) -> Reply:
        """A file, or a range of it."""
        holding = stack.enter_context(self._shelf.holding(request.path["version"]))
        name = request.path["file"]
        nbytes = _size(holding, name)
        tag = file_tag(holding.manifest, name)
        headers = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if tag:
            headers["ETag"] = tag
        if not names_tag(request.headers.get("if-match", tag), tag, weak=False):
            message = f"{name} of version {holding.manifest.version} is not {request.headers['if-match'][:200]} but {tag}."
            return failure(412, "conflict", message, {"ETag": tag})
        if names_tag(request.headers.get("if-none-match", ""), tag, weak=True):
            return Reply(304, headers=headers)
        several = asked_ranges(request.headers, tag, nbytes) if request.method == "GET" else []
        if several:
            return self._several(holding, name, several, headers, stack)
        asked = asked_range(request.headers, tag, nbytes) if request.method == "GET" else None
        start, stop = asked if asked is not None else (0, nbytes)
        if asked is not None and start >= stop:
            message = f"{name} has {nbytes} bytes: {request.headers['range'][:80]} is outside of it."
            return failure(416, "invalid_input", message, {"Content-Range": f"bytes */{nbytes}", "ETag": tag})
        if asked is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{nbytes}"
        body: Iterator[Block] | tuple[()] = ()
        if request.method == "GET":
            body = _begun(self._blocks(holding, name, start, stop), stack)
        return Reply(206 if asked is not None else 200, body, stop - start, headers)

    def _several(
        self, holding: Holding, name: str, ranges: list[tuple[int, int]], headers: dict[str, str], stack: ExitStack
    ) -> Reply:
        """Several ranges in one answer: `multipart/byteranges`."""
        kind, nbytes = headers["Content-Type"], holding.files[name]
        heads = [
            f"\r\n--{_BOUNDARY}\r\nContent-Type: {kind}\r\nContent-Range: bytes {start}-{stop - 1}/{nbytes}\r\n\r\n".encode()
            for start, stop in ranges
        ]
        end = f"\r\n--{_BOUNDARY}--\r\n".encode()

        def blocks() -> Generator[Block, None, None]:
            for head, (start, stop) in zip(heads, ranges, strict=True):
                body = _begun(self._blocks(holding, name, start, stop), stack)
                yield memoryview(head)
                yield from body
            yield memoryview(end)

        size = sum(map(len, heads)) + sum(stop - start for start, stop in ranges) + len(end)
        headers["Content-Type"] = f"multipart/byteranges; boundary={_BOUNDARY}"
        return Reply(206, _begun(blocks(), stack), size, headers)

    def _blocks(self, holding: Holding, name: str, start: int, stop: int) -> Generator[Block, None, None]:
        for at in range(start, stop, BLOCK_NBYTES):
            deadline = Deadline.after(BLOCK_WAIT_S, cancelled=self._closing)
            yield from holding.sendable(name, at, min(at + BLOCK_NBYTES, stop), deadline=deadline)


def _begun(blocks: Generator[Block, None, None], stack: ExitStack) -> Iterator[Block]:
    """The blocks, the first of which is there: so a problem with it becomes a status."""
    stack.callback(blocks.close)
    first = next(blocks, None)
    return blocks if first is None else chain((first,), blocks)


def _size(holding: Holding, name: str) -> int:
    nbytes = holding.files.get(name)
    if nbytes is None:
        raise NotFound(f"version {holding.manifest.version} has no file {name[:200]!r}: it has {', '.join(holding.files)}.")
    return nbytes


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidInput(f"wait must be zero or more seconds, not {text[:40]!r}.")
    return seconds
