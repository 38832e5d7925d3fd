"""Tinker's own SDK, with protobuf bodies (0.38) or JSON ones (0.24): learns a sum, samples it, saves, goes on.

Supervised learning with cross_entropy and with a custom loss, each of the losses of reinforcement learning, states with
and without moments, samplers, log-probabilities of prompts, checkpoints and their files, and errors that name what is
wrong.
"""

import asyncio
import inspect
import io
import os
import tarfile
import urllib.request
import warnings

import numpy as np

warnings.simplefilter("ignore")

import tinker  # noqa: E402
from safetensors.numpy import load as read_safetensors  # noqa: E402
from tinker import types  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

URL, MODEL = os.environ["PARALLM_URL"], os.environ["PARALLM_MODEL_NAME"]
tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{os.environ['PARALLM_MODEL_DIR']}/tokenizer.json")


def ids(text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


PROMPT, ANSWER = ids("The colour of the sky at noon is"), ids(" 4711")
WHOLE = PROMPT + ANSWER
WAIT_S = 900  # for an answer, which a client without one would wait for, for ever


def datum(**inputs: list[float]) -> types.Datum:
    """The prompt and its answer, of which only the answer counts."""
    before = [0.0] * (len(PROMPT) - 1)
    named = {name: np.array(before + values, np.float32) for name, values in inputs.items()}
    targets = {"target_tokens": np.array(WHOLE[1:], np.int64)}
    return types.Datum(model_input=types.ModelInput.from_ints(WHOLE[:-1]), loss_fn_inputs={**targets, **named})


def array(output: dict, name: str) -> np.ndarray:
    return np.array(output[name].data, np.float64)


def learn(training: tinker.TrainingClient, rounds: int, rate: float) -> list[float]:
    """Cross entropy of the answer before each step; step and pass are sent without waiting."""
    losses = []
    given = [datum(weights=[1.0] * len(ANSWER))]
    waiting = [
        (
            training.forward_backward(given, "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=rate, beta2=0.95)),
        )
        for _ in range(rounds)
    ]
    for passed, stepped in waiting:
        done = passed.result()
        logprobs = array(done.loss_fn_outputs[0], "logprobs")
        assert len(logprobs) == len(WHOLE) - 1
        losses.append(done.metrics["loss:sum"])
        assert abs(losses[-1] + logprobs[len(PROMPT) - 1 :].sum()) < 1e-4
        stepped.result()
    return losses


def downloaded(training: tinker.TrainingClient, rest: object, saved: str) -> dict[str, bytes]:
    """Files of a checkpoint, as each SDK asks for them: 0.24 an archive, 0.38 external weights one by one."""
    if not hasattr(rest, "get_external_weights_urls"):
        address = rest.get_checkpoint_archive_url_from_tinker_path(saved).result()
        with urllib.request.urlopen(address.url, timeout=60) as answer:
            whole = io.BytesIO(answer.read())
        with tarfile.open(fileobj=whole) as archive:
            return {each.name: archive.extractfile(each).read() for each in archive.getmembers()}
    path = training.save_weights_external("out").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    found = {}
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=60) as answer:
            found[name] = answer.read()
    rest.delete_checkpoint_from_tinker_path(path).result()
    return found


def about_the_prompt(sampler: tinker.SamplingClient) -> None:
    """Its last log-probabilities alone, those of tokens that are named, and tokens that are drawn in its places."""
    prompt, one = types.ModelInput.from_ints(WHOLE), types.SamplingParams(max_tokens=1, seed=3)
    own = sampler.compute_logprobs(prompt).result()
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_logprobs_last_n": 2}
    last = sampler.sample(prompt, 2, one, **asked).result()
    assert last.prompt_logprobs[:-2] == [None] * (len(WHOLE) - 2)
    np.testing.assert_allclose(last.prompt_logprobs[-2:], own[-2:], atol=1e-4)
    assert last.topk_prompt_logprobs[:-2] == [None] * (len(WHOLE) - 2) and len(last.topk_prompt_logprobs[-1]) == 2
    dense = np.full((len(WHOLE) - 1, 2), -1, np.int64)
    dense[:, 0] = WHOLE[1:]
    dense[1, 1] = WHOLE[0]
    crow, columns = [0, *[0] * (len(WHOLE) - 2), 1], [1]
    sparse = types.TensorData(
        data=np.array(WHOLE[-1:]),
        dtype="int64",
        shape=list(dense.shape),
        sparse_crow_indices=crow,
        sparse_col_indices=columns,
    )
    told = sampler.sample(prompt, 1, one, target_prompt_logprobs=types.TensorData.from_numpy(dense)).result()
    found = np.array(told.target_prompt_logprobs.data).reshape(dense.shape)
    np.testing.assert_allclose(found[:, 0], own[1:], atol=1e-4)
    assert told.prompt_logprobs is None and (found[dense == -1] == 0).all() and found[1, 1] < 0
    few = sampler.sample(prompt, 1, one, target_prompt_logprobs=sparse, prompt_alt_tokens_k=3).result()
    assert (few.target_prompt_logprobs.sparse_crow_indices, few.target_prompt_logprobs.shape) == (
        crow,
        [len(WHOLE) - 1, 2],
    )
    np.testing.assert_allclose(few.target_prompt_logprobs.data, own[-1:], atol=1e-4)
    drawn = np.array(few.prompt_alt_tokens.tokens.data).reshape(few.prompt_alt_tokens.tokens.shape)
    assert drawn.shape == (len(WHOLE) - 1, 3)
    again = types.TensorData.from_numpy(drawn.astype(np.int64))
    told = sampler.sample(prompt, 1, one, target_prompt_logprobs=again).result()
    np.testing.assert_allclose(told.target_prompt_logprobs.data, few.prompt_alt_tokens.logprobs.data, atol=1e-4)
    for wrong in ({"prompt_alt_tokens_k": 21}, {"include_prompt_logprobs": True, "prompt_logprobs_last_n": len(WHOLE)}):
        try:
            sampler.sample(prompt, 1, one, **wrong).result()
        except tinker.TinkerError as error:
            assert next(reversed(wrong)) in str(error), error
        else:
            raise AssertionError(f"{wrong} was taken")


def main() -> None:
    service = tinker.ServiceClient(base_url=URL, api_key="tml-any-key-of-ours")
    served = {each.model_name: each for each in service.get_server_capabilities().supported_models}
    assert MODEL in served
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=7)
    if hasattr(training, "result"):
        training = training.result()
    assert training.get_info().lora_rank == 8

    losses = learn(training, 20, 0.01)
    assert losses[-1] < 0.1 * losses[0], losses

    saved = training.save_state("twenty").result().path
    sampler = training.save_weights_and_get_sampling_client()
    if hasattr(sampler, "result"):
        sampler = sampler.result()
    greedy = types.SamplingParams(max_tokens=len(ANSWER), temperature=0.0, stop=[])
    answer = sampler.sample(types.ModelInput.from_ints(PROMPT), 2, greedy).result()
    assert [list(each.tokens) for each in answer.sequences] == [ANSWER] * 2, answer
    assert answer.sequences[0].stop_reason == "length"
    assert len(answer.sequences[0].logprobs) == len(ANSWER)
    base = service.create_sampling_client(base_model=MODEL)
    if hasattr(base, "result"):
        base = base.result()
    if "kind" in inspect.signature(training.save_weights_and_get_sampling_client).parameters:  # 0.38
        inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
        answer = inflight.sample(types.ModelInput.from_ints(PROMPT), 1, greedy).result()
        assert list(answer.sequences[0].tokens) == ANSWER, answer
    known = [logp for logp in sampler.compute_logprobs(types.ModelInput.from_ints(WHOLE)).result() if logp is not None]
    unknown = [logp for logp in base.compute_logprobs(types.ModelInput.from_ints(WHOLE)).result() if logp is not None]
    assert len(known) == len(WHOLE) - 1 and sum(known) > sum(unknown)
    one = types.SamplingParams(max_tokens=1)
    tops = base.sample(
        types.ModelInput.from_ints(PROMPT), 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    assert tops.topk_prompt_logprobs is not None

    if "prompt_logprobs_last_n" in inspect.signature(base.sample).parameters:  # 0.38
        about_the_prompt(base)

    # What the service says of a forward is what workers say of the version.
    said = training.forward([datum(weights=[1.0] * len(ANSWER))], "cross_entropy").result()
    np.testing.assert_allclose(array(said.loss_fn_outputs[0], "logprobs"), known, atol=0.02)

    sampled = known[len(PROMPT) - 1 :]
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        advantages = datum(logprobs=sampled, advantages=[0.5] * len(ANSWER))
        done = training.forward_backward([advantages], loss).result()
        assert np.isfinite(done.metrics["loss:sum"]), loss
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    assert stepped.metrics is None or stepped.metrics["step:max"] == 21

    custom = ""
    try:
        import torch  # noqa: F401
    except ImportError:
        custom = "; no custom loss without torch"
    else:

        def squares(data: list, logprobs: list) -> tuple:
            loss = sum((each[len(PROMPT) - 1 :] ** 2).sum() for each in logprobs)
            return loss, {"squares": float(loss)}

        done = training.forward_backward_custom([datum(weights=[1.0] * len(ANSWER))], squares)
        if asyncio.iscoroutine(done):
            done = asyncio.run(done)
        assert done.result().metrics["squares"] >= 0
        training.optim_step(types.AdamParams(learning_rate=1e-4)).result()

    # From the state: with its moments it goes on as it would have, without them it begins with new ones.
    for make in (
        service.create_training_client_from_state_with_optimizer,
        service.create_training_client_from_state,
    ):
        again = make(saved)
        if hasattr(again, "result"):
            again = again.result()
        assert again.get_info().lora_rank == 8
        first = again.forward([datum(weights=[1.0] * len(ANSWER))], "cross_entropy").result()
        np.testing.assert_allclose(array(first.loss_fn_outputs[0], "logprobs"), known, atol=0.02)

    kept = training.save_weights_for_sampler("kept").result().path
    rest = service.create_rest_client()
    run = saved.removeprefix("tinker://").split("/")[0]
    names = {each.checkpoint_id for each in rest.list_checkpoints(run).result().checkpoints}
    assert {"weights/twenty", "sampler_weights/kept"} <= names, names
    assert rest.get_training_run(run).result().base_model == MODEL
    assert run in {each.training_run_id for each in rest.list_training_runs().result().training_runs}
    named = service.create_sampling_client(model_path=kept)
    if hasattr(named, "result"):
        named = named.result()
    assert list(named.sample(types.ModelInput.from_ints(PROMPT), 1, greedy).result().sequences[0].tokens) == ANSWER
    files = downloaded(training, rest, saved)
    assert {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"} <= set(files), files.keys()
    learned = read_safetensors(files["adapter_model.safetensors"])
    assert any(name.endswith("lora_B.weight") and value.any() for name, value in learned.items())
    rest.delete_checkpoint(run, "weights/twenty").result()
    names = {each.checkpoint_id for each in rest.list_checkpoints(run).result().checkpoints}
    assert "weights/twenty" not in names

    wrong = types.Datum(
        model_input=types.ModelInput.from_ints(WHOLE[:-1]),
        loss_fn_inputs={"target_tokens": np.array([1], np.int64), "weights": np.array([1.0], np.float32)},
    )
    other = service.create_lora_training_client(base_model=MODEL, rank=4)
    if hasattr(other, "result"):
        other = other.result()
    adam, right = types.AdamParams(learning_rate=1e-4), datum(weights=[1.0] * len(ANSWER))
    # Of 1,500 data, which are sent in two parts, one is wrong: neither it nor the part that was taken is learned from.
    for data in ([wrong], [right] * 1500 + [wrong]):
        passed, stepped = other.forward_backward(data, "cross_entropy"), other.optim_step(adam)
        for words, future in (("target_tokens of shape", passed), ("a pass since the last one has failed", stepped)):
            try:
                future.result(timeout=WAIT_S)
            except tinker.TinkerError as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"not refused: {words}")
    passed, stepped = other.forward_backward([right], "cross_entropy"), other.optim_step(adam)
    assert np.isfinite(passed.result(timeout=WAIT_S).metrics["loss:sum"])
    assert stepped.result(timeout=WAIT_S).metrics["step:max"] == 1
    print(f"tinker {tinker.__version__}: loss {losses[0]:.2f} -> {losses[-1]:.2f} in 20 steps{custom}")


main()
os._exit(0)  # the SDK's threads would wait for telemetry
