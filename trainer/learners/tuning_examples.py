"""Examples that a policy is tuned on, as token ids: each prompt as a worker would see it, and which tokens after it
count.

**sft** `{"messages": [...], "tools"?}`, OpenAI's form: each assistant turn counts, but for those with `"weight": 0`.
`{"prompt"?, "completion"}`: the completion counts. **dpo** `{"prompt"?, "chosen", "rejected"}`. Chats of these may have
`tools`, too. `prompt` is a text or messages; an answer is a text, or a whole conversation that ends with it. A pair may
also be of token ids, `{"prompt_ids", "chosen_ids", "rejected_ids"}`, as a worker has written them: all of them count.

What counts of a turn is what the model would have to write: what stands between the prompt that the chat template makes
of all before it (with its generation prompt) and the end of the turn, the end token included. What the template puts
after that is no part of it. A text after a text ends with the model's end token. Prompt and answer are tokenized apart,
because a model writes behind the tokens of its prompt.

Where the template renders an earlier turn in the same way when more follows, a conversation is one row; where it does
not (it leaves out earlier reasoning, say), each turn is a row of its own, behind the prompt that a worker would get. So
is a turn behind further images of the user's: images stand in prompts alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from shared.errors import InvalidRequestError, SetupError
from shared.images.chat import ChatImages
from shared.jobs import Message
from shared.text.codec import TextCodec
from trainer.learn.batches import Sample, SampleGroup
from trainer.learners.lines import Exchange, exchange, read_lines
from trainer.rollouts.picture_shelf import PictureShelf
from trainer.rollouts.pictures import ShownChat, has_images, image_of

Tuning = Literal["sft", "dpo"]
Weight = Literal[0, 1]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PLAIN = {"role", "content", "name", "weight"}  # fields of a message that is an answer


class TuningExamples(NamedTuple):
    """Rows of sft, each with one sample, or pairs of dpo: the chosen sample, then the rejected one."""

    items: tuple[SampleGroup, ...]
    too_long: int = 0  # left out


class _Line(msgspec.Struct, frozen=True):
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None  # that the chat template renders
    functions: Any = None  # what `tools` were called once
    prompt: str | list[Message] | None = None
    completion: str | list[Message] | None = None
    chosen: str | list[Message] | None = None
    rejected: str | list[Message] | None = None
    prompt_ids: tuple[int, ...] | None = None
    chosen_ids: tuple[int, ...] | None = None
    rejected_ids: tuple[int, ...] | None = None


_line = msgspec.json.Decoder(_Line)


def read_examples(
    path: Path,
    tuning: Tuning,
    codec: TextCodec,
    longest: int,
    variables: Mapping[str, Any] | None = None,
    shelf: PictureShelf | None = None,
) -> TuningExamples:
    """The examples of a file; SetupError names the line. `variables`: of the chat template.

    `shelf`: where images are read and kept, None: there may be none.
    """
    encoder = _Encoder(codec, dict(variables or {}), shelf)
    read = encoder.conversation if tuning == "sft" else encoder.pair
    fitting: list[SampleGroup] = []
    too_long = 0
    for number, line in read_lines(path, _line):
        try:
            if line.functions is not None:
                raise ValueError("'functions' are not read: give them as 'tools'")
            for item in read(line):
                if all(len(item.prompt_ids) + len(each.completion_ids) <= longest for each in item.samples):
                    fitting.append(item)
                else:
                    too_long += 1
        except (ValueError, InvalidRequestError, SetupError) as error:
            raise SetupError(f"{path}, line {number}: {error}") from error
    if not fitting:
        raise SetupError(f"{path}: no example has at most {longest} tokens, which is the model's context")
    return TuningExamples(tuple(fitting), too_long)


class _Row:
    """Ids as they grow, and which of them count; after the images of its prompt there are no others."""

    def __init__(self, codec: TextCodec, images: ChatImages | None = None) -> None:
        self._codec = codec
        self.images = images
        self._ids: list[int] = []
        self._counts: list[bool] = []
        self.text = ""  # of a chat, as far as it is rendered

    def add(self, text: str, *, counts: bool) -> None:
        self.text += text
        self.add_ids(self._codec.encode(text, add_special_tokens=False), counts=counts)

    def add_ids(self, ids: Sequence[int], *, counts: bool) -> None:
        self._ids += ids
        self._counts += [counts] * len(ids)

    def ended(self) -> Iterator[SampleGroup]:
        """It, unless nothing of it counts. What no token stands before cannot be learned."""
        if not any(self._counts[1:]):
            return
        first = max(1, self._counts.index(True))
        last = len(self._counts) - self._counts[::-1].index(True)
        prompt, sample = tuple(self._ids[:first]), _sample(self._ids[first:last], self._counts[first:last])
        if self.images is None:
            yield SampleGroup("", prompt, (sample,))
            return
        self.images.check(prompt)
        yield SampleGroup("", prompt, (sample,), self.images.refs, self.images.vision.image_token_id)


class _Chat:
    """A conversation as the template takes it, from its beginning up to any turn."""

    def __init__(self, turns: Sequence[Message], tools: list[dict[str, Any]] | None, encoder: "_Encoder") -> None:
        self._messages = [{key: value for key, value in turn.items() if key != "weight"} for turn in turns]
        self._tools, self._encoder = tools, encoder
        self._images: ChatImages | None = None
        if has_images(self._messages):
            self._messages, self._images, _ = encoder.shown(self._messages)

    def images(self, end: int) -> ChatImages | None:
        """Images of the first `end` turns; None: they have no images."""
        if self._images is None:
            return None
        contents = [message["content"] for message in self._messages[:end]]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return self._images.first(sum(part["type"] == "image" for part in parts)) if parts else None

    def text(self, end: int, *, prompt: bool) -> str:
        """Text of the first `end` turns; with `prompt`, also of the beginning of the next reply."""
        images = self.images(end)
        text = self._encoder.rendered(self._messages[:end], self._tools, prompt=prompt)
        return text if images is None else images.expanded(text)


class _Encoder:
    """Lines as token ids of one model."""

    def __init__(self, codec: TextCodec, variables: dict[str, Any], shelf: PictureShelf | None) -> None:
        self._codec, self._variables, self._shelf = codec, variables, shelf
        self._ends = [spelling for token in codec.bundle.eos_token_ids if (spelling := codec.token(token))]

    def conversation(self, line: _Line) -> Iterable[SampleGroup]:
        """The rows of a line of sft, one where that is possible; ValueError when it is none."""
        if line.chosen is not None or line.rejected is not None:
            raise ValueError("a pair of 'chosen' and 'rejected': that is for --mode dpo")
        if (line.messages is None) == (line.completion is None):
            raise ValueError("it has either 'messages', or 'completion' with a 'prompt'")
        if line.messages is not None:
            if line.prompt is not None:
                raise ValueError("'prompt' cannot be used together with 'messages'")
            rows = list(self._turns(_checked(line.messages), line.tools))
        else:
            rows = [self._answered(_exchange(line.prompt, line.completion), line.tools)]
        if not rows:
            raise ValueError("no token of it counts")
        return rows

    def pair(self, line: _Line) -> Iterable[SampleGroup]:
        """The pair of a line of dpo; ValueError when it is none."""
        if line.prompt_ids is not None:
            return [self._pair_of_ids(line.prompt_ids, line.chosen_ids or (), line.rejected_ids or ())]
        if line.chosen is None or line.rejected is None:
            raise ValueError("a pair has 'chosen' and 'rejected'")
        chosen, rejected = (_exchange(line.prompt, answer) for answer in (line.chosen, line.rejected))
        if chosen.prompt != rejected.prompt:
            raise ValueError("'chosen' and 'rejected' do not answer the same prompt")
        if chosen.answer == rejected.answer:
            raise ValueError("'chosen' and 'rejected' are the same answer")
        better, worse = (self._answered(each, line.tools) for each in (chosen, rejected))
        if better.prompt_ids != worse.prompt_ids:  # without a prompt, the first token stands for it
            raise ValueError("a pair needs a 'prompt' with this model, whose texts begin with no token of their own")
        if better.samples == worse.samples:  # the end token stands in both
            raise ValueError("'chosen' and 'rejected' are the same tokens up to the end of the answer")
        return [replace(better, samples=(*better.samples, *worse.samples))]

    def _pair_of_ids(self, prompt: tuple[int, ...], chosen: tuple[int, ...], rejected: tuple[int, ...]) -> SampleGroup:
        if not (prompt and chosen and rejected):
            raise ValueError(
                "a pair of token ids has 'prompt_ids', 'chosen_ids' and 'rejected_ids', none of them empty"
            )
        wrong = (id_ for id_ in (*prompt, *chosen, *rejected) if not 0 <= id_ < 2**32 or self._codec.token(id_) is None)
        if (id_ := next(wrong, None)) is not None:
            raise ValueError(f"the tokenizer knows no token {id_}")
        if chosen == rejected:
            raise ValueError("'chosen_ids' and 'rejected_ids' are the same answer")
        return SampleGroup("", prompt, tuple(_sample(ids, [True] * len(ids)) for ids in (chosen, rejected)))

    def _answered(self, said: Exchange, tools: list[dict[str, Any]] | None) -> SampleGroup:
        if isinstance(said.prompt, list):
            turns = [*_checked(said.prompt), {"role": "assistant", "content": said.answer}]
            earlier = [{**turn, "weight": 0} for turn in turns[:-1]]
            rows = list(self._turns([*earlier, turns[-1]], tools))
        elif tools:
            raise ValueError("'tools' are for chats, and the prompt is a text")
        else:
            row = _Row(self._codec)
            row.add_ids(self._codec.encode(said.prompt or ""), counts=False)
            ids = self._codec.encode(said.answer, add_special_tokens=False)
            ends = self._codec.bundle.eos_token_ids
            row.add_ids(ids if ids and ids[-1] in ends else [*ids, *self._codec.end], counts=True)
            rows = list(row.ended())
        if not rows:
            raise ValueError("no token of the answer counts")
        return rows[0]

    def _turns(self, turns: Sequence[Message], tools: list[dict[str, Any]] | None) -> Iterator[SampleGroup]:
        """Rows of a chat; each assistant turn without the weight 0 counts, once."""
        chat, row = _Chat(turns, tools, self), _Row(self._codec)
        for at, turn in enumerate(turns):
            if turn["role"] != "assistant" or turn.get("weight") == 0:
                continue
            before, whole, images = chat.text(at, prompt=True), chat.text(at + 1, prompt=False), chat.images(at)
            if not whole.startswith(before):
                raise ValueError(
                    f"messages[{at}]: the chat template does not put this reply after its own generation prompt, so "
                    "no token of it would be what the model is asked to write; see --chat-template-kwargs"
                )
            if not before.startswith(row.text) or images != row.images:
                yield from row.ended()
                row = _Row(self._codec, images)
            row.add(before[len(row.text) :], counts=False)
            row.add(self._reply(whole[len(before) :]), counts=True)
        yield from row.ended()

    def _reply(self, text: str) -> str:
        """A turn up to its end token, where generation ends; all of it where the template has none."""
        found = [text.find(end) + len(end) for end in self._ends if end in text]
        return text[: min(found)] if found else text

    def shown(self, messages: list[Message]) -> ShownChat:
        """A chat with its images apart; ValueError where there may be none."""
        if self._shelf is None:
            raise ValueError(
                "it has images: these are learned from in --mode rl, sft and dpo, by a model that sees, not over HTTP "
                "and not by several ranks"
            )
        return self._shelf.chat(messages)

    def rendered(self, messages: list[Message], tools: list[dict[str, Any]] | None, *, prompt: bool) -> str:
        """Render the messages by the model's chat template."""
        return self._codec.render_chat(messages, add_generation_prompt=prompt, tools=tools, **self._variables)


