"""What the OpenAI endpoints accept, refuse, and how they name what they refuse."""

from typing import Any

import pytest
from pydantic import BaseModel

from api.generation.plan import check_prompts, room_for
from api.generation.sampling import sampling_of
from api.openai.bodies import ChatCompletionRequest, CompletionRequest
from api.openai.embeddings import EmbeddingRequest
from api.openai.responses.body import ResponseRequest
from shared.errors import (
    ContextLengthExceededError,
    EmptyPromptError,
    TokenOutOfRangeError,
    UnsupportedParameterError,
)
from shared.process.api_settings import ApiSettings
from shared.sequences import ModelCard
from tests.unit.refusals import HELLO, refusal

CARD = ModelCard("m", 32, 100, (2,), "t" * 64, "b" * 64, 8, "float32")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: Any, expected: Any) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == expected


@pytest.mark.parametrize("prompt", [None, 5, [], [1, "a"], [[1], "a"], [[1.5]], {"a": 1}, [[True]]])
def test_other_prompts_are_refused_by_name(prompt: Any) -> None:
    assert refusal(CompletionRequest, {"prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": "a\ud800b"}),
        (CompletionRequest, {"prompt": ["a", "\udc00"]}),
        (CompletionRequest, {"prompt": "a", "stop": "\ud800"}),
        (CompletionRequest, {"prompt": "a", "model": "\ud800"}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a\ud800"}]}),
    ],
)
def test_half_a_surrogate_pair_is_refused(kind: type[BaseModel], body: dict[str, Any]) -> None:
    assert "surrogate" in refusal(kind, body).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("logprobs_mode", "raw_logits"),
        ("logprobs_mode", "processed_logits"),
        ("top_p", 1.1),
        ("presence_penalty", 3),
        ("n", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("logprobs", 21),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("seed", 2**64),
        ("stop_token_ids", [-1]),
        ("stream", "maybe"),
    ],
)
def test_values_out_of_range_are_refused_with_the_parameters_name(field: str, value: Any) -> None:
    error = refusal(CompletionRequest, {"prompt": "a", field: value})
    assert error.param is not None and error.param.startswith(field)
    assert error.status == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"priority": 2}, "priority"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_what_we_do_not_support_in_completions_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    error = refusal(CompletionRequest, {"prompt": "a", **body})
    assert isinstance(error, UnsupportedParameterError)
    assert error.param == param
    assert param.rsplit(".")[-1] in error.message


@pytest.mark.parametrize(
    "body",
    [
        {"suffix": None, "best_of": 1, "user": "u", "store": False, "metadata": {"a": "b"}},
        {"suffix": "", "n": 2, "best_of": 2},
        {"temperature": None, "top_p": None, "max_tokens": None, "stop": None, "logit_bias": None},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"use_beam_search": False, "skip_special_tokens": True, "length_penalty": 1.0},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(body: dict[str, Any]) -> None:
    CompletionRequest.model_validate({"prompt": "a", **body})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"adapter": "a", "lora_adapter": "b"}, "adapter"),
    ],
)
def test_contradictions_are_refused(body: dict[str, Any], param: str) -> None:
    assert refusal(CompletionRequest, {"prompt": "a", **body}).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_we_do_not_support_in_chats_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    error = refusal(ChatCompletionRequest, {"messages": HELLO, **body})
    assert isinstance(error, UnsupportedParameterError)
    assert error.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["", "b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_a_format_that_says_nothing_or_too_much_is_refused(body: dict[str, Any], param: str) -> None:
    assert refusal(ChatCompletionRequest, {"messages": HELLO, **body}).param == param


def test_the_same_parameters_with_values_that_mean_off_are_accepted() -> None:
    body = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    ChatCompletionRequest.model_validate({"messages": HELLO, "store": False, "service_tier": "auto", **body})


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        ({"5": 1, "cat": 1, "dog": "x"}, "not a token id: 'cat', 'dog'"),
        ({f"x{i}": 1 for i in range(9)}, "'x7' and more"),
        ({"5": "x"}, "key '5' is not"),
        ({"7": 101}, "key '7' lies"),
    ],
)
def test_a_bad_bias_is_named(bias: dict[str, Any], said: str) -> None:
    error = refusal(ChatCompletionRequest, {"messages": HELLO, "logit_bias": bias})
    assert error.param == "logit_bias"
    assert said in error.message


