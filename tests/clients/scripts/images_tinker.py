"""Tinker's SDK shows images to a model that sees: samples are those of chats, passes learn, bad ones are named.

Version 0.38 sends passes as protobuf, 0.24 as JSON. Run by `python -m tests.clients`, with a worker and a training
service of the model beside it.
"""

import json
import os
import urllib.request
from base64 import b64encode
from pathlib import Path

os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import tinker
from tinker import types

FOLDER, URL, BLIND = Path(os.environ["PARALLM_EYES_DIR"]), os.environ["PARALLM_URL"], os.environ["PARALLM_MODEL_NAME"]
MODEL = FOLDER.name
IMAGE = json.loads((FOLDER / "config.json").read_text())["image_token_id"]
asked = [json.loads(line) for line in (FOLDER / "examples" / "questions.jsonl").read_text().splitlines()][:4]
GREEDY = types.SamplingParams(max_tokens=4, temperature=0.0)


def done(future: object) -> object:
    """Clients are made at once by 0.24, and by a future in 0.38."""
    return future.result() if hasattr(future, "result") else future


def chat(question: str, picture: bytes) -> tuple[list[int], list[int]]:
    """Token ids of a chat's prompt and of its answer."""
    url = f"data:image/png;base64,{b64encode(picture).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    sent = json.dumps({**body, "return_token_ids": True}).encode()
    with urllib.request.urlopen(f"{URL}/v1/chat/completions", sent, timeout=120) as answer:
        found = json.loads(answer.read())
    return found["prompt_token_ids"], found["choices"][0]["token_ids"]


def with_image(prompt: list[int], picture: bytes, expected: int | None = None) -> types.ModelInput:
    """The same prompt with a chunk in the place of what the template has written for the image."""
    places = [at for at, token in enumerate(prompt) if token == IMAGE]
    start, end = places[0] - 2, places[-1] + 2  # two marks before its vectors, and one behind them
    chunk = types.ImageChunk(data=picture, format="png", expected_tokens=expected or end - start)
    before, behind = types.EncodedTextChunk(tokens=prompt[:start]), types.EncodedTextChunk(tokens=prompt[end:])
    return types.ModelInput(chunks=[before, chunk, behind])


def refused(words: str, ask: object) -> None:
    """It fails, and says so."""
    try:
        ask()
    except (tinker.TinkerError, ValueError) as error:
        assert words in str(error), (words, error)
    else:
        raise AssertionError(f"not refused: {words}")


def main() -> None:
    service = tinker.ServiceClient(base_url=URL, api_key="tml-any-key-of-ours")
    served = {each.model_name for each in service.get_server_capabilities().supported_models}
    assert {MODEL, BLIND} <= served
    sampler = done(service.create_sampling_client(base_model=MODEL))
    pictures = [(FOLDER / "examples" / each["picture"]).read_bytes() for each in asked]
    chats = [chat(each["question"], picture) for each, picture in zip(asked, pictures, strict=True)]
    for (prompt, said), picture in zip(chats, pictures, strict=True):
        shown = with_image(prompt, picture)
        assert shown.length == len(prompt)
        found = sampler.sample(shown, 3, GREEDY).result().sequences
        assert [list(each.tokens) for each in found] == [said] * 3, (found, said)

    # What is learned of one picture is said of it.
    training = done(service.create_lora_training_client(base_model=MODEL, rank=8, seed=7))
    (prompt, right), picture = chats[0], pictures[0]
    answer = next(said for _, said in chats if said != right)  # of another picture
    seen = with_image(prompt, picture)
    whole = [*prompt, *answer]
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(answer), np.float32)
    datum = types.Datum(
        model_input=types.ModelInput(chunks=[*seen.chunks, types.EncodedTextChunk(tokens=answer[:-1])]),
        loss_fn_inputs={"target_tokens": np.array(whole[1:], np.int64), "weights": weights},
    )
    text = types.Datum(
        model_input=types.ModelInput.from_ints(prompt[:2]),
        loss_fn_inputs={"target_tokens": np.array(prompt[1:3]), "weights": np.array([0.0, 0.0], np.float32)},
    )
    losses = []
    for _ in range(16):
        passed = training.forward_backward([datum, text], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.005)).result()
        losses.append(passed.result().metrics["loss:sum"])
    assert losses[-1] < 0.1 * losses[0], losses
    learned = done(training.save_weights_and_get_sampling_client())
    most = types.SamplingParams(max_tokens=len(answer), temperature=0.0)
    (drawn,) = learned.sample(seen, 1, most).result().sequences
    assert list(drawn.tokens) == answer, drawn
    said = np.array(training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    np.testing.assert_allclose(said[-len(answer) :], drawn.logprobs, atol=0.02)

    count = seen.length - len(prompt) + seen.chunks[1].expected_tokens
    wrong = with_image(prompt, picture, expected=count + 1)
    refused(f"comes to {count} tokens", lambda: sampler.sample(wrong, 1, GREEDY).result())
    bad = types.ImageChunk(data=picture[: len(picture) // 2], format="png", expected_tokens=count)
    local = types.ImageAssetPointerChunk(location="https://127.0.0.1/a.png", format="png", expected_tokens=count)
    lonely = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=prompt)])  # placeholders that belong to no image
    for words, chunk in (("chunks[0]", bad), ("does not fetch", local)):
        given = types.ModelInput(chunks=[chunk, types.EncodedTextChunk(tokens=prompt[-3:])])
        refused(words, lambda given=given: sampler.sample(given, 1, GREEDY).result())
    twice = types.ModelInput(chunks=[*seen.chunks, *lonely.chunks])
    refused("cannot be distinguished", lambda: sampler.sample(twice, 1, GREEDY).result())
    refused("with images", lambda: sampler.sample(seen, 1, GREEDY, include_prompt_logprobs=True).result())
    blind = done(service.create_sampling_client(base_model=BLIND))
    refused("takes no images", lambda: blind.sample(seen, 1, GREEDY).result())
    unlike = types.Datum(model_input=wrong, loss_fn_inputs=datum.loss_fn_inputs)
    for words, given in ((f"comes to {count} tokens", unlike), ("target_tokens of shape", short(datum))):
        other = done(service.create_lora_training_client(base_model=MODEL, rank=4))
        refused(words, lambda given=given, other=other: other.forward_backward([given], "cross_entropy").result())
    again = training.forward([datum], "cross_entropy").result().metrics["loss:sum"]
    assert abs(again + said[-len(answer) :].sum()) < 1e-3, "what was refused has changed nothing"
    print(f"tinker {tinker.__version__}: {len(chats)} chats as samples; loss {losses[0]:.2f} -> {losses[-1]:.2f}")


def short(datum: types.Datum) -> types.Datum:
    """The same without its last chunk, so that it has fewer tokens than targets."""
    chunks = datum.model_input.chunks[:-1]
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=datum.loss_fn_inputs)


main()
os._exit(0)  # the SDK's threads would wait for telemetry