def _exchange(prompt: str | list[Message] | None, answer: str | list[Message] | None) -> Exchange:
    if isinstance(answer, list) and (not answer or answer[-1].get("role") != "assistant"):
        raise ValueError("a conversation ends with an assistant's message")
    if isinstance(answer, list) and (more := sorted(key for key in answer[-1].keys() - _PLAIN if answer[-1][key])):
        raise ValueError(f"the answer's message has {more[0]!r}: its text alone is learned, all of it from 'messages'")
    return exchange(prompt, answer)


def _sample(ids: Sequence[int], counts: Sequence[bool]) -> Sample:
    return Sample(tuple(ids), (0.0,) * len(ids), tuple(counts), (0,) * len(ids), 0.0)


def _checked(messages: Sequence[Message]) -> list[Message]:
    """Messages as chat templates take them: text as one string, call arguments as objects; ValueError names one."""
    return [_message(at, message) for at, message in enumerate(messages)]


def _message(at: int, message: Message) -> Message:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in _ROLES:
        raise ValueError(f"messages[{at}]: role {role!r} is none of {', '.join(_ROLES)}")
    if message.get("weight", 1) not in (0, 1):
        raise ValueError(f"messages[{at}]: weight is 0 or 1, not {message['weight']!r}")
    if isinstance(content, list):
        content = _parts(at, role, content)
    elif content is None and calls:
        content = ""
    elif not isinstance(content, str):
        raise ValueError(f"messages[{at}]: content is a text")
    if calls and not isinstance(calls, list):
        raise ValueError(f"messages[{at}]: tool_calls is a list")
    made: Message = {**message, "role": "system" if role == "developer" else role, "content": content}
    if calls:
        made["tool_calls"] = [_call(at, call) for call in calls]
    return made


def _parts(at: int, role: Any, parts: list[Any]) -> str | list[Any]:
    """A text as one string; parts as they are where some of them are images."""
    images = [part for part in parts if image_of(part)]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) + len(images) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"messages[{at}]: content has a part that is neither a text nor an image")
    if images and role != "user":
        raise ValueError(f"messages[{at}]: images are the user's")
    return parts if images else "".join(map(str, texts))


def _call(at: int, call: dict[str, Any]) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        told = msgspec.json.decode(arguments or "{}", type=dict) if isinstance(arguments, str) else arguments
    except (KeyError, TypeError, msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"messages[{at}]: a tool call has a function with a name and JSON arguments") from error
    return {**call, "function": {**function, "arguments": told}}
