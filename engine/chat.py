"""Chat templates, rendered exactly as Hugging Face does, and which characters of a rendering are trained on."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.engine.tokens import Tokenizer


@dataclass(frozen=True)
class ChatTemplate:
    fingerprint: str

    def render_spans(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[tuple[int, int]]]:
        raise NotImplementedError


def load_template(tokenizer: Tokenizer, choice: str | None) -> ChatTemplate | None:
    return None
