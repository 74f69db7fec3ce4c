"""A sealed string does what `str` does, and stays sealed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.families import EXAMPLES
from tqchat.chat.sealed import SealedStr, alphabet_of, seal, unseal, well_formed

ALPHABET = "<|>/_"
TEXT = st.text(st.sampled_from(ALPHABET + "ab \n\N{GREEK SMALL LETTER ALPHA}"), max_size=12)
ANY_TEXT = st.text(st.characters())


def sealed(text: str) -> SealedStr:
    return SealedStr(seal(text, ALPHABET), text)


def opened(value: Any) -> Any:
    """`value` with every string unsealed, none of which may show its alphabet before."""
    if isinstance(value, list):
        return [opened(part) for part in value]
    if isinstance(value, SealedStr):
        assert not set(value.join_all(value)) & set(ALPHABET)
        return unseal("".join(str.__iter__(value)), ALPHABET)
    return value


@EXAMPLES
@given(ANY_TEXT)
def test_sealing_is_undone_by_unsealing(text: str) -> None:
    shut = seal(text, ALPHABET)
    assert len(shut) == len(text)
    assert not set(shut) & set(ALPHABET)
    assert unseal(shut, ALPHABET) == well_formed(text)
    well_formed(text).encode()


CALLS = [
    ("strip",), ("lstrip",), ("rstrip",), ("strip", "<a"), ("lstrip", "|"), ("rstrip", ">\n"),
    ("split",), ("split", None, 1), ("split", "<"), ("split", "a<", 1), ("rsplit", "|", 1),
    ("rsplit",), ("rsplit", None, 1), ("replace", "<", "b"), ("replace", "a|", "", 1),
    ("replace", "", "b"), ("startswith", "<|"), ("startswith", ("<", "a")), ("endswith", "|>"),
    ("find", "|"), ("find", "/", 2), ("rfind", "a<"), ("count", "<"), ("upper",), ("lower",),
    ("__contains__", "|>"), ("__eq__", "<|"), ("__ne__", "<|"), ("__len__",), ("splitlines",),
    ("__getitem__", slice(1, -1)), ("__getitem__", slice(None, None, -2)), ("__hash__",),
    ("__add__", "a"), ("partition", " "), ("isspace",), ("title",), ("join", ["a", "b"]),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(repr, call)))
@EXAMPLES
@given(text=TEXT)
def test_a_method_gives_what_str_gives(call: tuple[Any, ...], text: str) -> None:
    name, *arguments = call
    expected = getattr(text, name)(*arguments)
    given_back = getattr(sealed(text), name)(*arguments)
    if isinstance(given_back, str) and not isinstance(given_back, SealedStr):
        given_back = unseal(given_back, ALPHABET)
    if isinstance(given_back, list | tuple):
        given_back = [unseal("".join(map(str, part)), ALPHABET) for part in given_back]
        expected = list(expected)
    assert opened(given_back) == expected


@EXAMPLES
@given(TEXT, TEXT)
def test_sealed_strings_work_on_each_other(a: str, b: str) -> None:
    assert opened(sealed(a) + sealed(b)) == a + b
    assert opened("x" + sealed(a)) == "x" + a
    assert (sealed(a) == sealed(b)) == (a == b)
    assert (sealed(b) in sealed(a)) == (b in a)
    assert sealed(a).startswith(sealed(b)) == a.startswith(b)
    assert (sealed(a) + "y").endswith("y")


def test_more_characters_than_there_are_seals() -> None:
    with pytest.raises(ValueError, match="too many"):
        alphabet_of([chr(0xE000 + index) for index in range(1025)])
