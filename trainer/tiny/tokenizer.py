"""The tiny model's tokenizer: byte-level BPE, single digits, ChatML.

The chat template renders what `render` writes; training sees no other text.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.tiny.data import Message, sample_addition, sample_talk

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PAD = "<|pad|>"
_SPECIAL = [END_OF_TEXT, TURN_START, TURN_END, PAD]

VOCABULARY = 448
MAX_LENGTH = 2048
_CORPUS_CHATS = 4000

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on a sample of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_corpus(random.Random(seed)), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    return tokenizer


def render(messages: Sequence[Message]) -> str:
    """The prompt text up to the reply, as the chat template with a generation prompt gives it."""
    turns = "".join(f"{TURN_START}{turn.role}\n{turn.content}{TURN_END}\n" for turn in messages)
    return f"{turns}{TURN_START}assistant\n"


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into the folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in _SPECIAL
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "unk_token": None,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _corpus(rng: random.Random) -> Iterator[str]:
    for number in range(_CORPUS_CHATS):
        chat = sample_talk(rng) if number % 4 == 0 else sample_addition(rng)
        turns = (*chat.messages, Message("assistant", chat.reply))
        yield "".join(f"{turn.role}\n{turn.content}\n" for turn in turns)
