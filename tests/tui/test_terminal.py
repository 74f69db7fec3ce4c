"""What the terminal sends, cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual.message import Message

from tqchat.tui.terminal import TerminalParser

START, END = "\x1b[200~", "\x1b[201~"


def feed(*pieces: str) -> list[Message]:
    parser = TerminalParser()
    return [message for piece in pieces for message in parser.feed(piece)]


@given(st.text().filter(lambda text: END not in text), st.data())
def test_a_paste_is_one_event_however_it_is_cut(text: str, data: st.DataObject) -> None:
    stream = f"a{START}{text}{END}b"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    messages = feed(*[piece for piece in pieces if piece])
    assert [type(m) for m in messages] == [events.Key, events.Paste, events.Key]
    assert isinstance(messages[1], events.Paste)
    assert messages[1].text == text


def test_an_escape_and_enter_in_a_paste_press_nothing() -> None:
    messages = feed(f"{START}red\x1b[31m text\r\x1b{END}")
    assert [type(m) for m in messages] == [events.Paste]


def test_two_pastes_and_keys_between() -> None:
    messages = feed(f"{START}one{END}x{START}two{END}")
    assert [m.text if isinstance(m, events.Paste) else "key" for m in messages] == [
        "one",
        "key",
        "two",
    ]


@pytest.mark.parametrize(
    ("sent", "key"),
    [
        ("\r", "enter"),
        ("\n", "ctrl+j"),
        ("\x1b\r", "alt+enter"),
        ("\x1b[13;2u", "shift+enter"),
        ("\x1b[27;2;13~", "shift+enter"),
        ("\x1b[A", "up"),
    ],
)
def test_keys(sent: str, key: str) -> None:
    (message,) = feed(sent)
    assert isinstance(message, events.Key)
    assert message.key == key
