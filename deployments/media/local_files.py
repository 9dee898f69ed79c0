"""Reads the files that file: URLs name, below the one folder that the configuration allows."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from deployments.errors import FetchRefused, MediaTooLarge
from deployments.media.urls import CONTROL_CHARACTERS

_FILE_URL = re.compile(r"file:(?://(?:localhost)?)?(/(?!/)[^?#]*)", re.IGNORECASE | re.DOTALL)


def read_file(url: str, root: str, max_bytes: int) -> bytes:
    """Returns the content of the file; blocking work for a thread.

    Raises MediaTooLarge, or FetchRefused as `local_path` does and if the file cannot be opened.
    """
    path = local_path(url, root)
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError:
        raise FetchRefused(
            "This server is not allowed to read the file at this file: URL. Send the data inline."
        ) from None
    if len(data) > max_bytes:
        raise MediaTooLarge(f"The file is larger than the limit of {max_bytes} bytes. Send a smaller file.")
    return data


def local_path(url: str, root: str) -> Path:
    """Returns the file that a file: URL names, with links resolved.

    Raises FetchRefused, without the path in its message, if `root` is empty (files are off) or if the file
    does not lie below `root`.
    """
    if not root:
        raise FetchRefused("file: URLs are off on this server. Use an http(s) URL or send the data inline.")
    parts = _FILE_URL.fullmatch(url)
    if not parts or CONTROL_CHARACTERS.search(unquote(parts[1])):
        raise FetchRefused("The file: URL must have the form file:///folder/file, without a host.")
    allowed = Path(root).resolve()
    try:
        path = Path(unquote(parts[1])).resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        path = None
    # The same message in all cases: a client must not find out which files exist elsewhere.
    if path is None or not path.is_relative_to(allowed) or not path.is_file():
        raise FetchRefused(
            "The file: URL names no file below this server's allowed folder. Check the path or send the data"
            " inline."
        )
    return path
