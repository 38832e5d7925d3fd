"""A prompt with its answer, as a reward model reads them: in training, in jobs and when they are asked for.

A chat goes through the model's chat template with the answer as its last message; a text is followed by the answer.
What is judged cannot speak for itself: special tokens that are spelled in an answer become spaces.
"""

from collections.abc import Sequence
from typing import Any

from shared.text.codec import TextCodec


def answered(codec: TextCodec, prompt: str | Sequence[dict[str, Any] | int] | None, answer: str) -> list[int]:
    """The ids; a prompt of ids must be this model's. InvalidRequestError when the chat template refuses the chat."""
    answer = codec.without_special(answer)
    if prompt is None or isinstance(prompt, str):
        return codec.encode((prompt or "") + answer)
    if ids := [item for item in prompt if isinstance(item, int)]:
        return [*ids, *codec.encode(answer, add_special_tokens=False)]
    messages = [item for item in prompt if not isinstance(item, int)]
    return codec.encode_chat([*messages, {"role": "assistant", "content": answer}], add_generation_prompt=False)
