"""What takes longer than a second is shown: on a terminal in one line, elsewhere in the log."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time

import pytest

from tests.inside import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> progress.ProgressLine:
    monkeypatch.setattr(progress, "_EVERY_S", 0.02)
    monkeypatch.setattr(progress, "LINE", progress.ProgressLine())
    return progress.LINE


def wait_for_the_end() -> None:
    for thread in threading.enumerate():
        if thread.name == "flowkv-progress":
            thread.join(60)


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_has_one_line_which_goes_away(
    rich: bool, reports: progress.ProgressLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress.during("naming the model"):
        while "naming the model: " not in sys.stderr.getvalue():
            time.sleep(0.01)
        with progress.during("a shorter work"):
            while "a shorter work: " not in sys.stderr.getvalue():
                time.sleep(0.01)
    wait_for_the_end()
    shown = sys.stderr.getvalue()
    assert ("\x1b[2m" in shown) <= rich and "\n" not in shown and shown.endswith("\r")
    *_, last, end = shown.split("\r")
    assert not end and set(last) <= set(" \x1b[02m") and last.count(" ") >= len("flowkv: naming")


def test_the_log_has_what_no_terminal_shows(
    reports: progress.ProgressLine,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(logging.INFO, "flowkv"), progress.during("naming the model"):
        while not caplog.records:
            time.sleep(0.01)
    wait_for_the_end()
    assert caplog.records[0].getMessage() == "flowkv: naming the model: 0 s"
    assert capsys.readouterr() == ("", "")


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 600.0)
    monkeypatch.setattr(progress, "LINE", reports := progress.ProgressLine())
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.during("naming the model"):
        assert reports._running
    wait_for_the_end()
    assert not sys.stderr.getvalue() and not reports._running, "no thread waits for more"
