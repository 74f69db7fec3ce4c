"""Message text that cannot be taken for a control token.

A chat template writes control tokens and messages into one string, where `<|im_end|>` from the
template and `<|im_end|>` from a pasted document look the same. So before a template sees a
message, the characters that control tokens are told by (its *alphabet*: `<`, `|`, `[` ...) are
sealed: each becomes a lone surrogate, a code point that no text in Unicode can hold. What still
spells a control token in the template's output was then written by the template, and the rest is
unsealed. Characters map one to one, so a template may trim, cut, join or change the case of a
message without opening a seal; it can at worst fail to find what it looks for.
"""

import re
from collections.abc import Iterable
from typing import Any, Self, SupportsIndex

_FIRST_SEAL = 0xD800  # The high surrogates: two of them never join into one character.
_LAST_SEAL = 0xDBFF
_SURROGATES = re.compile("[\ud800-\udfff]")


def alphabet_of(control_tokens: Iterable[str]) -> str:
    """The characters to seal, so that none of `control_tokens` can be spelled without one.

    Letters, digits and white space stay as they are, for templates that look at them, unless a
    token has nothing else. Raises ValueError if there are more than 1,024 characters to seal.
    """
    characters: set[str] = set()
    for token in control_tokens:
        characters.update([c for c in token if not (c.isalnum() or c.isspace())] or token)
    if len(characters) > _LAST_SEAL - _FIRST_SEAL + 1:
        raise ValueError("too many characters to seal")
    return "".join(sorted(characters))


def well_formed(text: str) -> str:
    """`text` with U+FFFD for lone surrogates, which UTF-8 and so tokenizers cannot hold."""
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text)


def seal(text: str, alphabet: str) -> str:
    """`text` with the characters of `alphabet` sealed. As long as `text`."""
    table = {ord(c): _FIRST_SEAL + index for index, c in enumerate(alphabet)}
    return well_formed(text).translate(table)


def unseal(text: str, alphabet: str) -> str:
    """What `seal` was given, and what was written around it since."""
    table = {_FIRST_SEAL + index: c for index, c in enumerate(alphabet)}
    return well_formed(text.translate(table))


class SealedStr(str):
    """A sealed string that a template can look into.

    Tests and searches (`in`, `==`, `startswith`, `split` ...) see the plain characters; what they
    return, and what is written out, is sealed. Methods not named here see sealed characters.
    """

    _plain: str

    def __new__(cls, sealed: str, plain: str) -> Self:
        """`plain` is as long as `sealed` and differs from it only where that is sealed."""
        self = super().__new__(cls, sealed)
        self._plain = plain
        return self

    @classmethod
    def join_all(cls, parts: Iterable[str]) -> Self:
        parts = list(parts)
        return cls("".join(parts), "".join(map(_plain_of, parts)))

    def __str__(self) -> Self:
        return self

    def __add__(self, other: str) -> Self:
        return self.join_all([self, other])

    def __radd__(self, other: str) -> Self:
        return self.join_all([other, self])

    def __getitem__(self, key: SupportsIndex | slice) -> Self:
        return type(self)(super().__getitem__(key), self._plain[key])

    def __contains__(self, part: object) -> bool:
        return _plain_of(part) in self._plain

    def __eq__(self, other: object) -> bool:
        return bool(self._plain == _plain_of(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._plain != _plain_of(other))

    def __hash__(self) -> int:
        return hash(self._plain)

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        return self._plain.startswith(_plain_of(prefix), *bounds)

    def endswith(self, suffix: Any, *bounds: Any) -> bool:
        return self._plain.endswith(_plain_of(suffix), *bounds)

    def find(self, part: str, *bounds: Any) -> int:
        return self._plain.find(_plain_of(part), *bounds)

    def rfind(self, part: str, *bounds: Any) -> int:
        return self._plain.rfind(_plain_of(part), *bounds)

    def count(self, part: str, *bounds: Any) -> int:
        return self._plain.count(_plain_of(part), *bounds)

    def strip(self, chars: str | None = None) -> Self:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> Self:
        return self[len(self) - len(self._plain.lstrip(_plain_of(chars))) :]

    def rstrip(self, chars: str | None = None) -> Self:
        return self[: len(self._plain.rstrip(_plain_of(chars)))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Self]:  # type: ignore[override]
        return self._cut(self._plain.split(_plain_of(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Self]:  # type: ignore[override]
        return self._cut(self._plain.rsplit(_plain_of(sep), maxsplit), sep)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return super().replace(old, new, count)
        first, *rest = self.split(old, count)
        return self.join_all([first, *(piece for part in rest for piece in (new, part))])

    def _cut(self, parts: list[str], sep: str | None) -> list[Self]:
        """The sealed pieces for `parts`, which the plain form has between separators."""
        pieces = []
        start = 0
        for part in parts:
            if sep is None:
                start = self._plain.index(part, start)
            pieces.append(self[start : start + len(part)])
            start += len(part) + len(sep or "")
        return pieces


def _plain_of(value: Any) -> Any:
    """What a method of `str` takes for `value`."""
    return value._plain if isinstance(value, SealedStr) else value
