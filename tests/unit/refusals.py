"""What a request body is refused with, as a client would see it."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from api.http.errors import from_validation
from shared.errors import (
    InvalidRequestError,
)

HELLO = [{"role": "user", "content": "hello"}]


def refusal(kind: type[BaseModel], body: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return from_validation(caught.value.errors())
