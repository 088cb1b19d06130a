"""Logging: one form for everything, bounded, and never in the way."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest
from twinplane.shared import log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_root_logger():
    root = logging.getLogger()
    before = (root.handlers, root.level)
    yield
    root.handlers, root.level = before[0], before[1]
    logging.captureWarnings(False)


def records(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_off_a_terminal_every_line_is_json_with_the_keys_in_order():
    stream = io.StringIO()
    log.configure(stream=stream)
    log.get_logger("twinplane.control_plane.engine").info("request_finished", tokens=3)
    (record,) = records(stream)
    assert list(record)[:4] == ["timestamp", "level", "event", "logger"]
    assert record["timestamp"].endswith("Z")
    assert (record["level"], record["event"], record["logger"], record["tokens"]) == ("info", "request_finished", "control_plane.engine", 3)


def test_on_a_terminal_lines_are_for_people():
    stream = Terminal()
    log.configure(stream=stream)
    log.get_logger("x").warning("stalled", phase="FORWARD")
    assert "stalled" in stream.getvalue() and not stream.getvalue().startswith("{")


def test_bound_fields_follow_the_context_and_end_with_it():
    stream = io.StringIO()
    log.configure(stream=stream)
    logger = log.get_logger("x")
    with log.bound(request_id="r1"):
        logger.info("inside")
    logger.info("outside")
    inside, outside = records(stream)
    assert inside["request_id"] == "r1" and "request_id" not in outside


def test_records_of_libraries_come_out_in_the_same_form():
    stream = io.StringIO()
    log.configure(stream=stream)
    logging.getLogger("grpc._server").warning("lost %s", "peer")
    logging.getLogger("grpc._server").info("not heard at level info")
    (record,) = records(stream)
    assert (record["event"], record["logger"], record["level"]) == ("lost peer", "grpc._server", "warning")


def test_levels_below_the_chosen_one_are_silent():
    stream = io.StringIO()
    log.configure("error", stream=stream)
    log.get_logger("x").warning("unheard")
    assert stream.getvalue() == ""


def test_an_exception_is_one_line_of_json_and_remembered_as_last_error():
    stream = io.StringIO()
    log.configure(stream=stream)
    try:
        raise FileNotFoundError("no weights")
    except FileNotFoundError:
        log.get_logger("x").exception("load_failed")
    (record,) = records(stream)
    assert "Traceback" in record["exception"]
    assert log.last_error() == "load_failed: FileNotFoundError: no weights"


def test_a_reader_that_went_away_does_not_take_the_process_down():
    stream = io.StringIO()
    log.configure(stream=stream)
    stream.close()
    log.get_logger("x").error("nobody_listens")
    assert log.last_error() == "nobody_listens"


def test_limiter_admits_one_per_interval_and_says_how_many_were_left_out():
    stream = io.StringIO()
    log.configure(stream=stream)
    limiter = log.Limiter(interval_s=0.05)
    logger = log.get_logger("x")
    for _ in range(5):
        limiter.log(logger.warning, "stalled", key="data")
    limiter.log(logger.warning, "stalled", key="control")
    threading.Event().wait(0.06)
    limiter.log(logger.warning, "stalled", key="data")
    assert [record.get("left_out") for record in records(stream)] == [None, None, 4]


def test_limiter_memory_is_bounded_whatever_the_keys():
    limiter = log.Limiter(interval_s=60, max_keys=8)
    for key in range(1000):
        limiter.admit(key)
    assert len(limiter._seen) == 8
