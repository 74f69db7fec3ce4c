"""The models that are recommended, from the list beside this file."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from tqchat.models.config import Config


@dataclass(frozen=True, slots=True)
class Recommended:
    """`id` on Hugging Face; `about` says what it is good for."""

    id: str
    licence: str
    about: str
    config: Config


def recommended() -> Iterator[Recommended]:
    text = resources.files("tqchat.models").joinpath("recommended.toml").read_text("utf-8")
    for one in tomllib.loads(text)["model"]:
        config = Config(one["id"], one["config"])
        yield Recommended(one["id"], one["licence"], one["about"], config)
