"""Terminal output: lines, tables, progress. With rich if it is installed, plain otherwise.

With `to_stderr`, standard output stays free for the one JSON object of `--json`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Tell = Callable[[int, int, str], None]
"""Progress callback: (done, total, current activity)."""

_QUIET_S = 5.0  # between plain lines of progress
_STYLES = {"ok": "green", "note": "dim", "warn": "yellow", "bad": "red bold"}


class Screen:
    """Output for people, on a terminal or plain.

    Args:
        to_stderr: Show all output on standard error.
    """

    def __init__(self, *, to_stderr: bool = False) -> None:
        self._file = sys.stderr if to_stderr else sys.stdout
        with contextlib.suppress(AttributeError):  # a replaced stream may lack this method
            self._file.reconfigure(errors="replace")  # type: ignore[union-attr]
        self._tty = self._file.isatty()
        self._rich: Any = None
        if importlib.util.find_spec("rich") is not None:
            from rich.console import Console

            self._rich = Console(file=self._file, highlight=False)

    def say(self, text: str = "", *, style: str = "") -> None:
        """Print a line; `style` is "bold", "dim", "green", "red", ... where colours are shown."""
        text = _printable(text)
        if self._rich is None:
            print(text, file=self._file, flush=True)
        else:
            # Long lines such as paths stay whole, so that they can be copied.
            self._rich.print(text, style=style or None, markup=False, soft_wrap=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        title: str = "",
        numbers: bool = True,
        states: Sequence[str] = (),
    ) -> None:
        """Print a table of text.

        Args:
            columns: Headings.
            rows: Cells.
            title: Written above.
            numbers: Whether all columns but the first are aligned right.
            states: "ok", "note", "warn" or "bad" of each row, for its colour.
        """
        rows = [[_printable(cell) for cell in row] for row in rows]
        if self._rich is None:
            self._plain_table(columns, rows, title, numbers)
            return
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        table = Table(
            box=box.SIMPLE_HEAD,
            title=title or None,
            title_justify="left",
            title_style="bold",
            pad_edge=False,
            header_style="bold",
            show_header=any(columns),
        )
        for number, name in enumerate(columns):
            right = numbers and number > 0
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for number, row in enumerate(rows):
            state = states[number] if number < len(states) else ""
            table.add_row(*(escape(cell) for cell in row), style=_STYLES.get(state))
        self._rich.print(table)

    def _plain_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, numbers: bool
    ) -> None:
        lines = [columns, *rows] if any(columns) else rows
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        indent = " " * (sum(widths[:-1]) + 2 * (len(widths) - 1))
        if title:
            print(f"\n{title}", file=self._file)
        for line in lines:
            cells = [
                cell.rjust(width) if numbers and i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            # A second line of the last cell is below its first.
            text = "  ".join(cells).rstrip().replace("\n", f"\n{indent}")
            print(text, file=self._file)
        print(file=self._file, flush=True)

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[Tell]:
        """Show a bar on a terminal; else a line now and then."""
        if self._rich is not None and self._tty:
            with self._bar(label) as tell:
                yield tell
            return
        started = time.monotonic()
        last = started - _QUIET_S

        def line(done: int, total: int, doing: str) -> None:
            nonlocal last
            if time.monotonic() - last >= _QUIET_S:
                last = time.monotonic()
                share = f"{done}/{total} " if total else ""
                print(f"{label}: {share}{doing}", file=self._file, flush=True)

        yield line
        print(f"{label}: {time.monotonic() - started:.1f} s", file=self._file, flush=True)

    @contextlib.contextmanager
    def _bar(self, label: str) -> Iterator[Tell]:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        parts = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=18),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[doing]}"),
        )
        with Progress(*parts, console=self._rich) as bars:
            task = bars.add_task(label, total=1, doing="")

            def tell(done: int, total: int, doing: str) -> None:
                bars.update(task, completed=done, total=total or None, doing=doing)

            yield tell
            finished = bars.tasks[0].total or 1
            bars.update(task, completed=finished, doing="")


def _printable(text: str) -> str:
    """Return text without characters that control a terminal; model output may hold some."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def one_line(text: str, width: int = 72) -> str:
    """Return the end of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= width else "..." + line[3 - width :]
