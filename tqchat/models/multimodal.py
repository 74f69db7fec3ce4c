"""Models that also see or hear: their text part, which is a language model of its own."""

from typing import Any

# Before the text model's names, and what stands for it in the names of the model alone.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.": "",
}
# Of everything else: the first part of a name, "model." aside.
_OTHERS = {
    "audio_tower",
    "embed_audio",
    "embed_vision",
    "multi_modal_projector",
    "vision_model",
    "vision_tower",
    "visual",
}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as the text part alone would have it; what both say, the text part knows best."""
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def has_other_parts(config: dict[str, Any]) -> bool:
    return any(f"{part}_config" in config for part in ("vision", "audio"))


def text_name(name: str) -> str | None:
    """A tensor's name in the text part alone; None if it belongs to another part."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None if name.removeprefix("model.").split(".")[0] in _OTHERS else name
