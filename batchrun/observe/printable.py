"""Text from data made safe to show: a prompt or a message must not move a terminal's cursor.

Knows nothing of where it is shown.
"""


def printable(text: str) -> str:
    """`text` with control, format and undecodable characters written as escapes; newlines and tabs stay."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def one_line(text: str) -> str:
    """`printable` with every run of blanks and line breaks made one blank."""
    return printable(" ".join(text.split()))
