"""Data must not steer a terminal."""

from hypothesis import given
from hypothesis import strategies as st

from batchrun.observe.printable import one_line, printable


def test_escape_codes_become_visible_and_text_stays() -> None:
    assert printable("\x1b]0;owned\x07 naïve 漢字\t\n\r\u202e") == "\\x1b]0;owned\\x07 naïve 漢字\t\n\\r\\u202e"


@given(st.text(st.characters(codec=None)))
def test_nothing_but_newline_and_tab_survives_that_is_not_printable(text: str) -> None:
    assert all(char.isprintable() or char in "\n\t" for char in printable(text))
    assert one_line(text).isprintable()
