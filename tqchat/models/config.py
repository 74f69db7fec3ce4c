"""config.json, read with care: its values come from strangers."""

from typing import Any

from tqchat.models.errors import ModelError


class Config(dict[str, Any]):
    """The keys of a model's config.json. `name` is the model's, for messages."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.name = name

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise ModelError(f"{self.name}: config.json needs a positive number {key!r}.")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number. Raises ModelError."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelError(f"{self.name}: config.json needs a positive number {key!r}.")
        return float(value)
