"""Chat templates: from messages to the string, and the token ids, that a model was trained on."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tqchat.chat.conversation import Message
from tqchat.chat.errors import ChatError
from tqchat.chat.files import read_json, read_text
from tqchat.chat.marks import Marks, opened_thought, spelled, without_thought
from tqchat.chat.renderer import RENDERER
from tqchat.chat.sealed import seal

_DEFAULT = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content + '\\n\\n' }}
{%- else %}{{ message.role | capitalize + ': ' + message.content + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
_LONGEST_TEMPLATE = 1 << 20


class PromptTokenizer(Protocol):
    """What a template needs of a tokenizer."""

    @property
    def alphabet(self) -> str: ...
    @property
    def marks(self) -> Marks | None: ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def encode_prompt(self, sealed: str) -> list[int]: ...


class _Refused(ChatError):
    """The template raised an error of its own."""


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template, or a plain one (`is_default`) where the model brings none."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Variables such as `bos_token`, with the tokens as they are spelled."""
    is_default: bool = False

    @classmethod
    def from_folder(cls, path: Path, name: str = "default") -> "ChatTemplate":
        """The template called `name` of a model in Hugging Face's layout.

        In order: chat_template.jinja (the default one) or additional_chat_templates/NAME.jinja,
        then `chat_template` of tokenizer_config.json, one string or a list of named ones. Raises
        ChatError for files that cannot be read.
        """
        config = read_json(path / "tokenizer_config.json")
        special = read_json(path / "special_tokens_map.json") | config
        special_tokens = {
            key: token
            for key, value in special.items()
            if key.endswith("_token") and (token := token_text(value)) is not None
        }
        own_file = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
        source = read_text(path / f"{own_file}.jinja")
        if source is None:
            source = _named(config.get("chat_template"), name)
        return cls._checked(source, special_tokens)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "ChatTemplate":
        """From a GGUF file's metadata, `tokenizer.chat_template`. Raises ChatError."""
        tokens = metadata.get("tokenizer.ggml.tokens") or []
        special_tokens = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(token, int) and 0 <= token < len(tokens):
                special_tokens[f"{name}_token"] = str(tokens[token])
        return cls._checked(metadata.get("tokenizer.chat_template"), special_tokens)

    @classmethod
    def _checked(cls, source: Any, special_tokens: Mapping[str, str]) -> "ChatTemplate":
        if source is None:
            return cls(_DEFAULT, {"bos_token": ""} | dict(special_tokens), is_default=True)
        if not isinstance(source, str) or len(source) > _LONGEST_TEMPLATE:
            raise ChatError("The model's chat template is not a text of at most 1 MB.")
        return cls(source, special_tokens)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **switches: Any
    ) -> str:
        """The prompt as text. `switches` are variables of the template's (`enable_thinking=...`).

        A system message that the template refuses or leaves out is put at the head of the first
        user message. Raises ChatError: the template fails, refuses the messages, takes more than
        5 seconds or 1 GB, or writes far more than it was given.
        """
        return self.render_sealed(messages, "", add_generation_prompt, **switches)

    def render_sealed(
        self,
        messages: Sequence[Message],
        alphabet: str,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> str:
        """`render`, with the characters of `alphabet` that come from messages sealed."""
        variables = {
            **self.special_tokens,
            "add_generation_prompt": add_generation_prompt,
            **switches,
        }
        system = messages[0].content.strip() if _has_system(messages) else ""
        try:
            text = self._ask(messages, variables, alphabet)
        except _Refused:
            if not _has_system(messages):
                raise
        else:
            if seal(system, alphabet) in text:
                return text
        return self._ask(_fold(system, messages[1:]), variables, alphabet)

    def prompt_ids(
        self,
        tokenizer: PromptTokenizer,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> list[int]:
        """The prompt as token ids.

        Control tokens come from the template alone: what messages hold reaches the model as
        ordinary text. An answer that comes last is begun and not ended: the model goes on with it.
        Raises ChatError, as `render` does.
        """
        marks = tokenizer.marks
        if add_generation_prompt and messages and messages[-1].role == "assistant":
            answer = messages[-1].content
            asked = self.prompt_ids(tokenizer, messages[:-1], **switches)
            if marks:
                return asked + marks.begun(answer, tokenizer.encode)
            opened = opened_thought(asked, tokenizer.decode)
            return asked + tokenizer.encode_prompt(
                spelled(answer, opened, lambda text: seal(text, tokenizer.alphabet))
            )
        messages = [
            replace(m, content=without_thought(m.content)) if m.role == "assistant" else m
            for m in messages
        ]
        return tokenizer.encode_prompt(
            self.render_sealed(messages, tokenizer.alphabet, add_generation_prompt, **switches)
        )

    def end_of_turn(self, control: re.Pattern[str]) -> str | None:
        """The token, of those that `control` matches, that follows an assistant's message."""
        answer = "Paris"
        turn = [Message("user", "Where?"), Message("assistant", answer)]
        try:
            _, found, rest = self.render(turn, add_generation_prompt=False).rpartition(answer)
        except _Refused:
            return None
        match = control.match(rest.lstrip())
        return match[0] if found and match else None

    def knows(self, switches: Iterable[str]) -> bool:
        """Whether one of these variables means something to the template."""
        return any(re.search(rf"\b{name}\b", self.source) for name in switches)

    def _ask(self, messages: Sequence[Message], variables: dict[str, Any], alphabet: str) -> str:
        reply = RENDERER.ask(
            {
                "template": self.source,
                "variables": variables,
                "alphabet": alphabet,
                "messages": [{"role": m.role, "content": m.content} for m in messages],
            }
        )
        if "refused" in reply:
            raise _Refused(
                f"The model's chat template refuses this conversation: {reply['refused']}"
            )
        if "error" in reply:
            raise ChatError(f"The model's chat template cannot be used: {reply['error']}.")
        return str(reply["text"])


def thinking(think: bool | None) -> dict[str, Any]:
    """A template's variables that have a model think first or not, by the names that there are.

    Qwen 3 and SmolLM3 know `enable_thinking`, Granite and DeepSeek `thinking`; gpt-oss always
    thinks, but more or less. None: as the template has it.
    """
    if think is None:
        return {}
    effort = {} if think else {"reasoning_effort": "low"}
    return {"enable_thinking": think, "thinking": think} | effort


def token_text(value: Any) -> str | None:
    """A token as tokenizer_config.json has it: a string, or an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named(templates: Any, name: str) -> Any:
    """The template called `name` of a list of them; one that is no list is called "default"."""
    if isinstance(templates, list):
        for entry in templates:
            if isinstance(entry, dict) and entry.get("name") == name:
                return entry.get("template")
        return None
    return templates if name == "default" else None


def _has_system(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[0].role == "system"


def _fold(system: str, turns: Sequence[Message]) -> Sequence[Message]:
    if not system:
        return turns
    if turns and turns[0].role == "user":
        return [Message("user", f"{system}\n\n{turns[0].content}"), *turns[1:]]
    return [Message("user", system), *turns]
