"""`mlx_parallm deadletters`: list, show, requeue and drop what was given up (api/ops/deadletters.py)."""

from typing import Annotated, Any

import typer

from api.cli.client import DEFAULT_URL
from api.cli.console import ApiKey, Json, JsonAnyway, Url, call, print_json, print_rows, show_text

app = typer.Typer(no_args_is_help=True, help="Sequences and messages that were given up.")

Ids = Annotated[list[str], typer.Argument(help="ids as `list` prints them")]

PATH = "/v1/deadletters"


@app.command("list")
def list_letters(
    model: Annotated[str, typer.Option("--model", "-m", help="of one model")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """List the newest dead letters first."""
    letters = call(url, api_key, "GET", PATH, model=model, limit=limit)["data"]
    if as_json:
        return print_json(letters)
    return print_rows(("id", "sequence", "attempt", "job", "can run again", "reason"), map(_row, letters))


@app.command()
def show(letter_id: str, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: JsonAnyway = False) -> None:
    """Print a dead letter with its sequence, or its state after it was requeued (JSON)."""
    print_json(call(url, api_key, "GET", f"{PATH}/{letter_id}"))


@app.command()
def requeue(letter_ids: Ids, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Run dead letters again, each once; clients have already received the error, and jobs record the failed sample."""
    for letter_id in letter_ids:
        answer = call(url, api_key, "POST", f"{PATH}/{letter_id}/requeue")
        done = "requeued" if answer["requeued"] else "had been requeued"
        show_text(answer, as_json, f"{letter_id} {done} as {answer['sequence']}")


@app.command()
def drop(letter_ids: Ids, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Delete dead letters without running them again."""
    for letter_id in letter_ids:
        answer = call(url, api_key, "DELETE", f"{PATH}/{letter_id}")
        show_text(answer, as_json, f"{letter_id} {'dropped' if answer['deleted'] else 'was not there'}")


def _row(letter: dict[str, Any]) -> tuple[str, ...]:
    runs = "yes" if letter["requeueable"] else f"no: {letter['unreadable']}"
    return letter["id"], letter["sequence"], str(letter["attempt"]), letter["job"], runs, letter["reason"]
