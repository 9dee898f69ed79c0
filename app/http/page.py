"""The page at `/`: one static file. Its own script and style are the only ones that a browser will run."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI, Request, Response

_FILE = Path(__file__).parent / "static" / "index.html"


def add_page(app: FastAPI) -> None:
    html = _FILE.read_bytes()
    headers = {
        "Content-Security-Policy": content_security_policy(html.decode()),
        "Permissions-Policy": "microphone=(self)",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",  # cached, but revalidated: a new server has a new page
        "ETag": f'"{hashlib.sha256(html).hexdigest()[:32]}"',
    }

    @app.api_route("/", methods=["GET", "HEAD"])
    async def page(http: Request) -> Response:
        if headers["ETag"] in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(html, headers=headers, media_type="text/html")


def content_security_policy(html: str) -> str:
    """Allows the page's own script and style, media that the user attached, and this server."""
    directives = {
        "default-src": "'none'",
        "script-src": _hash_of("script", html),
        "style-src": _hash_of("style", html),
        "img-src": "data: blob:",
        "media-src": "data: blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in directives.items())


def _hash_of(tag: str, html: str) -> str:
    """The CSP source of the only such element: a hash of its content."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
