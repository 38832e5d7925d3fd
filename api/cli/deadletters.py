"""`mlx_parallm deadletters`: list, show, requeue and drop what was given up (api/ops/deadletters.py)."""

from typing import Annotated, Any

import typer

from api.cli.client import DEFAULT_URL, InferenceClient
from api.cli.console import ApiKey, Json, JsonAnyway, Url, out, perform, print_json, print_rows

app = typer.Typer(no_args_is_help=True, help="Sequences and messages that were given up.")

Ids = Annotated[list[str], typer.Argument(help="ids as `list` prints them")]

Answer = dict[str, Any]


@app.command("list")
def list_letters(
    model: Annotated[str, typer.Option("--model", "-m", help="of one model")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """List them, newest first."""
    found = _call(url, api_key, "GET", "", model=model, limit=limit)["data"]
    if as_json:
        return print_json(found)
    return print_rows(("id", "sequence", "attempt", "job", "can run again", "reason"), map(_row, found))


@app.command()
def show(letter_id: str, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: JsonAnyway = False) -> None:
    """Print one with its sequence, or what has become of it since it was requeued (JSON)."""
    print_json(_call(url, api_key, "GET", f"/{letter_id}"))


@app.command()
def requeue(letter_ids: Ids, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Run them again, each once; its client has had its error, and its job keeps the failed sample."""
    for letter_id in letter_ids:
        answer = _call(url, api_key, "POST", f"/{letter_id}/requeue")
        if as_json:
            print_json(answer)
            continue
        out.print(f"{letter_id} {'requeued' if answer['requeued'] else 'had been requeued'} as {answer['sequence']}")


@app.command()
def drop(letter_ids: Ids, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Forget them."""
    for letter_id in letter_ids:
        answer = _call(url, api_key, "DELETE", f"/{letter_id}")
        if as_json:
            print_json(answer)
            continue
        out.print(f"{letter_id} {'dropped' if answer['deleted'] else 'was not there'}")


def _row(letter: Answer) -> tuple[str, ...]:
    runs = "yes" if letter["requeueable"] else f"no: {letter['unreadable']}"
    return letter["id"], letter["sequence"], str(letter["attempt"]), letter["job"], runs, letter["reason"]


def _call(url: str, api_key: str, method: str, path: str, **params: Any) -> Answer:
    async def run() -> Answer:
        async with InferenceClient(url, api_key=api_key, patience_s=5) as client:
            return await client.call(method, f"/v1/deadletters{path}", Answer, **params)

    return perform(run())
