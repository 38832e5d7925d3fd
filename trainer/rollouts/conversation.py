"""Token ids of conversations, turn by turn, without ever tokenizing again what the model wrote.

Invariant. The ids that the next turn sees are the ids that were sampled, followed by what the chat template puts
between them and the next reply. Rendering the whole conversation anew would merge other tokens, and the log-
probabilities of the sampler would belong to ids that nobody trained on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from shared.errors import SetupError
from shared.frames import VersionSpan
from shared.images.refs import ImageRef
from shared.jobs import Message
from shared.text.codec import TextCodec
from shared.text.languages.channels import splitter_of
from shared.text.languages.language import language_of
from shared.text.languages.pieces import SplitPlan
from shared.trajectories import Trajectory
from trainer.rollouts.environments import Observation, Outcome
from trainer.rollouts.pictures import ChatPictures, has_images, plain

_MARK = "\u2063reply\u2063"  # invisible separators: no template alters them


class Opening(NamedTuple):
    """The ids of a prompt, and the images that stand in it."""

    ids: tuple[int, ...]
    images: tuple[ImageRef, ...] = ()
    image_token: int = 0
    files: dict[bytes, bytes] = {}  # noqa: RUF012 - never written; by hash


class ChatEncoder:
    """Turns messages into ids with one model's tokenizer and chat template, and the template's `variables`."""

    def __init__(
        self, codec: TextCodec, variables: Mapping[str, Any] | None = None, pictures: ChatPictures | None = None
    ) -> None:
        """`pictures`: reads the images of prompts; None: the policy sees none."""
        self._codec = codec
        self._pictures = pictures
        self._variables = dict(variables or {})

    async def opening(self, observation: Observation) -> Opening:
        """Prompt of the first reply, encoded."""
        prompt = observation.prompt
        if isinstance(prompt, str):
            return Opening(tuple(self._codec.encode(prompt)))
        if not has_images(prompt):
            return Opening(tuple(self._codec.encode_chat(list(prompt), **self._named(observation))))
        if self._pictures is None:
            raise SetupError(
                "a prompt has images, and this policy sees none (or its learner is not the run's own, or has ranks)"
            )
        chat = await self._pictures.of(prompt)
        text = chat.images.expanded(self._codec.render_chat(chat.messages, **self._named(observation)))
        ids = self._codec.encode(text, add_special_tokens=False)
        chat.images.check(ids)
        return Opening(tuple(ids), chat.images.refs, chat.images.vision.image_token_id, chat.files)

    def text(self, completion_ids: Sequence[int]) -> str:
        """The reply's text without special tokens."""
        return self._codec.decode(completion_ids)

    def action(self, observation: Observation, completion_ids: Sequence[int]) -> str:
        """Reply as the environment reads it: its text, or with tools the message as JSON, with its calls."""
        if not observation.tools:
            return self.text(completion_ids)
        language = language_of(self._codec)
        plan = SplitPlan(format=language.calls, tools=msgspec.json.encode(observation.tools))
        if (reasoning := language.reasoning) is not None:
            thinking = reasoning.thinking_after(
                self._codec.render_chat(self._plain(observation), **self._named(observation))
            )
            thinks = bool(thinking) or reasoning.again or reasoning.channels
            marks = {"think_start": reasoning.start, "think_end": reasoning.end} if thinks else {}
            plan = msgspec.structs.replace(plan, thinking=thinking, reasoning=reasoning.name, **marks)
        ended = bool(completion_ids) and completion_ids[-1] in self._codec.bundle.eos_token_ids
        stream, splitter = self._codec.stream(plan.marks), splitter_of(plan)
        piece = splitter.push(stream.push(completion_ids[:-1] if ended else completion_ids) + stream.flush())
        piece.add(splitter.flush())
        message: Message = {"role": "assistant", "content": piece.content}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{len(observation.prompt)}_{call.index}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in piece.calls
            ]
        return msgspec.json.encode(message).decode()

    def _named(self, observation: Observation) -> dict[str, Any]:
        """The run's variables of the template, with the tools of the observation."""
        tools = {"tools": list(observation.tools)} if observation.tools else {}
        return {**self._variables, **tools}

    @staticmethod
    def _plain(observation: Observation) -> list[Message]:
        assert not isinstance(observation.prompt, str), "tools come with chats"
        return list(plain(observation.prompt))

    def following(self, observation: Observation, reply_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Ids between a reply and the next one: end of turn, the new messages, the opening of the next reply."""
        if isinstance(observation.prompt, str):
            raise SetupError("an environment with text prompts has one turn; give chat messages instead")
        reply: Message = {"role": "assistant", "content": _MARK}
        if has_images(messages):
            raise SetupError("images come with an episode's first messages, not later")
        text = self._codec.render_chat([*self._plain(observation), reply, *messages], **self._named(observation))
        _, mark, rest = text.rpartition(_MARK)
        if not mark:
            raise SetupError("the chat template leaves out earlier replies: no multi-turn training with it")
        ids = self._codec.encode(rest, add_special_tokens=False)
        ended = bool(reply_ids) and reply_ids[-1] in self._codec.bundle.eos_token_ids
        return ids[1:] if ended and ids and ids[0] == reply_ids[-1] else ids

    def advance(self, observation: Observation, action: str, outcome: Outcome) -> Observation:
        """The observation of the next turn."""
        assert not isinstance(observation.prompt, str)
        reply: Message = msgspec.json.decode(action) if observation.tools else {"role": "assistant", "content": action}
        info = observation.info if outcome.info is None else outcome.info
        return Observation((*observation.prompt, reply, *outcome.messages), info, tools=observation.tools)


def joined(first: Trajectory, between: Sequence[int], second: Trajectory) -> Trajectory:
    """One trajectory of two turns; the ids between them are not the model's and stay out of the loss.

    `second.prompt_ids` must be everything before it.
    """
    assert second.prompt_ids == (*first.prompt_ids, *first.completion_ids, *between)
    shift = len(first.completion_ids) + len(between)
    spans = [
        *first.spans,
        *(VersionSpan(span.version, span.start + shift, span.end + shift) for span in second.spans),
    ]
    if between and second.spans:
        spans.insert(len(first.spans), VersionSpan(second.spans[0].version, len(first.completion_ids), shift))
    return msgspec.structs.replace(
        second,
        sample_index=first.sample_index,
        prompt_index=first.prompt_index,
        prompt_ids=first.prompt_ids,
        completion_ids=(*first.completion_ids, *between, *second.completion_ids),
        logprobs=(*first.logprobs, *(0.0 for _ in between), *second.logprobs),
        loss_mask=(*_own(first), *(0 for _ in between), *_own(second)),
        spans=tuple(spans),
        top_logprobs=(),
        routes=_routes(first, len(between), second),
        seed=first.seed,
        metadata=first.metadata,
    )


def _routes(first: Trajectory, between: int, second: Trajectory) -> bytes:
    """Experts of all tokens; those of the ids between are not known. b"" when a turn has not named its own."""
    if not (first.routes and second.routes):
        return b""
    return first.routes + b"\xff" * (between * (len(first.routes) // len(first.completion_ids))) + second.routes


def _own(trajectory: Trajectory) -> tuple[int, ...]:
    return trajectory.loss_mask or (1,) * len(trajectory.completion_ids)
