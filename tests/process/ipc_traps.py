"""Faults for the processes of `ipc_peers`: to die, or to stop, at a message."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import wraps
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import zmq

from weightcast.publish.clerk import Clerk
from weightcast.publish.desk import Desk
from weightcast.transports.ipc.attachment import Attachment
from weightcast.transports.ipc.host_memory import HostDevice
from weightcast.transports.ipc.lifeline import Lifeline, Line
from weightcast.transports.ipc.messages import decode_from_publisher

LATER_S = 0.02  # for a message to leave, and for the other side to act on it


class Fault(NamedTuple):
    """What happens to a process: the moment is before, at once after or a little later than the n-th time at a point."""

    point: str
    moment: str
    nth: int = 0
    how: str = "kill"

    def __str__(self) -> str:
        return f"{self.how} {self.moment} {self.point} {self.nth}"


class Trap:
    """Springs at its fault, once."""

    def __init__(self, fault: Fault, notice: Connection) -> None:
        self._fault, self._notice, self._count, self._lock = fault, notice, 0, threading.Lock()

    def pass_by(self, point: str, *, after: bool) -> None:
        if point != self._fault.point or after == (self._fault.moment == "before"):
            return
        with self._lock:
            self._count += 1
            if self._count - 1 != self._fault.nth:
                return
        if self._fault.moment == "later":
            time.sleep(LATER_S)
        self._notice.send(time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL if self._fault.how == "kill" else signal.SIGSTOP)

    def around(self, owner: type, method: str, name: Callable[..., str]) -> None:
        """Spring before or after a method is called; `name` tells the point from its arguments."""
        inner = getattr(owner, method)

        @wraps(inner)
        def outer(*args: Any, **options: Any) -> Any:
            point = name(*args)
            self.pass_by(point, after=False)
            result = inner(*args, **options)
            self.pass_by(point, after=True)
            return result

        setattr(owner, method, outer)

    def set_for_trainer(self) -> None:
        """Every message that a publisher takes or sends, and every block that it copies."""
        self.around(Desk, "_greet", lambda *_: "take hello")
        self.around(Desk, "_take_up", lambda *_: "take lifeline")
        self.around(Clerk, "answer", lambda _, __, message: f"take {_kind(message)}")
        self.around(zmq.Socket, "send_multipart", lambda _, frames, *__: f"send {_kind(decode_from_publisher(frames[1]))}")
        self.around(Line, "grant", lambda *args: "send descriptor" if len(args) == 3 else "send grant")
        self.around(HostDevice, "copy", lambda *_: "copy")

    def set_for_receiver(self) -> None:
        """Every message that a receiver sends or takes."""
        self.around(Attachment, "send", lambda _, message: f"send {_kind(message)}")
        self.around(Lifeline, "take_up", lambda *_: "lifeline")
        self.around(Lifeline, "descriptor", lambda *_: "descriptor")
        self.around(Lifeline, "_answer", lambda *_: "lifeline answer")
        take = Attachment._take

        def taken(attachment: Attachment) -> object:
            message = take(attachment)
            self.pass_by(f"take {_kind(message)}", after=True)
            return message

        Attachment._take = taken  # type: ignore[method-assign,assignment]


def _kind(message: object) -> str:
    return type(message).__name__.lower()
