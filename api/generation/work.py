"""The sequences that a request comes to, before they have a class and a feed."""

import time

import msgspec

from shared.errors import InvalidRequestError
from shared.images.refs import ImageRef
from shared.seeds import seed_in_request
from shared.sequences import (
    AdapterPolicy,
    Collection,
    Pooling,
    SamplingParams,
    SequenceClass,
    SequenceKind,
    SequenceSpec,
)
from shared.splits import ArmKind

MOST_CARRIED = 1 << 23  # tokens: some 30 MB in one call of Redis


class Work(msgspec.Struct, frozen=True):
    """What a request asks of the workers: `n` completions for each prompt."""

    id: str
    model: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    n: int = 1
    kind: SequenceKind = "generate"
    chat: bool = False
    adapter: str = ""
    adapter_policy: AdapterPolicy = "pin"
    deadline_ms: int = 0
    collect: Collection | None = None
    pooling: Pooling = "mean"
    score_ids: tuple[tuple[int, ...], ...] = ()  # kind "score": what follows each prompt
    seed_by_prompt: bool = False  # else equal prompts draw equal samples
    name: str = ""  # what the request calls itself
    prediction_ids: tuple[int, ...] = ()  # what the client expects of each completion
    head: str = ""  # kind "head"
    tensors: tuple[bytes, ...] = ()  # kind "network": of each sequence, whose prompt is empty
    split_to: ArmKind | None = None  # where a split has chosen the version
    images: tuple[ImageRef, ...] = ()  # of each prompt
    image_token: int = 0  # that stands for each vector of them

    def specs(
        self,
        api_id: str,
        first_token_timeout_s: float = 0,
        sequence_class: SequenceClass = "interactive",
        trace: str = "",
        tenant: str = "",
    ) -> list[SequenceSpec]:
        """One sequence for each completion; sample s of prompt p has index p * n + s.

        InvalidRequestError when they are too large together: each carries its prompt, and all enter the queue at once.
        """
        carried = self.n * sum(map(len, self.prompts)) + self.n * len(self.prompts) * len(self.sampling.grammar) // 4
        carried += self.n * len(self.prompts) * len(self.prediction_ids) + sum(map(len, self.tensors)) // 4
        carried += sum(map(len, self.sampling.prompt_named))
        if carried > MOST_CARRIED:
            raise InvalidRequestError(
                f"the sequences of this request carry {carried} tokens, and {MOST_CARRIED} is the limit: a prompt "
                "counts for each of its completions, and so do a prediction and a quarter of a grammar's letters; use "
                "a smaller 'n'",
                param="n",
            )
        now = int(1000 * time.time())
        others = self.sampling  # of a prompt's further samples: what else there is to say of it, the first one says
        if others.prompt_named or others.prompt_draws:
            others = msgspec.structs.replace(others, prompt_named=(), prompt_draws=0)
        first = now + int(1000 * first_token_timeout_s) if first_token_timeout_s else 0
        return [
            SequenceSpec(
                id=f"{self.id}-{p * self.n + s}",
                model=self.model,
                prompt_ids=prompt,
                sampling=msgspec.structs.replace(
                    self.sampling if s == 0 else others,
                    seed=seed_in_request(self.sampling.seed, s + (p if self.seed_by_prompt else 0)),
                ),
                sequence_class=sequence_class,
                kind=self.kind,
                group=f"{self.id}-p{p}" if self.n > 1 else "",
                api=api_id,
                adapter=self.adapter,
                adapter_policy=self.adapter_policy,
                deadline_ms=self.deadline_ms,
                enqueued_ms=now,
                collect=self.collect and msgspec.structs.replace(self.collect, sample=s),
                first_token_deadline_ms=first,
                pooling=self.pooling,
                score_ids=self.score_ids[p] if self.score_ids else (),
                trace=trace,
                tenant=tenant,
                prediction_ids=self.prediction_ids,
                head=self.head,
                tensors=self.tensors[p] if self.tensors else b"",
                images=self.images,
                image_token=self.image_token,
            )
            for p, prompt in enumerate(self.prompts)
            for s in range(self.n)
        ]
