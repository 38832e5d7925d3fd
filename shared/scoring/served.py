"""Rewards by served models: every token of a judge goes through the queue, as any other request's does.

A reward model's number is what its head says at the end of the text (a sequence of kind "head"). A mark's probability
is the exact log-probability of its text behind the judge's prompt (a sequence of kind "score" each, kept together by
their group), so a verdict always parses and nothing is drawn. What is judged cannot speak for the judge: special tokens
spelled in it become spaces before the chat template puts its own.

Invariants. A sample that cannot be scored carries its error, and no other sample is harmed. At most AT_ONCE samples of
one process are with the workers of a model, so one that nobody serves keeps nobody from another. A call that is
cancelled or late cancels its sequences.
"""

import asyncio
import json
import struct
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from redis.asyncio import Redis

from shared.adapters import check_language
from shared.errors import (
    ContextLengthExceededError,
    EmptyPromptError,
    InvalidRequestError,
    ParallmError,
    UnknownAdapterError,
    UnknownModelError,
    from_code,
)
from shared.heads import REWARD, HeadKind, Heads, HeadSpec, choose
from shared.jobs import Message, Prompt
from shared.owners import ADMINS, WhoAsks, anybody
from shared.redis.adapters.catalog import missing_head
from shared.redis.adapters.store import AdapterStore
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.sequence_calls import SequenceCalls
from shared.rewards.kinds import CheckedReward, Score, wrong_with
from shared.rewards.model_kinds import (
    MAX_MARKS,
    PROMPT,
    JudgeOptions,
    LikelihoodOptions,
    ModelOptions,
    RewardModelOptions,
    filled,
    lacks,
    models_of,
    softmax,
)
from shared.scoring.pool import RewardSample
from shared.sequences import ModelCard, SamplingParams, SequenceClass, SequenceKind, SequenceResult, SequenceSpec
from shared.text.codec import CodecCache, TextCodec, answered
from shared.trajectories import Reward

AT_ONCE = 64
WITHIN_S = 120.0
UNANSWERED = "no answer of"  # how the error begins of a sample without a score in time
IN_THREAD_CHARS = 2_000  # a longer text is tokenized off the event loop


@dataclass(frozen=True)
class AskedModel:
    """A model that scores, in the version that a call begins with."""

    card: ModelCard
    codec: TextCodec
    adapter: str  # name@k; "": the base
    heads: Heads


