"""A chat in the terminal, streamed as it is written; the endpoint is OpenAI's, and so is the client.

    mlx_parallm_serve --model models/tiny --port 8000
    python examples/streaming_chat.py --url http://127.0.0.1:8000 --model tiny

Each line that you type is a turn; an empty one ends the chat. When a worker dies in mid-answer another one goes on
behind the last token that has arrived here: this program needs to do nothing for that.
"""

import argparse

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    """Ask and print until there is nothing more to ask."""
    parser = argparse.ArgumentParser(description="a streaming chat")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny", help="a base, an adapter, or a version of one: policy@3")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    messages: list[ChatCompletionMessageParam] = []
    while question := ask():
        messages.append({"role": "user", "content": question})
        answer = stream(client, options.model, messages, options.max_tokens)
        messages.append({"role": "assistant", "content": answer})


def ask() -> str:
    """The next turn of the user; "" at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def stream(client: OpenAI, model: str, messages: list[ChatCompletionMessageParam], max_tokens: int) -> str:
    """Print an answer while it comes; returns all of it."""
    answer = ""
    with client.chat.completions.create(
        model=model, messages=messages, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:  # the last chunk has none: it has the usage
                piece = choice.delta.content or ""
                print(piece, end="", flush=True)
                answer += piece
            if chunk.usage:
                print(f"\n[{chunk.usage.completion_tokens} tokens]")
    return answer


if __name__ == "__main__":
    main()
