from pathlib import Path

import pytest

from deployments.errors import FetchRefused, MediaTooLarge
from deployments.media.local_files import local_path, read_file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "sub").mkdir(parents=True)
    (folder / "a b.png").write_bytes(b"x")
    (folder / "sub" / "c.png").write_bytes(b"x")
    (tmp_path / "secret").write_bytes(b"x")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "in").symlink_to(folder / "sub" / "c.png")
    (folder / "loop").symlink_to(folder / "loop")
    return folder


@pytest.mark.parametrize("name", ["a%20b.png", "a b.png", "sub/c.png", "sub/../a%20b.png", "in"])
def test_files_below_the_root_are_found(root: Path, name: str) -> None:
    for prefix in ("file://", "file://localhost", "FILE:"):
        assert local_path(f"{prefix}{root}/{name}", str(root)).read_bytes() == b"x"


@pytest.mark.parametrize(
    "name",
    ["../secret", "%2e%2e/secret", "sub/../../secret", "out", "loop", "none.png", "sub", "", "../mediax"],
)
def test_other_files_are_refused_with_one_message(root: Path, name: str) -> None:
    with pytest.raises(FetchRefused, match="names no file below this server's allowed folder") as refused:
        local_path(f"file://{root}/{name}", str(root))
    assert str(root) not in refused.value.message


@pytest.mark.parametrize(
    "url", ["file://host/a", "file:a", "file://a%00", "file:///a%00b", "file:///a?b", "file:"]
)
def test_malformed_file_urls_are_refused(root: Path, url: str) -> None:
    with pytest.raises(FetchRefused, match="must have the form"):
        local_path(url, str(root))


def test_files_are_off_without_a_root(root: Path) -> None:
    with pytest.raises(FetchRefused, match="file: URLs are off"):
        local_path(f"file://{root}/in", "")


def test_the_byte_limit_is_exact(root: Path) -> None:
    (root / "five").write_bytes(b"12345")
    url = f"file://{root}/five"
    assert read_file(url, str(root), 5) == b"12345"
    with pytest.raises(MediaTooLarge, match="larger than the limit of 4 bytes"):
        read_file(url, str(root), 4)
