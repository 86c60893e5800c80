"""What a conversation is: messages with a role and a content, both text."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchrun.tokenizer import Conversation


def checked(messages: Any) -> "Conversation":
    """The messages without their null fields; ValueError says what is wrong with them."""
    if not isinstance(messages, list):
        raise ValueError(f"should be a list of messages, not {type(messages).__name__}")
    kept = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} should have role and content, not be {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {number}: {key!r} should be text, not {type(message.get(key)).__name__}")
        kept.append({key: value for key, value in message.items() if value is not None})
    return kept
