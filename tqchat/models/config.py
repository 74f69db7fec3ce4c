"""config.json, read with care: its values come from strangers."""

from typing import Any

from tqchat.models.errors import ModelError

# Numbers whose inverses are normal in float32 too.
SMALLEST, LARGEST = 1e-37, 1e37

# What a shape lists one by one must not fill the memory.
_MOST = {"num_hidden_layers": 1024, "head_dim": 1 << 16, "global_head_dim": 1 << 16}


class Config(dict[str, Any]):
    """The keys of a model's config.json. `name` is the model's, for messages."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.name = name

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError."""
        value = self.get(key)
        value = default if value is None else value
        most = _MOST.get(key, 2**31 - 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise ModelError(
                f"{self.name}: config.json needs a positive number {key!r} of at most {most}."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number that float32 can hold. Raises ModelError."""
        value = self.get(key)
        value = default if value is None else value
        # Compared as it is: an integer may be past what float() takes.
        if (type(value) is int or type(value) is float) and SMALLEST < value < LARGEST:
            return float(value)
        raise ModelError(f"{self.name}: config.json needs a positive number {key!r}.")

    def section(self, key: str) -> "Config":
        """The object under `key`, empty if there is none. Raises ModelError."""
        value = self.get(key)
        if not isinstance(value, dict | None):
            raise ModelError(f"{self.name}: {key!r} in config.json is not an object.")
        return Config(self.name, value or {})
