"""A media host that sends exactly the headers it is given, and keeps targets as they were sent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.cluster import MEDIA_HOST


@dataclass
class PageHost:
    """Serves `pages`: target -> status, headers and body. Records the targets exactly as they were sent."""

    url: str = ""
    pages: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    agents: list[str | None] = field(default_factory=list)


@contextmanager
def hosting(address: str = MEDIA_HOST) -> Iterator[PageHost]:
    """Runs a host in threads of its own."""
    host = PageHost()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            host.asked.append(self.path)
            host.agents.append(self.headers["User-Agent"])
            status, headers, body = host.pages.get(self.path, (404, {}, b"nothing here"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:], b""))
            else:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    with Listener((address, 0), Handler) as listener:
        host.url = f"http://{f'[{address}]' if ':' in address else address}:{listener.server_port}"
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield host
        finally:
            listener.shutdown()
            thread.join()
