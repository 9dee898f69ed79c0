import io
import logging
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path

import pytest

from deployments.errors import FetchFailed, InvalidMedia, ServingError
from deployments.runtime.call_record import begin_call
from deployments.runtime.logs import VERBOSE, set_up_logs


@pytest.fixture(autouse=True)
def unchanged_logger() -> Iterator[None]:
    logger = logging.getLogger("ray.serve")
    before = list(logger.filters)
    yield
    logger.filters[:] = before


def logged(error: Exception, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    set_up_logs()
    set_up_logs()
    try:
        raise error
    except type(error):
        logging.getLogger("ray.serve").exception("Request failed.")
    (record,) = caplog.records
    return record


def test_a_clients_error_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    record = logged(InvalidMedia("The image is damaged."), caplog)
    assert record.getMessage() == "refused with 422: The image is damaged."
    assert record.levelname == "INFO"
    assert record.exc_info is None


def test_a_media_hosts_error_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    record = logged(FetchFailed("The media host answered 500."), caplog)
    assert record.getMessage() == "refused with 502: The media host answered 500."
    assert record.exc_info is None


def test_a_line_names_its_item(caplog: pytest.LogCaptureFixture) -> None:
    error = InvalidMedia("The image is damaged.")

    def call() -> None:
        begin_call("messages[0].content[2]")
        logging.getLogger("ray.serve").warning("This looks odd.")
        error.param = "messages[0].content[2]"
        raise error

    set_up_logs()
    with pytest.raises(InvalidMedia):
        copy_context().run(call)
    assert [record.item for record in caplog.records] == ["messages[0].content[2]"]  # type: ignore[attr-defined]
    caplog.clear()
    assert logged(error, caplog).item == "messages[0].content[2]"  # type: ignore[attr-defined]  # by Serve
    caplog.clear()
    assert not hasattr(logged(InvalidMedia("Another."), caplog), "item")


@pytest.mark.parametrize("error", [ServingError("The model failed."), KeyError("a bug")])
def test_an_error_of_the_server_keeps_its_traceback(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    record = logged(error, caplog)
    assert record.getMessage() == "Request failed."
    assert record.levelname == "ERROR"
    assert record.exc_info is not None


@pytest.mark.parametrize(("verbose", "shown"), [("", ["bad"]), ("1", ["well", "bad"])])
def test_a_console_has_the_warnings_and_a_file_all(
    verbose: str,
    shown: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    logger, console = logging.getLogger("ray.serve"), io.StringIO()
    file = logging.FileHandler(tmp_path / "log")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(console), file])
    monkeypatch.setenv(VERBOSE, verbose)
    set_up_logs()
    logger.info("well")
    logger.warning("bad")
    file.close()
    assert console.getvalue().split() == shown
    assert (tmp_path / "log").read_text().split() == ["well", "bad"]