class ServedRewards:
    """One process's calls to judges; `owner` is a name that no other process has."""

    def __init__(self, redis: Redis, owner: str, who_asks: WhoAsks = anybody) -> None:
        self._redis = redis
        self._owner = owner
        self._registry = WorkerRegistry(redis)
        self._store = AdapterStore(redis, who_asks=who_asks)
        self._codecs = CodecCache(self._registry)
        self._rooms = WeakValueDictionary[tuple[str, ...], asyncio.Semaphore]()  # of calls that run
        self._calls: dict[str, asyncio.Task[SequenceCalls]] = {}
        self._stack = AsyncExitStack()

    async def close(self) -> None:
        """Cancel what is under way and stop reading."""
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
        await self._stack.aclose()

    async def check(self, reward: CheckedReward) -> list[ModelCard]:
        """The models that a reward asks; UnknownModelError, ConflictError, or InvalidRequestError if it cannot be."""
        models = {name: await self._resolve(name) for name in reward.served_models}
        for options in reward.all_options:
            if isinstance(options, RewardModelOptions):
                await self._head_of(models[options.model], options)
        return [model.card for model in models.values()]

    async def score(
        self,
        name: str,
        options: ModelOptions,
        samples: Sequence[RewardSample],
        *,
        within_s: float = WITHIN_S,
        sequence_class: SequenceClass = "batch",
    ) -> list[Reward]:
        """One reward a sample, in order; `name` is the reward's. Only Redis' own errors are raised."""
        until = asyncio.get_running_loop().time() + within_s
        deadline_ms = int(1000 * (time.time() + within_s))
        try:
            models = [await self._resolve(each) for each in models_of(options)]
        except ParallmError as error:
            return [_failed(name, error)] * len(samples)
        asked = tuple(sorted({model.card.name for model in models}))
        room = self._rooms.setdefault(asked, asyncio.Semaphore(AT_ONCE))

        async def one(sample: RewardSample) -> Reward:
            if missing := lacks(options, sample.prompt, sample.reference):
                return Reward(name, None, error=missing)
            if not isinstance(options, JudgeOptions) and _has_images(sample.prompt):
                return Reward(name, None, error="the prompt has images, which this reward's model is not shown")
            ask = _Ask(self, sequence_class, deadline_ms)
            try:
                async with asyncio.timeout_at(until), room:
                    if isinstance(options, JudgeOptions):
                        score = await self._judge(ask, options, models[0], sample)
                    elif isinstance(options, RewardModelOptions):
                        score = await self._read(ask, options, models[0], sample)
                    else:
                        score = await self._likelihood(ask, options, models, sample)
            except TimeoutError:
                return Reward(name, None, error=f"{UNANSWERED} {models[0].card.name!r} within {within_s:g} s")
            except ParallmError as error:
                return _failed(name, error)
            except RecursionError:
                return Reward(name, None, error="the reference is nested too deep to be shown to a model")
            if wrong := wrong_with(score.value):
                return Reward(name, None, error=wrong)
            return Reward(name, score.value, score.components)

        scored = await asyncio.gather(*map(one, samples), return_exceptions=True)
        for each in scored:
            if isinstance(each, BaseException):
                raise each
        return [each for each in scored if isinstance(each, Reward)]

    async def outputs(self, name: str, head: str, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Outputs of a head for each text of ids; TimeoutError when no worker answers."""
        model, ask = await self._resolve(name), _Ask(self, "batch", int(1000 * (time.time() + WITHIN_S)))
        async with asyncio.timeout(WITHIN_S):
            return [await ask.read(model, list(ids), head) for ids in texts]

    # -- the kinds

    async def _judge(self, ask: "_Ask", options: JudgeOptions, judge: AskedModel, sample: RewardSample) -> Score:
        codec = judge.codec
        texts = await self._texts(sample)
        prompt = await _beside(sum(map(len, texts)), _judge_prompt, codec, options, texts)
        if options.rationale_tokens:
            prompt += await ask.written(judge, prompt, options.rationale_tokens)
            prompt += codec.encode(f"\n\n{options.lead}", add_special_tokens=False)
        elif options.lead:
            prompt += codec.encode(options.lead, add_special_tokens=False)
        marks = [codec.encode(mark, add_special_tokens=False) for mark in options.marks]
        chances = softmax(await ask.log_likelihoods(judge, prompt, marks))
        value = sum(chance * worth for chance, worth in zip(chances, options.marks.values(), strict=True))
        return Score(value, dict(zip(options.marks, chances, strict=True)))

    async def _likelihood(
        self, ask: "_Ask", options: LikelihoodOptions, models: Sequence[AskedModel], sample: RewardSample
    ) -> Score:
        texts = await self._texts(sample)
        target = filled(options.target, *texts)
        sums: list[tuple[float, int]] = []
        for model in models:
            prompt = await _beside(len(texts[0]), self._context, model, options.template, texts, sample)
            ids = await _beside(len(target), model.codec.encode, target, False)
            if not ids:
                raise EmptyPromptError("the target has no tokens")
            (total,) = await ask.log_likelihoods(model, prompt, [ids])
            sums.append((total, len(ids)))
        (total, tokens), *against = sums
        components = {"log_likelihood": total, "tokens": float(tokens)}
        if against:
            components["against"] = against[0][0]
        value = total - components.get("against", 0.0)
        return Score(options.scale * (value / tokens if options.per_token else value), components)

    async def _read(self, ask: "_Ask", options: RewardModelOptions, model: AskedModel, sample: RewardSample) -> Score:
        head, spec = await self._head_of(model, options)
        prompt, chars = sample.prompt, len(sample.completion) + _size(sample.prompt)
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], int) and sample.model != model.card.name:
            prompt, _, _ = await self._texts(sample)
        ids = await _beside(chars, answered, model.codec, prompt, sample.completion)
        outputs = await ask.read(model, ids, head)
        if not options.label:
            return Score(options.scale * outputs[0], {"value": outputs[0]} if options.scale != 1.0 else {})
        chances = dict(zip(spec.labels, softmax(outputs), strict=True))
        chance = chances[options.label]
        return Score(options.scale * chance, chances if len(chances) <= MAX_MARKS else {options.label: chance})

    def _context(self, model: AskedModel, template: str, texts: Sequence[str], sample: RewardSample) -> list[int]:
        """The ids before the target; the default template is the prompt, encoded as a request would be."""
        prompt = sample.prompt
        if template != PROMPT or isinstance(prompt, str) or prompt is None:
            return model.codec.encode(filled(template, *texts))
        ids = [item for item in prompt if isinstance(item, int)]
        if not ids:
            return model.codec.encode_chat([item for item in prompt if not isinstance(item, int)])
        return ids if sample.model == model.card.name else model.codec.encode(texts[0])

    # -- what they need

    async def _head_of(self, model: AskedModel, options: RewardModelOptions) -> tuple[str, HeadSpec]:
        """The head that is meant; InvalidRequestError, with versions that have one, when the model has none such."""
        named = model.adapter or model.card.name
        kind: HeadKind = "labels" if options.label else "scalar"
        try:
            head = choose(model.heads, kind, options.head, usual="" if options.label else REWARD)
        except InvalidRequestError as error:
            error.message = f"{named} has {error.message}, as the reward's option 'head'"
            raise
        if not head:
            raise InvalidRequestError(await missing_head(self._store, named, kind, options.head))
        spec = model.heads[head]
        if options.label and options.label not in spec.labels:
            labels = ", ".join(spec.labels)
            raise InvalidRequestError(f"head {head!r} of {named} has no label {options.label!r}, but {labels}")
        return head, spec

    async def _resolve(self, name: str) -> AskedModel:
        """The model or adapter version that a name stands for now."""
        card = None if "@" in name else await self._registry.card(name)
        adapter = ""
        heads: Heads = {}
        if card is None:
            try:
                resolved = await self._store.resolve(name)
            except (UnknownAdapterError, InvalidRequestError) as error:
                known = ", ".join(await self._registry.names()) or "none"
                raise UnknownModelError(f"no model and no adapter {name!r}; models: {known}") from error
            check_language(resolved.manifest)
            adapter, base, heads = resolved.id, resolved.manifest.base_sha256, resolved.manifest.heads
            card = await self._base(base)
            if card is None:
                raise UnknownModelError(f"no worker has ever served the base of adapter {adapter} ({base[:12]})")
        return AskedModel(card, await self._codecs.codec(card), adapter, {**card.heads, **heads})

    async def _base(self, base_sha256: str) -> ModelCard | None:
        """The model that an adapter stands on, one with a live worker first."""
        cards = await self._registry.models()
        fitting = [card for card in cards if card.base_sha256 == base_sha256 or not base_sha256]
        live = await self._registry.live_models()
        return next((card for card in fitting if card.name in live), fitting[0] if fitting else None)

    async def _texts(self, sample: RewardSample) -> tuple[str, str, str]:
        """Prompt, completion and reference as texts for a template."""
        prompt = sample.prompt
        if prompt is None or isinstance(prompt, str):
            shown = prompt or ""
        elif ids := [item for item in prompt if isinstance(item, int)]:
            card = await self._registry.card(sample.model)
            if card is None:
                raise UnknownModelError(f"no worker has ever registered the model {sample.model!r} of these token ids")
            shown = (await self._codecs.codec(card)).decode(ids)
        else:
            shown = shown_chat([item for item in prompt if not isinstance(item, int)])
        told = "" if sample.reference is None else sample.reference
        return shown, sample.completion, told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)

    async def run(self, model: str, specs: Sequence[SequenceSpec]) -> list[SequenceResult]:
        """Results of sequences, all of which have ended well; the error of one that has not, TimeoutError if late."""
        task = self._calls.get(model)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            calls = SequenceCalls(self._redis, model, self._owner)
            task = self._calls[model] = asyncio.create_task(self._stack.enter_async_context(calls))
        results = await (await asyncio.shield(task)).call([msgspec.structs.replace(s, job=self._owner) for s in specs])
        for result in results:
            finish = result.finish
            if finish.reason == "error":
                raise from_code(finish.error_code, finish.error_message)
            if finish.reason == "deadline":
                raise TimeoutError
            if finish.reason not in ("stop", "length"):
                raise InvalidRequestError(f"the scoring ended early: {finish.reason}")
        return results


@dataclass(frozen=True)
class _Ask:
    """Requests to workers on behalf of one sample."""

    rewards: ServedRewards
    sequence_class: SequenceClass
    deadline_ms: int

    async def written(self, model: AskedModel, prompt: list[int], most: int) -> list[int]:
        """Greedy completion of the model, without the token that ends it."""
        sampling = SamplingParams(max_tokens=most, seed=0, temperature=0.0)
        (spec,) = self._specs(model, prompt, "generate", sampling, [()])
        (result,) = await self.rewards.run(model.card.name, [spec])
        ids = list(result.completion_ids)
        return ids[:-1] if ids and ids[-1] in model.card.eos_token_ids else ids

    async def read(self, model: AskedModel, ids: list[int], head: str) -> list[float]:
        """Outputs of a head for one text of ids."""
        (spec,) = self._specs(model, ids, "head", SamplingParams(max_tokens=0, seed=0), [()])
        (result,) = await self.rewards.run(model.card.name, [msgspec.structs.replace(spec, head=head)])
        return [value for (value,) in struct.iter_unpack("<f", result.embedding)]

    async def log_likelihoods(
        self, model: AskedModel, prompt: list[int], continuations: list[list[int]]
    ) -> list[float]:
        """log P(continuation | prompt) of each, over all its tokens."""
        if not all(continuations):
            raise EmptyPromptError("a mark has no tokens")
        specs = self._specs(model, prompt, "score", SamplingParams(max_tokens=0, seed=0), continuations)
        results = await self.rewards.run(model.card.name, specs)
        return [sum(result.score_logprobs) for result in results]

    def _specs(
        self,
        model: AskedModel,
        prompt: list[int],
        kind: SequenceKind,
        sampling: SamplingParams,
        continuations: Sequence[Sequence[int]],
    ) -> list[SequenceSpec]:
        if not prompt:
            raise EmptyPromptError("the prompt has no tokens")
        room = model.card.context_length - len(prompt) - sampling.max_tokens - max(map(len, continuations))
        if room < 0:
            raise ContextLengthExceededError(
                f"{len(prompt)} tokens of template and text leave no room in the context of {model.card.context_length}"
            )
        group = f"reward-{uuid.uuid4().hex}"
        return [
            SequenceSpec(
                id=f"{group}-{i}",
                model=model.card.name,
                prompt_ids=tuple(prompt),
                sampling=sampling,
                sequence_class=self.sequence_class,
                kind=kind,
                group=group,
                score_ids=tuple(continuation),
                adapter=model.adapter,
                deadline_ms=self.deadline_ms,
                enqueued_ms=time.time_ns() // 1_000_000,
                tenant=ADMINS,  # the texts may be any tenant's
            )
            for i, continuation in enumerate(continuations)
        ]


def _size(prompt: Prompt | None) -> int:
    """About how many characters it has."""
    return len(prompt or ()) if prompt is None or isinstance(prompt, str) else sum(len(str(item)) for item in prompt)


def _has_images(prompt: Prompt | None) -> bool:
    contents = [item.get("content") for item in prompt or () if isinstance(item, dict)]
    return any(part == {"type": "image"} for each in contents if isinstance(each, list) for part in each)


def shown_chat(messages: Sequence[Message]) -> str:
    """A chat as a judge reads it: a single message as it is, several with their roles."""
    texts = [(str(message.get("role", "")), _content(message.get("content"))) for message in messages]
    return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in texts)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _judge_prompt(codec: TextCodec, options: JudgeOptions, texts: Sequence[str]) -> list[int]:
    text = filled(options.template, *map(codec.without_special, texts))
    if not codec.bundle.chat_template:
        return codec.encode(f"{options.system}\n\n{text}\n\n" if options.system else f"{text}\n\n")
    messages = [{"role": "system", "content": options.system}] if options.system else []
    return codec.encode_chat([*messages, {"role": "user", "content": text}], **options.chat_template_kwargs)


async def _beside(chars: int, work: Any, *arguments: Any) -> Any:
    """Call `work`, in a thread when the text is long."""
    return await asyncio.to_thread(work, *arguments) if chars > IN_THREAD_CHARS else work(*arguments)


def _failed(name: str, error: ParallmError) -> Reward:
    return Reward(name, None, error=error.message[:500])
