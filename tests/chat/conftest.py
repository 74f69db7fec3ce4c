from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.chat.families import FAMILIES, write_folder
from tqchat.chat.tokenizer import Tokenizer
from tqchat.models.gguf import read_header


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's small model, by its name."""
    return cache(lambda name: write_folder(FAMILIES[name], tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def tokenizer_of(folder_of: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    return cache(lambda name: Tokenizer.from_folder(folder_of(name)))


@pytest.fixture(scope="session")
def reference_of(folder_of: Callable[[str], Path]) -> Callable[[str], PreTrainedTokenizerFast]:
    """What transformers makes of a family's folder."""
    return cache(lambda name: AutoTokenizer.from_pretrained(folder_of(name)))


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_gguf: Path) -> dict[str, Any]:
    """What the built-in model's file says of itself."""
    return read_header(smollm2_gguf).metadata
