"""Every error that crosses a process or an HTTP boundary, with its HTTP status and OpenAI type in one place.

`status` is the HTTP status, `type` and `code` are the fields of OpenAI's error object
(https://platform.openai.com/docs/guides/error-codes). A message says what was wrong, where, and what to do.
"""

from collections.abc import Sequence
from typing import ClassVar


class ParallmError(Exception):
    """Root of our errors; on its own it means a fault of ours (500)."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init_subclass__(cls, *, status: int = 0, type: str = "", code: str = "") -> None:
        """Set status, type and code of a class of errors; omitted ones are inherited."""
        cls.status = status or cls.status
        cls.type = type or cls.type
        cls.code = code or cls.code

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(ParallmError, status=400, type="invalid_request_error"):
    """The request is malformed or asks for something impossible."""


class UnsupportedParameterError(InvalidRequestError, code="unsupported_parameter"):
    """A parameter that we know and do not support, or do not know at all."""


class EmptyPromptError(InvalidRequestError, code="empty_prompt"):
    """A prompt without a single token."""


class ContextLengthExceededError(InvalidRequestError, code="context_length_exceeded"):
    """Prompt plus max_tokens do not fit the model's context or a worker's KV memory."""


class LogprobsMismatchError(InvalidRequestError, code="logprobs_mismatch"):
    """Posted log-probabilities are not those of the adapter version that they name."""


class TokenOutOfRangeError(InvalidRequestError, code="token_out_of_range"):
    """A token id outside the model's vocabulary."""


class UnsupportedModelError(InvalidRequestError, code="unsupported_model"):
    """The request needs something that this model does not have; the message names it."""


class InvalidGrammarError(InvalidRequestError, code="invalid_grammar"):
    """A JSON schema, regular expression or grammar that cannot be enforced; the message has the reason."""


class AuthenticationError(ParallmError, status=401, type="authentication_error", code="invalid_api_key"):
    """No API key, or a wrong one."""


class ForbiddenError(ParallmError, status=403, type="permission_error", code="forbidden"):
    """This caller may not do this: a page of another web site, or a tenant where an admin's key is needed."""


class NotFoundError(ParallmError, status=404, type="invalid_request_error", code="not_found"):
    """The thing that the path or the body names does not exist."""


class BodyTimeoutError(InvalidRequestError, status=408, code="request_timeout"):
    """The request's body did not arrive in time; 408, since it may have been this process that stood still."""


class MethodNotAllowedError(InvalidRequestError, status=405, code="method_not_allowed"):
    """The path exists, the method does not; `allowed` are the path's methods."""

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class UnknownModelError(NotFoundError, code="model_not_found"):
    """No worker has ever registered this model."""


class UnknownJobError(NotFoundError, code="job_not_found"):
    """No job with this id, or its time to live is over."""


class UnknownFileError(NotFoundError, code="file_not_found"):
    """No such file, or its time to live is over."""


class UnknownBatchError(NotFoundError, code="batch_not_found"):
    """No such batch, or its time to live is over."""


class UnknownResponseError(NotFoundError, code="response_not_found"):
    """No such stored response of this key's: never stored, deleted, or its time to live is over."""


class UnknownConversationError(NotFoundError, code="conversation_not_found"):
    """No such conversation of this key's, or no such item in it."""


class UnknownSessionError(NotFoundError, code="session_not_found"):
    """No state of a policy under this session id: never begun, let go, or its time to live is over."""


class UnknownAdapterError(NotFoundError, code="adapter_not_found"):
    """No adapter, or no such version of it."""


class UnknownDeadLetterError(NotFoundError, code="dead_letter_not_found"):
    """No such dead letter: never there, dropped, requeued long ago, or expired."""


class UnknownRecordingError(NotFoundError, code="recording_not_found"):
    """The ring has no recording of this sequence or completion, or its time to live is over."""


class AdapterRejectedError(InvalidRequestError, code="adapter_rejected"):
    """An adapter that cannot be taken; the message names the file's key and the reason, and nothing has changed."""


class AdapterDamagedError(ParallmError, code="adapter_damaged"):
    """The bytes of an adapter version are not the ones that were published."""


class ConflictError(ParallmError, status=409, type="invalid_request_error", code="conflict"):
    """The request contradicts the present state, such as a demanded policy version that is not there."""


class GoneError(ParallmError, status=410, type="invalid_request_error", code="gone"):
    """The result of a Tinker client's request, or its session, has expired."""


class PayloadTooLargeError(ParallmError, status=413, type="invalid_request_error", code="payload_too_large"):
    """The body is larger than this server takes."""


class HeadersTooLargeError(ParallmError, status=431, type="invalid_request_error", code="headers_too_large"):
    """The headers of a request are longer than this server takes."""


class QueueFullError(ParallmError, status=429, type="rate_limit_error", code="queue_full"):
    """Too much work is waiting; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitedError(QueueFullError, code="rate_limit_exceeded"):
    """This key or this process has its share of requests under way."""


class LateFirstTokenError(QueueFullError, code="first_token_too_late"):
    """So much is waiting that the first token would come after its deadline; the deadline or the load must change."""

    def __init__(self, waiting: int, message: str = "the first token would come too late", *, retry_after_s: int = 1):
        super().__init__(message, retry_after_s=retry_after_s)
        self.waiting = waiting


class ServiceUnavailableError(ParallmError, status=503, type="service_unavailable_error", code="service_unavailable"):
    """No live worker serves the model, or the ring is shutting down or overloaded."""

    def __init__(self, message: str, *, retry_after_s: int = 2) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PausedError(ServiceUnavailableError, code="paused"):
    """The workers are paused (POST /pause), and this server refuses new requests meanwhile."""


class DeadlineExceededError(ParallmError, status=504, type="timeout_error", code="deadline_exceeded"):
    """The request's deadline passed before it was complete."""


class RequestCancelledError(ParallmError, status=499, type="cancelled", code="cancelled"):
    """The sequence was cancelled while its client was waiting."""


class EngineError(ParallmError, code="engine_error"):
    """The worker's engine failed on this sequence; `finish_reason` is "error"."""


class UnreadableMessageError(ParallmError, code="unreadable_message"):
    """A message in Redis that is none of ours, or damaged; it is stored as a dead letter."""


class IncompatibleVersionError(
    UnreadableMessageError, status=503, type="service_unavailable_error", code="incompatible_version"
):
    """A message of a version that the process that got it does not read, as in a rolling upgrade."""


class SetupError(ParallmError, code="setup_error"):
    """Something needed to start is missing; the message names what to install or to set."""


def from_code(code: str, message: str) -> ParallmError:
    """The error whose `code` a worker wrote into a sequence's finish; unknown codes become `EngineError`."""
    pending: list[type[ParallmError]] = [ParallmError]
    while pending:
        kind = pending.pop()
        if kind.code == code:
            return kind(message)
        pending.extend(kind.__subclasses__())
    return EngineError(message)
