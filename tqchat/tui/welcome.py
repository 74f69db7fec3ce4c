"""What the first screen says."""

from textual.content import Content

from tqchat.engine.events import ModelInfo
from tqchat.tui.entries import Fixed
from tqchat.tui.rows import EMPTY, Block, Line
from tqchat.tui.text import clean_line

_TIPS = (
    ("Enter", "sends, Ctrl-J starts a new line, Esc stops an answer"),
    ("/", "lists the commands, Ctrl-P searches them"),
    ("Paste", "a text, up to the model's context, and ask about it"),
    ("/quit", "leaves, as does Ctrl-D"),
)
_LARGER = "tqchat mlx-community/Llama-3.2-3B-Instruct-4bit"


def greeting() -> Fixed:
    width = max(len(name) for name, _ in _TIPS) + 3
    blocks: list[Block] = [
        Line(Content.styled("Hello.", "bold $primary")),
        Line(Content.styled("A model on this computer, and room for long texts.", "$text")),
        Line(EMPTY),
    ]
    for name, meaning in _TIPS:
        first = Content.styled(name.ljust(width), "$primary")
        blocks.append(Line(Content.styled(meaning, "$text-muted"), first, Content(" " * width)))
    return Fixed(blocks)


def larger_model(model: ModelInfo) -> Fixed:
    """How to get something better than the model nobody chose."""
    name = clean_line(model.name)
    text = f"{name} is small, so that it runs anywhere. For better answers start with a larger one:"
    return Fixed(
        [
            Line(Content.styled(text, "$text-muted")),
            Line(Content.styled(_LARGER, "$primary"), Content("  "), Content("  ")),
            Line(
                Content.styled(
                    "A folder or a .gguf file works too. `tqchat models` lists what is here.",
                    "$text-muted",
                )
            ),
        ]
    )
