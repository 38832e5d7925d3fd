"""How the answers to a batch's lines are written: in OpenAI's form, or in that of Anthropic's Message Batches."""

from typing import Any, Protocol

import msgspec

from api.http.anthropic_errors import anthropic_error
from api.http.errors import error_object
from shared.errors import ParallmError

MESSAGES = "/v1/messages"  # the endpoint of Message Batches
_encode = msgspec.json.encode

_UNENDED = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
    "expired": ("batch_expired", "the batch expired before this line was answered"),
    "failed": ("batch_failed", "the batch failed before this line was answered"),
}


class LineShape(Protocol):
    """Writes lines of answers. `name`: what their ids are made of."""

    in_one_file: bool  # else what was not answered with 200 has a file of its own

    def error(self, error: ParallmError) -> bytes:
        """JSON of a refusal, as the endpoint would answer it."""

    def answered(self, name: str, custom_id: str, status: int, body: Any) -> bytes:
        """The line of an answer or a refusal; `body`: what the endpoint says."""

    def unended(self, name: str, custom_id: str, ended: str) -> bytes:
        """The line of a request that the batch's end has left without an answer."""


class OpenAiLines:
    """Lines of the form `{"id", "custom_id", "response", "error"}`."""

    in_one_file = False

    def error(self, error: ParallmError) -> bytes:
        """The error as OpenAI's error object."""
        return error_object(error)

    def answered(self, name: str, custom_id: str, status: int, body: Any) -> bytes:
        """Line with the response of the endpoint."""
        return self._line(name, custom_id, {"status_code": status, "request_id": f"req_{name}", "body": body}, None)

    def unended(self, name: str, custom_id: str, ended: str) -> bytes:
        """With an error of the batch's."""
        code, message = _UNENDED.get(ended, _UNENDED["cancelled"])
        return self._line(name, custom_id, None, {"code": code, "message": message})

    def _line(self, name: str, custom_id: str, response: Any, error: Any) -> bytes:
        return (
            _encode({"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}) + b"\n"
        )


class AnthropicLines:
    """`{"custom_id", "result"}`, whatever became of the request."""

    in_one_file = True

    def error(self, error: ParallmError) -> bytes:
        """The error as Anthropic's error object."""
        return anthropic_error(error, "")

    def answered(self, name: str, custom_id: str, status: int, body: Any) -> bytes:
        """A message, or why there is none."""
        result = {"type": "succeeded", "message": body} if status == 200 else {"type": "errored", "error": body}
        return self._line(custom_id, result)

    def unended(self, name: str, custom_id: str, ended: str) -> bytes:
        """A request that was not answered in time, or not any more."""
        if ended == "failed":
            return self.answered(name, custom_id, 500, msgspec.Raw(self.error(ParallmError(_UNENDED["failed"][1]))))
        return self._line(custom_id, {"type": "expired" if ended == "expired" else "canceled"})

    def _line(self, custom_id: str, result: dict[str, Any]) -> bytes:
        return _encode({"custom_id": custom_id, "result": result}) + b"\n"


_OPENAI, _ANTHROPIC = OpenAiLines(), AnthropicLines()


def shape_of(endpoint: str) -> LineShape:
    """How answers of a batch for this endpoint are written."""
    return _ANTHROPIC if endpoint == MESSAGES else _OPENAI
