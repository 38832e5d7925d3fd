"""Checks grammars at admission: what passes here compiles in a worker.

Converting and compiling run in processes of their own (api/checks/grammar_process.py), because either may take minutes,
cannot be interrupted, and may end its process: a grammar of 5,000 rules in a row overflows the compiler's stack. A
process is killed when its client leaves and when a grammar takes more computing than the limit; else it stays for the
next one. A grammar that has passed lately is not compiled again.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
from collections import OrderedDict

import msgspec

from api.callers.caller import while_wanted
from api.callers.fair_pool import FairPool
from api.checks.grammar_process import GrammarQuestion, GrammarVerdict
from shared.errors import InvalidGrammarError, ServiceUnavailableError
from shared.sequences import ModelCard
from shared.text.codec import TextCodec
from shared.text.grammar import MAX_CHARS

COMPUTING_S = 3.0  # that one grammar may take
MAX_PASSED = 256  # grammars that have passed
PLACES = 2  # each is a process that holds the vocabulary
LONGEST_S = 60.0  # of a check, the start of its process included, on a machine with no time to spare

_answer_decoder = msgspec.msgpack.Decoder(GrammarVerdict)


class GrammarChecker:
    """The grammars of one api process."""

    def __init__(self, computing_s: float = COMPUTING_S) -> None:
        self._computing_s = computing_s
        self._pool = FairPool(PLACES)
        self._idle: list[_Compiler] = []
        self._passed: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    async def checked(self, text: str, card: ModelCard, codec: TextCodec) -> str:
        """The grammar as workers take it; InvalidGrammarError when they could not compile it."""
        if len(text) > MAX_CHARS:
            raise InvalidGrammarError(f"the grammar has {len(text)} characters, and {MAX_CHARS} is the limit")
        key = card.tokenizer_sha256, hashlib.sha256(text.encode(errors="replace")).digest()
        found = self._passed.get(key)
        if found is None:
            found = self._passed[key] = await while_wanted(self._compiled(text, card, codec))
            if len(self._passed) > MAX_PASSED:
                self._passed.popitem(last=False)
        self._passed.move_to_end(key)
        return found

    async def _compiled(self, text: str, card: ModelCard, codec: TextCodec) -> str:
        async with self._pool.place():
            compiler = self._idle.pop() if self._idle else _Compiler(self._computing_s)
            try:
                async with asyncio.timeout(LONGEST_S):
                    answer = await compiler.ask(text, card, codec)
            except TimeoutError:
                await compiler.kill()
                raise ServiceUnavailableError("checking the grammar takes too long at the moment") from None
            except (OSError, asyncio.IncompleteReadError):
                raise InvalidGrammarError(self._reason(await compiler.kill())) from None
            except BaseException:
                await compiler.kill()
                raise
            self._idle.append(compiler)
        if answer.complaint:
            raise InvalidGrammarError(answer.complaint)
        return answer.grammar

    async def close(self) -> None:
        """End the compiling processes at shutdown."""
        while self._idle:
            await self._idle.pop().kill()

    def _reason(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"the grammar takes more than {self._computing_s:g} s to compile; write a smaller one"
        return "the grammar ends the compiler: it is too large, or its rules form too long a chain"


class _Compiler:
    """One process, started with the first question."""

    def __init__(self, computing_s: float) -> None:
        self._computing_s = computing_s
        self._process: asyncio.subprocess.Process | None = None
        self._known: set[tuple[str, int]] = set()  # tokenizers that it has

    async def ask(self, text: str, card: ModelCard, codec: TextCodec) -> GrammarVerdict:
        """The process's verdict; IncompleteReadError or OSError when the process has ended."""
        if self._process is None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "api.checks.grammar_process", str(self._computing_s), stdin=pipe, stdout=pipe
            )
        model = card.tokenizer_sha256, card.vocab_size
        question = GrammarQuestion(*model, text, None if model in self._known else codec.bundle)
        self._known.add(model)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        packed = msgspec.msgpack.encode(question)
        stdin.write(len(packed).to_bytes(4, "big") + packed)
        await stdin.drain()
        size = int.from_bytes(await stdout.readexactly(4), "big")
        return _answer_decoder.decode(await stdout.readexactly(size))

    async def kill(self) -> int:
        """End it, whatever it does; its exit code, as `subprocess` reports it."""
        if self._process is None:
            return 0
        if self._process.returncode is None:  # not `Process.kill`: that may take the status away from who waits for it
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        return await self._process.wait()
