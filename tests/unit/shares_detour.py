"""A way to a publisher that does not keep what it promises."""

import socket
import threading


class Detour:
    """A way to a publisher on which an answer stops after so many bytes, or has one byte changed behind so many."""

    def __init__(self, url, *, after=None, flip=None):
        host, port = url.rpartition("/")[2].split(":")
        self._to, self._after, self._flip = (host, int(port)), after, flip
        self._ended = threading.Event()
        self._open = []

    def __enter__(self):
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def _listen(self):
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(self._to)
            self._open += [client, server]
            for way in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pass, args=way)
                self._threads.append(thread)
                thread.start()

    def _pass(self, source, target, answers):
        source.settimeout(0.1)
        seen = 0
        while not self._ended.is_set():
            try:
                data = source.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                break
            if not data:
                break
            if answers and b"octet-stream" in data[:400]:
                seen = 0
            elif answers and b"application/json" in data[:400]:
                seen = -(1 << 40)
            if answers and self._flip is not None and seen <= self._flip < seen + len(data):
                changed = bytearray(data)
                changed[self._flip - seen] ^= 1
                data = bytes(changed)
            seen += len(data)
            if answers and self._after is not None and seen > self._after:
                self._ended.wait(10)
                break
            try:
                target.sendall(data)
            except OSError:
                break
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def __exit__(self, *_):
        self._ended.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()