def test_null_sampling_fields_mean_their_defaults() -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "temperature": None, "top_k": -1, "seed": -1})
    sampling = sampling_of(body, CARD, 4, top_logprobs=None, prompt_logprobs=None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.seed == 2**63 - 1


def test_a_request_without_a_seed_gets_a_random_one() -> None:
    body = CompletionRequest.model_validate({"prompt": "a"})
    seeds = {sampling_of(body, CARD, 4, top_logprobs=None, prompt_logprobs=None).seed for _ in range(8)}
    assert len(seeds) == 8


@pytest.mark.parametrize("body", [{"stop_token_ids": [100]}, {"logit_bias": {"100": 1}}])
def test_token_ids_outside_the_vocabulary_are_refused(body: dict[str, Any]) -> None:
    parsed = CompletionRequest.model_validate({"prompt": "a", **body})
    with pytest.raises(TokenOutOfRangeError):
        sampling_of(parsed, CARD, 4, top_logprobs=None, prompt_logprobs=None)


def test_prompts_are_checked_against_the_model() -> None:
    settings = ApiSettings(redis="redis://x", max_prompt_tokens=8)
    with pytest.raises(EmptyPromptError):
        check_prompts([[]], CARD, settings, "prompt")
    with pytest.raises(TokenOutOfRangeError, match="100"):
        check_prompts([[1], [100]], CARD, settings, "prompt")
    with pytest.raises(ContextLengthExceededError, match="up to 8"):
        check_prompts([[1] * 9], CARD, settings, "prompt")
    check_prompts([[0, 99]], CARD, settings, "prompt")


def test_max_tokens_must_fit_behind_the_prompt_and_defaults_to_what_fits() -> None:
    assert room_for([[1] * 30], CARD, None, 16) == 2
    assert room_for([[1]], CARD, None, 16) == 16
    assert room_for([[1] * 30], CARD, 2, 16) == 2
    with pytest.raises(ContextLengthExceededError, match="context is 32"):
        room_for([[1] * 30], CARD, 3, 16)
    with pytest.raises(ContextLengthExceededError):
        room_for([[1] * 32], CARD, None, 16)


@pytest.mark.parametrize(
    ("kind", "body", "param", "said"),
    [
        (CompletionRequest, {"prompt": "a", "foo-bar": 1}, "foo-bar", "unknown parameter 'foo-bar'"),
        (CompletionRequest, {"prompt": "a", "int": 1}, "int", "unknown parameter 'int'"),
        (ChatCompletionRequest, {"messages": ["hi"]}, "messages[0]", "'messages[0]' must be an object"),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
            "valid string",
        ),
        (
            ChatCompletionRequest,
            {"messages": HELLO, "tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
            "is required",
        ),
        (ResponseRequest, {"input": ["hi"]}, "input[0]", "must be an object"),
        (ResponseRequest, {"input": [{"role": "user"}]}, "input[0].content", "is required"),
        (ResponseRequest, {"input": [{"type": 5}]}, "input[0].type", "type '5' is not supported"),
    ],
)
def test_the_place_of_an_error_is_told_as_the_user_wrote_it(
    kind: type[BaseModel], body: dict[str, Any], param: str, said: str
) -> None:
    error = refusal(kind, body)
    assert error.param == param
    assert said in error.message


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatCompletionRequest, {"messages": HELLO, "top_logprobs": 0}),
        (ChatCompletionRequest, {"messages": HELLO, "moderation": None, "prompt_cache_options": {"ttl": "1h"}}),
        (ChatCompletionRequest, {"messages": HELLO, "bad_words": [], "chat_template": None, "documents": None}),
        (CompletionRequest, {"prompt": "a", "cache_salt": None, "vllm_xargs": None, "request_id": None}),
        (ResponseRequest, {"input": "a", "stream_options": {"include_obfuscation": False}, "moderation": None}),
        (ResponseRequest, {"input": "a", "reasoning": {"effort": None, "context": None, "mode": "standard"}}),
        (
            ResponseRequest,
            {"input": "a", "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}},
        ),
        (EmbeddingRequest, {"input": ["a"] * 2048}),
    ],
)
def test_what_clients_send_without_asking_for_anything_is_accepted(kind: type[BaseModel], body: dict[str, Any]) -> None:
    kind.model_validate(body)


def test_more_inputs_than_an_embedding_has_are_refused() -> None:
    assert refusal(EmbeddingRequest, {"input": ["a"] * 2049}).param == "input"


def test_no_log_probabilities_are_asked_for_with_false() -> None:
    assert CompletionRequest.model_validate({"prompt": "a", "logprobs": False}).logprobs is None


@pytest.mark.parametrize("server", ["raw_logprobs", "processed_logprobs"])
def test_a_request_says_which_logprobs_it_wants_or_the_server_does(server: Any) -> None:
    asked = CompletionRequest.model_validate({"prompt": "a", "logprobs_mode": "raw_logprobs"})
    silent = CompletionRequest.model_validate({"prompt": "a"})
    more: dict[str, Any] = {"top_logprobs": None, "prompt_logprobs": None, "logprobs_mode": server}
    assert sampling_of(asked, CARD, 4, **more).logprobs_mode == "raw_logprobs"
    assert sampling_of(silent, CARD, 4, **more).logprobs_mode == server


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"top_p": 0.9}, "processed_logprobs"),
        ({}, "raw_logprobs"),
        ({"temperature": 0}, "raw_logprobs"),
        ({"temperature": 0.7, "presence_penalty": 1}, "raw_logprobs"),
        ({"temperature": 0.7, "logprobs": 0}, "raw_logprobs"),
        ({"temperature": 0.7, "logprobs_mode": "raw_logprobs"}, "raw_logprobs"),
        ({"temperature": 0.7, "collect_trajectory": False}, "raw_logprobs"),
    ],
)
def test_a_collected_trajectory_has_the_logprobs_that_its_trainer_needs(fields: dict[str, Any], expected: str) -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "collect_trajectory": True, **fields})
    assert sampling_of(body, CARD, 4, top_logprobs=None, prompt_logprobs=None).logprobs_mode == expected
