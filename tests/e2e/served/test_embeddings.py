"""Embeddings through the openai client, next to a chat."""

import base64

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from tests.e2e.rings import MODEL, Ring
from tests.waiting import HANG_S


@pytest.fixture
def client(served: Ring):
    with OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as made:
        yield made


def embed(client: OpenAI, texts: object, **fields: object) -> np.ndarray:
    answer = client.embeddings.create(model=MODEL, input=texts, **fields)  # type: ignore[arg-type,call-overload]
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return np.array([each.embedding for each in answer.data])


def test_inputs_keep_their_order_and_equal_ones_are_equal(client: OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="Count", max_tokens=400, stream=True)
    texts = ["hello", "what is 12+35?", "hello", "x" * 700]
    vectors = embed(client, texts)
    for _ in stream:
        break
    stream.close()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(vectors[0], vectors[2])
    assert vectors[0] @ vectors[1] < 0.999
    for at in (0, 1, 3):
        np.testing.assert_allclose(embed(client, texts[at])[0], vectors[at], rtol=1e-3, atol=1e-4)


def test_text_and_its_ids_are_the_same_input(served: Ring, client: OpenAI) -> None:
    body = {"model": MODEL, "prompt": "hello there"}
    ids = httpx.post(f"{served.url}/tokenize", json=body, timeout=HANG_S).json()["tokens"]
    text = embed(client, "hello there")
    np.testing.assert_allclose(embed(client, ids), text, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(embed(client, [ids, ids]), [text[0]] * 2, rtol=1e-5, atol=1e-6)


def test_floats_and_base64_are_the_same_numbers(served: Ring) -> None:
    def ask(**fields: object) -> dict:
        body = {"model": MODEL, "input": "hello", **fields}
        return httpx.post(f"{served.openai_url}/embeddings", json=body, timeout=HANG_S).json()

    floats, encoded = ask(), ask(encoding_format="base64")
    decoded = np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, floats["data"][0]["embedding"], rtol=1e-6)
    tokens = floats["usage"]["prompt_tokens"]
    assert floats["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens} and tokens > 0
    raw = np.array(ask(normalize=False)["data"][0]["embedding"])
    np.testing.assert_allclose(raw / np.linalg.norm(raw), decoded, rtol=1e-4, atol=1e-6)
    last = np.array(ask(pooling="last")["data"][0]["embedding"])
    assert abs(last @ decoded) < 0.9999


def test_dimensions_are_the_first_ones_normalised_again(client: OpenAI) -> None:
    whole, short = embed(client, "hello"), embed(client, "hello", dimensions=16)
    assert short.shape == (1, 16)
    first = whole[0, :16]
    np.testing.assert_allclose(short[0], first / np.linalg.norm(first), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 100_000}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [1, 100_000]}, "input"),
        ({"input": "a " * 5000}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"input": ["a"] * 2049}, "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(client: OpenAI, fields: dict, param: str) -> None:
    body = {"input": "hello", **fields}
    with pytest.raises(openai.BadRequestError) as raised:
        client.post("/embeddings", body={"model": MODEL, **body}, cast_to=object)
    assert raised.value.response.json()["error"]["param"] == param


def test_scores_and_ranks_are_the_cosines_of_the_embeddings(served: Ring, client: OpenAI) -> None:
    def ask(path: str, **body: object) -> dict:
        response = httpx.post(f"{served.url}{path}", json={"model": MODEL, **body}, timeout=HANG_S)
        assert response.status_code == 200, response.text
        return response.json()

    texts = ["hello", "hello there", "what is 12+35?", "good morning"]
    vectors = embed(client, texts)
    cosines = vectors[1:] @ vectors[0]
    scored = ask("/score", text_1=texts[0], text_2=texts[1:])
    np.testing.assert_allclose([each["score"] for each in scored["data"]], cosines, rtol=1e-3, atol=1e-4)
    paired = ask("/v1/score", queries=texts[:2], documents=texts[2:])
    expected = [vectors[0] @ vectors[2], vectors[1] @ vectors[3]]
    np.testing.assert_allclose([each["score"] for each in paired["data"]], expected, rtol=1e-3, atol=1e-4)
    order = np.argsort(-cosines)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = ask(path, query=texts[0], documents=texts[1:], top_n=2)["results"]
        assert [each["index"] for each in ranked] == order[:2].tolist()
        assert [each["document"]["text"] for each in ranked] == [texts[1 + at] for at in order[:2]]
    pooled = ask("/pooling", input=texts, task="embed", truncate_prompt_tokens=-1)
    for got, vector in zip(pooled["data"], vectors, strict=True):
        np.testing.assert_allclose(got["data"], vector, rtol=1e-3, atol=1e-4)
    classified = ask("/classify", input="12+35=", labels=["47", "hello"], template="{input}")
    assert classified["data"][0]["label"] == "47"
    assert (
        classified["data"]
        == ask("/v1/classifications", input="12+35=", labels=["47", "hello"], template="{input}")["data"]
    )
