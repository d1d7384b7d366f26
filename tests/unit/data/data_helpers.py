"""What several tests of the data room share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEADER = "<|im_start|>{{ m.role }}\n"
TAIL = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN_TEMPLATE = "{% for m in messages %}" + HEADER + "{{ m.content }}<|im_end|>\n{% endfor %}" + TAIL
MARKED_TEMPLATE = (
    "{% for m in messages %}" + HEADER + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + TAIL
)
# Like Qwen3: only the last answer keeps its reasoning, and an answer without reasoning gets an empty one.
THINKING_TEMPLATE = (
    "{% for m in messages %}" + HEADER + "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + TAIL
)
MakeTokenizer = Callable[..., Any]
"""Makes a small tokenizer with a chat template."""
Write = Callable[..., str]
"""Writes a file and gives its path."""


def chat(*texts: str) -> dict[str, Any]:
    """A row of alternating user and assistant messages."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}
