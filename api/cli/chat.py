"""`mlx_parallm chat`: one answer, or a conversation."""

import sys
from typing import Annotated, Any

import typer

from api.cli.client import DEFAULT_URL, InferenceClient
from api.cli.console import ApiKey, Json, Model, Url, ask, err, only_model, out, print_json


def chat(
    prompt: Annotated[
        str, typer.Argument(help="a message; without one: a conversation, until Ctrl-D; Ctrl-C ends an answer")
    ] = "",
    model: Model = "",
    system: Annotated[str, typer.Option(help="system message")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Talk to a model; its reasoning is printed to stderr. --json prints the server's whole answers."""
    options = {"max_tokens": max_tokens, "temperature": temperature}
    talk = _Talk(model, system, {name: value for name, value in options.items() if value is not None})
    answer = talk.answer_as_json if as_json else talk.answer

    def say(text: str) -> None:
        ask(url, api_key, lambda client: answer(client, text), interrupted="interrupted")

    if prompt:
        return say(prompt)
    by_hand = is_by_hand()
    while True:
        try:
            text = input("> " if by_hand else "")
        except (EOFError, KeyboardInterrupt):
            return None
        if not text.strip():
            continue
        try:
            say(text)
        except typer.Exit:  # the reason has been printed
            if not by_hand:
                raise


def is_by_hand() -> bool:
    return sys.stdin.isatty()


class _Talk:
    """The turns so far. A question without any answer is forgotten."""

    def __init__(self, model: str, system: str, options: dict[str, Any]) -> None:
        self._model, self._options = model, options
        self._turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    async def answer(self, client: InferenceClient, text: str) -> None:
        """Print the answer as it comes."""
        said: list[str] = []
        thinks = False
        try:
            async for event in client.events("/v1/chat/completions", await self._body(client, text)):
                for choice in event.get("choices", []):
                    delta = choice.get("delta", {})
                    if thought := delta.get("reasoning_content"):
                        thinks = True
                        err.print(thought, end="", markup=False, style="dim", soft_wrap=True)
                    if words := delta.get("content"):
                        if thinks and not said:
                            err.print()
                        said.append(words)
                        out.print(words, end="", markup=False)
            out.print()
        finally:
            self._note(text, "".join(said))

    async def answer_as_json(self, client: InferenceClient, text: str) -> None:
        """Print the server's whole answer."""
        whole = await client.call("POST", "/v1/chat/completions", dict[str, Any], await self._body(client, text))
        print_json(whole)
        self._note(text, whole["choices"][0]["message"]["content"] or "")

    async def _body(self, client: InferenceClient, text: str) -> dict[str, Any]:
        turns = [*self._turns, {"role": "user", "content": text}]
        return {"model": self._model or await only_model(client), "messages": turns, **self._options}

    def _note(self, asked: str, said: str) -> None:
        if said:
            self._turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
