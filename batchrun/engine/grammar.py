"""What the engine asks of a grammar that a row's text must follow: which tokens may come next, and where the text ends.

Knows neither schemas nor text; who compiles constraints is not the engine's matter.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

TokenBits = NDArray[np.int32]  # [num_rows, num_words]: token t is bit t % 32 of word t // 32


ConstraintName = Literal["json_schema", "regex", "guided_choice", "grammar"]
CONSTRAINT_NAMES: tuple[ConstraintName, ...] = get_args(ConstraintName)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a row's text must be, as the user wrote it; of choices, `text` is a JSON list."""

    name: ConstraintName
    text: str


class Matcher(Protocol):
    """Where one sequence stands in its grammar."""

    @property
    def has_ended(self) -> bool:
        """Whether the text is complete and cannot go on."""
        ...

    @property
    def failure(self) -> str | None:
        """Why nobody can say what may come next; None while it can be said."""
        ...

    def accept(self, token: int) -> None:
        """The sequence goes on with this token."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A matcher, and tokens that may follow: what is allowed is asked for before each of them and behind the last."""

    matcher: Matcher
    draft: tuple[int, ...] = ()


class Grammar(Protocol):
    """A compiled constraint. Any number of sequences may follow it at a time."""

    def start(self) -> Matcher:
        """At the beginning of a text."""
        ...

    def allowed(self, asked: list[Asked]) -> TokenBits:
        """The tokens that may come next, a row for each of the asked and one more for each token of its draft.

        The matchers may be those of other grammars. Rows behind a draft's token that is not allowed mean nothing.
        """
        ...
