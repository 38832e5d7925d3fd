"""`/openapi.json` as it is: bad input answers 400 with our error object, where FastAPI's own description says 422."""

from typing import Any

from fastapi import FastAPI

_BAD = {
    "description": "The request is malformed or asks for something impossible; `error.param` names the field.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}
_ANY = {
    "description": "Any other error: the process is out of its depth, or Redis out of reach.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}


def describe_errors(app: FastAPI) -> None:
    """Make the app's OpenAPI document tell the errors that it gives."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = original()
            for operations in document["paths"].values():
                for operation in operations.values():
                    _correct(operation["responses"])
            for name in ("HTTPValidationError", "ValidationError"):
                document["components"]["schemas"].pop(name, None)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _correct(responses: dict[str, Any]) -> None:
    if responses.pop("422", None) is not None:
        responses.setdefault("400", _BAD)
    responses["default"] = _ANY
