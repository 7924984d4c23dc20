"""Text that grows on a terminal is broken between words; elsewhere it stays as it is."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvkeep.cli import console


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(pieces, monkeypatch, *, columns=10, screen=Terminal, wraps=True):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", found := screen())
    with console.streamed_text(wraps=wraps) as write:
        for piece in pieces:
            write(piece)
    return found.getvalue()


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["one two", " th", "ree four"], ["one two", "three four"]),
        (["exactly ten", " columns"], ["exactly", "ten", "columns"]),
        (["0123456789", " next"], ["0123456789", "next"]),
        (["a 0123456789abcde f"], ["a", "0123456789abcde f"]),  # the terminal breaks what is too long
        (["0123456789abcde 0123456789 f"], ["0123456789abcde", "0123456789", "f"]),
        (["x\n\n  indented text"], ["x", "", "  indented", "text"]),
        (["日本語の", "長い文字列です"], ["日本語の長", "い文字列で", "す"]),
        (["to 日本語の文"], ["to 日本語", "の文"]),
        (["e\u0301te\u0301 a\u0300 la mer"], ["e\u0301te\u0301 a\u0300 la", "mer"]),
        (["a\tb c"], ["a\tb", "c"]),
        (["\x1b[31mred\x1b[0m"], ["[31mred[0m"]),
        ([], []),
    ],
)
def test_lines_break_between_words(pieces, lines, monkeypatch):
    assert shown(pieces, monkeypatch) == "".join(f"{line}\n" for line in lines)


@given(text=st.text(st.sampled_from("ab 語\n\t")), cut=st.integers(0, 40))
def test_the_words_stay_and_no_line_is_too_long(text, cut):
    with pytest.MonkeyPatch.context() as patch:
        found = shown([text[:cut], text[cut:]], patch, columns=10)
        assert found == shown(list(text), patch, columns=10)
    assert "".join(found.split()) == "".join(text.split())
    for line in found.split("\n"):
        assert "\t" in line or " " not in line.strip() or cell_len(line) <= 10, (text, found)


@pytest.mark.parametrize(("screen", "wraps"), [(io.StringIO, True), (Terminal, False)])
def test_other_text_stays_as_it_is(screen, wraps, monkeypatch):
    text = "a text of more than ten columns  "
    assert shown([text], monkeypatch, screen=screen, wraps=wraps) == f"{text}\n"
