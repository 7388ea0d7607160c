"""Plain servers of files, which know nothing of versions: one of thirty lines, and nginx if there is one."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
START_S = 20.0

CONFIG = """
daemon off; user root; pid {work}/pid; error_log {work}/errors; worker_processes 2;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_temp_path {work}/b; proxy_temp_path {work}/p; fastcgi_temp_path {work}/f;
  uwsgi_temp_path {work}/u; scgi_temp_path {work}/s;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@contextmanager
def static_server(root: Path) -> Iterator[str]:
    """Serves the files below a directory, whole or one range of them."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = root / self.path.partition("?")[0].lstrip("/")
            data = path.read_bytes() if path.is_file() else b"<html>there is no such page</html>"
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            ranged = asked is not None and path.is_file()
            start, stop = (int(asked[1]), min(int(asked[2]) + 1, len(data))) if ranged else (0, len(data))
            self.send_response(206 if ranged else 200 if path.is_file() else 404)
            if ranged:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            self.send_header("ETag", '"of its own"')
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            self.wfile.write(data[start:stop])

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that hangs up early
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def nginx_server(root: Path) -> Iterator[str]:
    """A real nginx over a directory."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    work = root.parent / f"nginx-{port}"
    work.mkdir()
    (work / "nginx.conf").write_text(CONFIG.format(work=work, port=port, root=root))
    process = subprocess.Popen([NGINX, "-p", work, "-c", work / "nginx.conf"], stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < until, "nginx does not listen"
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(START_S)
        process.stderr.close()
