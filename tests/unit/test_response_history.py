"""What a response that follows another one begins with: the same token ids, so that their KV is found."""

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api.openai.bodies import ChatCompletionRequest
from api.openai.conversations import conversation
from api.openai.responses.history import _joined_ids, own_ids
from shared.text.codec import TextCodec, TokenizerBundle

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def merging() -> TextCodec:
    """One that writes "ab" as one token, though a model may say it in two."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{letter: i + 1 for i, letter in enumerate(letters)}}
    vocabulary["ab"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return TextCodec(TokenizerBundle(tokenizer.to_str(), TEMPLATE, (0,), {"eos_token": "<eos>"}))


def chat(*said: str) -> ChatCompletionRequest:
    roles = ("user", "assistant") * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return ChatCompletionRequest.model_validate({"messages": messages})


async def test_the_next_prompt_begins_with_the_ids_that_the_model_wrote(merging: TextCodec) -> None:
    first = (await conversation(merging, chat("hi"))).prompt
    answer = [*merging.encode("a", False), *merging.encode("b", False), 0]
    begun = [*first, *answer]
    plain = (await conversation(merging, chat("hi", "ab", "go on"))).prompt
    kept = (await conversation(merging, chat("hi", "ab", "go on"), begun=begun)).prompt
    assert plain[: len(begun)] != begun, "the tokenizer writes the answer in another way"
    assert kept[: len(begun)] == begun
    assert merging.decode(kept, False) == merging.decode(plain, False)


async def test_ids_of_another_text_are_not_taken(merging: TextCodec) -> None:
    plain = (await conversation(merging, chat("hi", "ab", "go on"))).prompt
    for begun in ([5, 6, 7], merging.encode("user: hi<eos>assistant: other<eos>", False), []):
        assert (await conversation(merging, chat("hi", "ab", "go on"), begun=begun)).prompt == plain


def test_a_turn_stores_only_the_ids_that_the_turn_before_does_not_have() -> None:
    first = own_ids([], [1, 2], [3])
    assert _joined_ids([first]) == [1, 2, 3]
    second = own_ids([1, 2, 3], [1, 2, 3, 4], [5])
    assert msgspec.msgpack.decode(second) == [3, [4, 5]]
    assert _joined_ids([first, second]) == [1, 2, 3, 4, 5]
    other = own_ids([1, 2, 3], [9, 9], [5])
    assert msgspec.msgpack.decode(other) == [0, [9, 9, 5]]
    assert _joined_ids([first, other]) == [9, 9, 5]


def test_turns_whose_ids_do_not_fit_together_begin_with_nothing() -> None:
    second = own_ids([1, 2, 3], [1, 2, 3, 4], [5])
    for ids in ([second], [b"", second], [own_ids([], [7], []), second], []):
        assert _joined_ids(ids) == []
