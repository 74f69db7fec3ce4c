"""What can go wrong between a model's name and the model in memory."""

_LONGEST = 600


class ModelError(Exception):
    """One line that says what is wrong and what to do next.

    Names and texts in it may come from strangers' files: control characters are left out.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        line = "".join(c if c.isprintable() else "?" for c in line)
        super().__init__(line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "...")


class Stopped(Exception):
    """The user stopped it."""
