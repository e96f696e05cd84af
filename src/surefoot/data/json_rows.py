"""Rows of a JSON file, one at a time: a list of rows or JSON Lines, whatever the file's name says.

The rows may differ in shape: nothing is forced into columns, so a field that is text in one row and a list in the next
reads as it is. The file is read piece by piece, so its size does not matter.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from surefoot.errors import UserError

PIECE = 1 << 20  # bytes read at a time
LARGEST_ROW = 1 << 28  # characters: a row that has not ended by then is broken JSON, not a long text
_BLANK = re.compile(r"[ \t\r\n]*")
_NEAR_END = 16  # characters: a cut literal, number or escape is reported at most this far from the end


def read_json_rows(handle: BinaryIO, place: str) -> Iterator[Any]:
    """Read every row of a JSON list or of JSON Lines.

    Args:
        handle: the open file, at its start.
        place: the file's name for errors.

    Yields:
        The rows in order; a row that is not an object is handed on as it is.

    Raises:
        UserError: the file is cut off or is not JSON; names the line, the column and the byte.
    """
    text = _Text(handle, place)
    text.skip_blank()
    if text.peek() == "[":
        text.position += 1
        yield from _list_items(text)
        text.skip_blank()
        if text.peek():
            raise text.error("more text follows the end of the list")
        return
    while text.peek():
        yield text.value()
        text.skip_blank()


def _list_items(text: _Text) -> Iterator[Any]:
    text.skip_blank()
    if text.peek() == "]":
        text.position += 1
        return
    while True:
        yield text.value()
        text.skip_blank()
        mark = text.peek()
        text.position += 1
        if mark == "]":
            return
        if mark != ",":
            text.position -= 1
            raise text.cut_off() if not mark else text.error("expected ',' or ']' after a row")
        text.skip_blank()


class _Text:
    """A window on the file's text that moves forward; knows where in the file it stands."""

    def __init__(self, handle: BinaryIO, place: str) -> None:
        head = handle.read(PIECE)
        self.encoding = json.detect_encoding(head)
        self.decoder = codecs.getincrementaldecoder(self.encoding)()
        self.handle, self.place = handle, place
        self.parse = json.JSONDecoder().raw_decode
        self.window, self.position = "", 0
        self.lines_before, self.column_before, self.bytes_before = 0, 0, 0  # of the text that has left the window
        self.ended = False
        self._take(head)

    def peek(self) -> str:
        """The character here, or "" at the end of the file."""
        if self.position >= len(self.window) and not self.ended:
            self._more()
        return self.window[self.position : self.position + 1]

    def skip_blank(self) -> None:
        """Move to the next character that is not white space."""
        while True:
            self.position = _BLANK.match(self.window, self.position).end()  # type: ignore[union-attr]  # always matches
            if self.position < len(self.window) or self.ended:
                return
            self._more()

    def value(self) -> Any:
        """Parse one JSON value, reading on as long as it may only be cut by the window's edge."""
        while True:
            try:
                value, end = self.parse(self.window, self.position)
            except json.JSONDecodeError as error:
                at_edge = error.msg.startswith("Unterminated string") or error.pos >= len(self.window) - _NEAR_END
                if at_edge and self.ended:
                    raise self.cut_off() from None
                if not at_edge or len(self.window) - self.position > LARGEST_ROW:
                    raise self.error(error.msg, error.pos) from None
            except RecursionError:
                raise self.error("nested too deeply") from None
            else:
                # A number at the window's edge may go on; whatever else has ended is whole.
                is_whole = not isinstance(value, (int, float)) or end < len(self.window) - _NEAR_END
                if is_whole or self.ended:
                    self.position = end
                    return value
            self._more()

    def error(self, message: str, position: int | None = None) -> UserError:
        """What is wrong, with line, column and byte of the file."""
        position = self.position if position is None else position
        before = self.window[:position]
        line = self.lines_before + before.count("\n") + 1
        column = position - before.rfind("\n") if "\n" in before else self.column_before + position + 1
        byte = self.bytes_before + len(before.encode(self._plain_encoding(), "surrogatepass"))
        return UserError(
            f"{self.place}, line {line}, column {column} (byte {byte}): not valid JSON: {message}",
            hint="mend that line; every row must be a JSON object, in a list or one a line",
            key="dataset",
        )

    def cut_off(self) -> UserError:
        """The file ends inside a row; names where that row starts."""
        before = self.window[: self.position]
        line = self.lines_before + before.count("\n") + 1
        total = self.bytes_before + len(self.window.encode(self._plain_encoding(), "surrogatepass"))
        return UserError(
            f"{self.place}, line {line}: the file is cut off: it ends at byte {total}, in the middle of the JSON",
            hint="copy or download the file again, or remove what follows the last whole row",
            key="dataset",
        )

    def _plain_encoding(self) -> str:
        return {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}.get(self.encoding, self.encoding)

    def _more(self) -> None:
        """Drop what has been read, and read another piece; pieces grow with the row, so a long row costs little."""
        gone = self.window[: self.position]
        newlines = gone.count("\n")
        self.lines_before += newlines
        self.column_before = len(gone) - gone.rfind("\n") - 1 if newlines else self.column_before + len(gone)
        self.bytes_before += len(gone.encode(self._plain_encoding(), "surrogatepass"))
        self.window, self.position = self.window[self.position :], 0
        self._take(self.handle.read(max(PIECE, len(self.window))))

    def _take(self, piece: bytes) -> None:
        self.ended = not piece
        try:
            self.window += self.decoder.decode(piece, final=self.ended)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.place}, near byte {self.handle.tell() - len(piece) + error.start}: not valid {self.encoding}"
                f" text ({error.reason})",
                hint="save the file as UTF-8",
                key="dataset",
            ) from None
