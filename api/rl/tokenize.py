"""POST /tokenize and /detokenize, with vLLM's fields."""

from functools import partial
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from api.callers.fair_pool import LARGE_CHARS, aside
from api.generation.plan import encoded
from api.generation.sampling import StrictId
from api.generation.target import find_job_target
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import Off, RequestModel, complaint
from api.openai.bodies import ChatFields, ChatMessage
from api.openai.chat import in_words, unseen_images, with_unused
from api.openai.conversations import encoded_chat
from api.openai.tools import ChatTools, ToolUse, left_out_of
from api.ring.ring import TheRing
from shared.sequences import vocabulary_error
from shared.text.codec import TextCodec

router = APIRouter(tags=["rl"], route_class=BodyRoute)


class TokenizeRequest(ChatFields):
    """Text, or a chat that goes through the model's template."""

    off: ClassVar[Off] = {
        "chat_template": (),
        "mm_processor_kwargs": (),
    }

    model: str | None = Field(default=None, description="may be left out when only one model is served")
    prompt: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list)
    tools: ChatTools | None = Field(default=None, description="of a chat: the template shows them as for an answer")
    return_token_strs: bool | None = Field(
        default=False, description="adds `token_strs`, as the vocabulary spells them"
    )

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (not self.messages):
            raise complaint("prompt", "give exactly one of 'prompt' and 'messages'")
        if self.tools and not self.messages:
            raise complaint("tools", "'tools' needs 'messages'")
        return self


class TokenizeResponse(BaseModel):
    """Token ids of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Request body of POST /detokenize."""

    model: str | None = Field(default=None, description="may be left out when only one model is served")
    tokens: list[StrictId]


class DetokenizeResponse(BaseModel):
    """Text that the ids stand for."""

    prompt: str


@router.get(
    "/tokenizer_info", summary="The tokenizer and the chat template (vLLM)", responses=error_responses(400, 404, 503)
)
async def tokenizer_info(ring: TheRing, model: str | None = None) -> dict[str, Any]:
    """Returns facts about a model's tokenizer. Its file stays on the workers' machines."""
    target = await find_job_target(ring, model, "", "follow")
    codec = await target.ring.codecs.codec(target.card)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": target.card.context_length,
        "vocab_size": codec.vocab_size,
        "eos_token_ids": list(target.card.eos_token_ids),
        "tokenizer_sha256": target.card.tokenizer_sha256,
        "chat_template": codec.bundle.chat_template or None,
        **codec.bundle.special_tokens,
    }


@router.post(
    "/tokenize",
    summary="Text to token ids",
    response_model=TokenizeResponse,
    responses=error_responses(400, 404, 503),
)
async def tokenize(body: TokenizeRequest, ring: TheRing) -> Response:
    """The ids that a completion (`prompt`) or a chat (`messages`) of this input would start from."""
    target = await find_job_target(ring, body.model, "", "follow")
    codec = await target.ring.codecs.codec(target.card)
    if body.prompt is not None:
        (tokens,) = await encoded(codec, [body.prompt], body.add_special_tokens is not False)
    else:
        tokens = await encoded_chat(codec, in_words(body, target.card), ToolUse.of(body.tools, None, None))
    named = codec if body.return_token_strs else None
    if len(tokens) > LARGE_CHARS:
        shown = await aside(_shown, tokens, target.card.context_length, named)
    else:
        shown = _shown(tokens, target.card.context_length, named)
    unused = [*unseen_images(body, target.card), *left_out_of(body.tools or (), codec)]
    return with_unused(Response(shown, media_type="application/json"), unused)


def _shown(tokens: list[int], context_length: int, named: TextCodec | None) -> bytes:
    strings = [named.token(token) or "" for token in tokens] if named is not None else None
    shown = {"count": len(tokens), "max_model_len": context_length, "tokens": tokens, "token_strs": strings}
    return msgspec.json.encode(shown)


@router.post("/detokenize", summary="Token ids to text", responses=error_responses(400, 404, 503))
async def detokenize(body: DetokenizeRequest, ring: TheRing) -> DetokenizeResponse:
    """The text of token ids, special tokens included."""
    target = await find_job_target(ring, body.model, "", "follow")
    if error := vocabulary_error(body.tokens, target.card.vocab_size, "tokens"):
        raise error
    codec = await target.ring.codecs.codec(target.card)
    decode = partial(codec.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=await aside(decode) if len(body.tokens) > LARGE_CHARS else decode())
