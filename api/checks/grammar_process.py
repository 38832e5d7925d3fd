"""`python -m api.checks.grammar_process SECONDS`: converts and checks grammars for an api process, which may kill it.

It reads questions from stdin and writes answers to stdout, each as a length of four bytes and msgpack, until its stdin
ends. A grammar that takes more than so many seconds of computing ends the process by SIGPROF.

Invariant. It compiles with half of the stack that a worker's thread has, so what passes here does not overflow there.
"""

import os
import signal
import sys
import threading
from typing import BinaryIO

import msgspec
from llguidance import LLTokenizer

from shared.errors import InvalidGrammarError
from shared.text import grammar
from shared.text.codec import TokenizerBundle

STACK_BYTES = 4 << 20


class GrammarQuestion(msgspec.Struct, array_like=True):
    """A grammar, and the tokenizer that it is for."""

    tokenizer_sha256: str
    vocab_size: int
    grammar: str
    bundle: TokenizerBundle | None = None  # with the first question about a tokenizer


class GrammarVerdict(msgspec.Struct, array_like=True):
    """The grammar as workers take it, or what is wrong with it."""

    grammar: str = ""
    complaint: str = ""


def serve(questions: BinaryIO, answers: BinaryIO, computing_s: float) -> None:
    """Answers questions until stdin is closed."""
    tokenizers: dict[tuple[str, int], LLTokenizer] = {}
    decoder = msgspec.msgpack.Decoder(GrammarQuestion)
    while len(head := questions.read(4)) == 4:
        question = decoder.decode(questions.read(int.from_bytes(head, "big")))
        key = question.tokenizer_sha256, question.vocab_size
        if question.bundle is not None:
            tokenizers[key] = grammar.tokenizer_of(question.bundle, question.vocab_size)
        signal.setitimer(signal.ITIMER_PROF, computing_s)
        answer = msgspec.msgpack.encode(_answered(question.grammar, tokenizers[key]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(answer).to_bytes(4, "big") + answer)
        answers.flush()


def _answered(text: str, tokenizer: LLTokenizer) -> GrammarVerdict:
    try:
        text = grammar.converted(text)
        grammar.check(text, tokenizer)
    except InvalidGrammarError as error:
        return GrammarVerdict(complaint=error.message)
    return GrammarVerdict(text)


def main() -> None:
    """Serve on stdin and stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for our parent, whose end we see
    os.nice(5)  # tokens go first
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=serve, args=(questions, answers, float(sys.argv[1])))
    serving.start()
    serving.join()


if __name__ == "__main__":
    main()
