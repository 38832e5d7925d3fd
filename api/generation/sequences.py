"""The sequences of one request: a template, and what differs among its completions."""

import time
from typing import Any

import msgspec

from shared.errors import InvalidRequestError
from shared.seeds import seed_in_request
from shared.sequences import SamplingParams, SequenceClass, SequenceSpec
from shared.splits import ArmKind

MOST_CARRIED = 1 << 23  # tokens: some 30 MB in one call of Redis
UNSAMPLED = SamplingParams(max_tokens=0, seed=0)  # of sequences that generate nothing


class Sequences(msgspec.Struct, frozen=True, omit_defaults=True):
    """`n` completions of each prompt. `template` holds all that they share; its id is the request's."""

    template: SequenceSpec
    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    chat: bool = False
    name: str = ""  # the client's name of the request, by which POST /abort_requests finds it
    score_ids: tuple[tuple[int, ...], ...] = ()  # kind "score": what follows each prompt
    tensors: tuple[bytes, ...] = ()  # kind "network": of each sequence, whose prompt is empty
    seed_by_prompt: bool = False  # else equal prompts draw equal samples
    split_to: ArmKind | None = None  # where a split has chosen the version

    def __len__(self) -> int:
        return len(self.prompts) * self.n

    @property
    def id(self) -> str:
        """Id of the request. It is never used twice, while `name` may be."""
        return self.template.id

    @property
    def ids(self) -> list[str]:
        """Ids of the sequences; sample s of prompt p has index p * n + s."""
        return [self.id_of(index) for index in range(len(self))]

    def id_of(self, index: int) -> str:
        """Id of the sequence with this index."""
        return f"{self.id}-{index}"

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """Prompt of the sequence with this index."""
        return self.prompts[index // self.n]

    @property
    def scores_only(self) -> bool:
        """True if the prompts are scored and nothing is generated."""
        return self.template.kind == "score"

    def with_template(self, **changed: Any) -> "Sequences":
        """The same with other values of the template's fields."""
        return msgspec.structs.replace(self, template=msgspec.structs.replace(self.template, **changed))

    def specs(
        self,
        api: str,
        first_token_timeout_s: float = 0,
        sequence_class: SequenceClass = "interactive",
        trace: str = "",
        tenant: str = "",
    ) -> list[SequenceSpec]:
        """The sequences as they are enqueued now.

        InvalidRequestError when they are too large together: each carries its prompt, and all enter the queue at once.
        """
        self._check_size()
        now = int(1000 * time.time())
        admitted = msgspec.structs.replace(
            self.template,
            sequence_class=sequence_class,
            api=api,
            enqueued_ms=now,
            first_token_deadline_ms=now + int(1000 * first_token_timeout_s) if first_token_timeout_s else 0,
            trace=trace,
            tenant=tenant,
        )
        return [self._completed(admitted, p, s) for p in range(len(self.prompts)) for s in range(self.n)]

    def _completed(self, template: SequenceSpec, p: int, s: int) -> SequenceSpec:
        sampling = template.sampling
        if s and (sampling.prompt_named or sampling.prompt_draws):  # the prompt's first sample reports these
            sampling = msgspec.structs.replace(sampling, prompt_named=(), prompt_draws=0)
        seed = seed_in_request(sampling.seed, s + (p if self.seed_by_prompt else 0))
        return msgspec.structs.replace(
            template,
            id=self.id_of(p * self.n + s),
            prompt_ids=self.prompts[p],
            sampling=msgspec.structs.replace(sampling, seed=seed),
            group=f"{self.id}-p{p}" if self.n > 1 else "",
            score_ids=self.score_ids[p] if self.score_ids else (),
            tensors=self.tensors[p] if self.tensors else b"",
            collect=template.collect and msgspec.structs.replace(template.collect, sample=s),
        )

    def _check_size(self) -> None:
        sampling = self.template.sampling
        carried = self.n * sum(map(len, self.prompts)) + len(self) * len(sampling.grammar) // 4
        carried += len(self) * len(self.template.prediction_ids) + sum(map(len, self.tensors)) // 4
        carried += sum(map(len, sampling.prompt_named))
        if carried > MOST_CARRIED:
            raise InvalidRequestError(
                f"the sequences of this request carry {carried} tokens, and {MOST_CARRIED} is the limit: a prompt "
                "counts for each of its completions, and so do a prediction and a quarter of a grammar's letters; use "
                "a smaller 'n'",
                param="n",
            )
