"""Bodies that the adapter routes take and give back."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, FiniteFloat, Json

from api.http.fields import RequestModel
from shared.adapters import GateCheck


class GateField(RequestModel):
    """A check that a version passed or failed."""

    name: str = Field(max_length=64)
    passed: bool
    detail: str = Field(default="", max_length=2000)
    value: float | None = Field(default=None, description="What was measured, where it has a bound.")


Gate = Annotated[list[GateField], Field(max_length=64)]


class UploadFields(RequestModel):
    """Form fields of an upload besides its files: how the adapter is published."""

    name: str | None = Field(default=None, description="the adapter; default: the setting default_adapter")
    adapter_id: str | None = Field(default=None, description="the same as `name`")
    model: str | None = Field(default=None, description="base model; may be left out when only one is served")
    set_latest: bool = Field(default=True, description="false: a candidate, which only `name@k` reaches")
    if_latest: int | None = Field(default=None, ge=0, description="409 unless this is the latest version; 0: none yet")
    train_step: int = Field(default=0, ge=0)
    metrics: Json[dict[str, FiniteFloat]] = Field(default_factory=dict, description="JSON object of figures")
    parent: int | None = Field(default=None, ge=0, description="version it was made from; default: the latest")
    gate: Json[Gate] = Field(default_factory=list, description="JSON list of the checks that it has passed")


class LoadBody(RequestModel):
    """Request body of POST /load_adapter."""

    adapter_path: str = Field(description="an adapter directory under one of the folders of --adapter-dirs")
    name: str | None = Field(default=None, description="default: the setting default_adapter")
    model: str | None = Field(default=None, description="base model; may be left out when only one is served")


class PromoteBody(RequestModel):
    """Request body of POST /v1/adapters/{name}/promote."""

    version: int = Field(ge=1)
    gate: Gate = Field(
        default_factory=list, description="the checks that it has passed; none: those of its upload stay"
    )
    if_latest: int | None = Field(default=None, ge=0, description="409 unless this is the latest version; 0: none yet")


class VersionBody(RequestModel):
    """Request body of POST /v1/adapters/{name}/rollback."""

    version: int | None = Field(
        default=None, ge=1, description="default: the newest one before that has been the latest"
    )
    reason: str = Field(default="rollback", max_length=200)


class RejectBody(RequestModel):
    """Request body of POST /v1/adapters/{name}/reject."""

    version: int = Field(ge=1)
    gate: Gate = Field(default_factory=list, description="the checks, with those that failed")


class BestBody(RequestModel):
    """Request body of POST /v1/adapters/{name}/best."""

    version: int = Field(ge=1)
    value: FiniteFloat = Field(description="the figure that it won by")


class SwitchBody(RequestModel):
    """Request body of POST /model/switch-lora."""

    version: int | str = Field(description="a version of the adapter, or `name@k`")
    name: str | None = Field(default=None, description="default: the setting default_adapter")


class LoadLoraBody(RequestModel):
    """Body of vLLM's POST /v1/load_lora_adapter."""

    off: ClassVar[dict[str, tuple[Any, ...]]] = {"is_3d_lora_weight": (False,)}

    lora_name: str
    lora_path: str
    model: str | None = Field(default=None, description="the base; may be left out when only one model is served")
    base_model_name: str | None = Field(default=None, description="the same as `model` (vLLM's)")
    load_inplace: bool = Field(default=False, description="a further version of an adapter that exists")


class UnloadLoraBody(RequestModel):
    """Body of vLLM's POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = Field(default=None, description="accepted, not used")


class LatestVersion(BaseModel):
    """The version that `latest` points to after the request."""

    status: str = "success"
    policy_version: int
    message: str


def checks_of(gate: list[GateField]) -> tuple[GateCheck, ...]:
    """A gate's checks as a manifest has them."""
    return tuple(GateCheck(check.name, check.passed, check.detail, check.value) for check in gate)
