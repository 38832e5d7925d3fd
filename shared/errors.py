"""Every error that crosses a process or an HTTP boundary, with its HTTP status and OpenAI type in one place.

`status` is the HTTP status, `type` and `code` are the fields of OpenAI's error object
(https://platform.openai.com/docs/guides/error-codes). A message says what was wrong, where, and what to do.
"""

from typing import ClassVar


class ParallmError(Exception):
    """Root of our errors; on its own it means a fault of ours (500)."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(ParallmError):
    """The request is malformed or asks for something impossible."""

    status = 400
    type = "invalid_request_error"


class UnsupportedParameterError(InvalidRequestError):
    """A parameter that we know and do not support, or do not know at all."""

    code = "unsupported_parameter"


class EmptyPromptError(InvalidRequestError):
    """A prompt without a single token."""

    code = "empty_prompt"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt plus max_tokens do not fit the model's context or a worker's KV memory."""

    code = "context_length_exceeded"


class LogprobsMismatchError(InvalidRequestError):
    """Posted log-probabilities are not those of the adapter version that they name."""

    code = "logprobs_mismatch"


class TokenOutOfRangeError(InvalidRequestError):
    """A token id outside the model's vocabulary."""

    code = "token_out_of_range"


class UnsupportedModelError(InvalidRequestError):
    """What is asked for needs something that this model does not have; the message says what."""

    code = "unsupported_model"


class InvalidGrammarError(InvalidRequestError):
    """A JSON schema, regular expression or grammar that cannot be enforced; the message says why."""

    code = "invalid_grammar"


class AuthenticationError(ParallmError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(ParallmError):
    """This caller may not do this: a page of another web site, or a tenant where an admin's key is needed."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFoundError(ParallmError):
    """The thing that the path or the body names does not exist."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class UnknownModelError(NotFoundError):
    """No worker has ever registered this model."""

    code = "model_not_found"


class UnknownJobError(NotFoundError):
    """No job with this id, or its time to live is over."""

    code = "job_not_found"


class UnknownFileError(NotFoundError):
    """No such file, or its time to live is over."""

    code = "file_not_found"


class UnknownBatchError(NotFoundError):
    """No such batch, or its time to live is over."""

    code = "batch_not_found"


class UnknownAdapterError(NotFoundError):
    """No adapter, or no such version of it."""

    code = "adapter_not_found"


class UnknownDeadLetterError(NotFoundError):
    """No such dead letter: never there, dropped, requeued long ago, or expired."""

    code = "dead_letter_not_found"


class AdapterRejectedError(InvalidRequestError):
    """An adapter that cannot be taken; the message names the file's key and the reason, and nothing has changed."""

    code = "adapter_rejected"


class AdapterDamagedError(ParallmError):
    """The bytes of an adapter version are not the ones that were published."""

    code = "adapter_damaged"


class ConflictError(ParallmError):
    """The request contradicts the present state, such as a demanded policy version that is not there."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class PayloadTooLargeError(ParallmError):
    """The body is larger than this server takes."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class QueueFullError(ParallmError):
    """Too much work is waiting; try again after `retry_after_s` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitedError(QueueFullError):
    """This key or this process has its share of requests under way."""

    code = "rate_limit_exceeded"


class ServiceUnavailableError(ParallmError):
    """No live worker serves the model, or the ring is shutting down or overloaded."""

    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"

    def __init__(self, message: str, *, retry_after_s: int = 2) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PausedError(ServiceUnavailableError):
    """The workers are paused (POST /pause), and this server refuses new requests meanwhile."""

    code = "paused"


class DeadlineExceededError(ParallmError):
    """The request's deadline passed before it was complete."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class RequestCancelledError(ParallmError):
    """Somebody cancelled the sequence while its client was waiting."""

    status = 499
    type = "cancelled"
    code = "cancelled"


class EngineError(ParallmError):
    """The worker's engine failed on this sequence; `finish_reason` is "error"."""

    code = "engine_error"


class UnreadableMessageError(ParallmError):
    """A message in Redis that is none of ours, or damaged; it is kept as a dead letter."""

    code = "unreadable_message"


class IncompatibleVersionError(UnreadableMessageError):
    """A message of a version that the process that got it does not read, as in a rolling upgrade."""

    status = 503
    type = "service_unavailable_error"
    code = "incompatible_version"


class SetupError(ParallmError):
    """Something needed to start is missing; the message says what to install or to set."""

    code = "setup_error"


def from_code(code: str, message: str) -> ParallmError:
    """The error whose `code` a worker wrote into a sequence's finish; unknown codes become `EngineError`."""
    pending: list[type[ParallmError]] = [ParallmError]
    while pending:
        kind = pending.pop()
        if kind.code == code:
            return kind(message)
        pending.extend(kind.__subclasses__())
    return EngineError(message)
