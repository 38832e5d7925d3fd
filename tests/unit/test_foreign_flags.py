"""Command lines from other servers: names for what we have are taken, the others refused with the reason."""

import pytest

from mlx_model.config import DiskConfig, SpeculationConfig
from shared.errors import SetupError
from shared.process.foreign_flags import REFUSED, WITHOUT_EFFECT, native
from shared.process.serve_settings import ServeSettings
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from worker.engine.messages import engine_config

TAKEN = """
--model-path x --lora-rank 16 --enable-rl-training --atropos-url http://localhost:8001 --host 0.0.0.0 --port 8000
--max-batch 5 --flush-interval-ms 10 --max-tokens 128 --trust-remote-code --log-level INFO --api-key k --api-key-file f
--max-request-bytes 1048576 --block-size 16 --prefill-batch-size 4 --max-queue-size 128 --max-prompt-tokens 32768
--request-timeout-s 120 --first-token-timeout-s 300 --max-concurrent-requests 64 --memory-pressure-threshold 0.9
--kv-bits 8 --kv-group-size 64 --no-ssd --spec-decode none --distributed-mode=off --mode inference --share-model
--max-kv-size 4096
"""
DRAFTS = """
--spec-decode auto --num-speculative-tokens 7 --spec-decode-disable-batch-size 16 --ngram-max 5 --ngram-min 2
--no-ngram-prompt-lookup --no-spec-decode-dynamic --spec-decode-acceptance-threshold 0.5 --no-adaptive-k
"""
SSD = """
--ssd-cache-dir kv --ssd-ttl-days 7 --ssd-policy write_through --ssd-durability persistent --no-ssd-async-writes
--ssd-writer-queue-size 512 --ssd-persistent-max-retries 3 --ssd-flush-interval-s 1.0 --ssd-max-size-gb 2
"""


def test_a_command_line_of_another_server_means_here_what_it_means_there(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load(ServeSettings, TAKEN.split())
    assert (settings.model, settings.max_batch_size, settings.default_max_tokens) == ("x", 5, 128)
    assert (settings.kv_bits, settings.kv_group_size, settings.max_kv_size) == (8, 64, 4096)
    assert (settings.lora_rank, settings.max_queue_size, settings.log_level) == (16, 128, "INFO")
    said = capsys.readouterr().err
    assert "--flush-interval-ms has no effect" in said and "--share-model has no effect" in said


def test_the_flags_of_an_ssd_cache_reach_the_engine() -> None:
    disk = engine_config(load(ServeSettings, SSD.split()).of(WorkerSettings)).disk
    expected = DiskConfig(
        "kv", True, True, False, queue_size=512, max_retries=3, flush_interval_s=1, max_bytes=2 * 10**9
    )
    assert disk == expected
    assert engine_config(load(WorkerSettings, [*SSD.split(), "--no-ssd"])).disk is None
    assert engine_config(load(WorkerSettings, [])).disk is None, "no folder is filled that nobody has named"


def test_the_flags_of_speculative_decoding_reach_the_engine() -> None:
    drafts = engine_config(load(ServeSettings, DRAFTS.split()).of(WorkerSettings)).speculation
    expected = SpeculationConfig(7, 16, 5, 2, False, False, False, memory_bytes=64 << 20, threshold=0.5)
    assert drafts == expected
    ngram = engine_config(load(WorkerSettings, ["--spec-decode", "ngram"])).speculation
    assert ngram == SpeculationConfig(most_rows=8), "nothing is kept for others"
    line = "--spec-decode draft --draft-model-path small --draft-context-len 128"
    draft = engine_config(load(ServeSettings, line.split()).of(WorkerSettings)).speculation
    assert draft == SpeculationConfig(most_rows=8, own_text=False, draft_model="small", draft_context=128)
    auto = engine_config(load(WorkerSettings, ["--spec-decode", "auto", "--draft-model-path", "small"])).speculation
    assert auto is not None and auto.own_text and auto.memory_bytes and auto.draft_model == "small"
    assert engine_config(load(WorkerSettings, [])).speculation is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--spec-decode draft", "needs a draft model: --draft-model-path"),
        ("--draft-model-path x", "is used with --spec-decode draft or auto"),
        ("--spec-decode ngram --draft-model-path x", "is used with --spec-decode draft or auto"),
        ("--spec-decode auto --draft-context-len 128", "needs a draft model: --draft-model-path"),
        ("--spec-decode medusa", "'none', 'ngram', 'draft' or 'auto'"),
        ("--ngram-min 5", "must not be more than --ngram-max"),
    ],
)
def test_speculation_that_there_is_not_is_refused(line: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        load(ServeSettings, line.split())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--ssd-policy write_through", "--ssd-policy needs a folder: --ssd-cache-dir"),
        ("--ssd-max-size-gb 10", "--ssd-max-size-gb needs a folder"),
        ("--ssd-cache-dir kv --prefix-cache-gb 0", "--prefix-cache-gb must not be 0"),
        ("--ssd-cache-dir kv --ssd-policy always", "evict_only"),
    ],
)
def test_ssd_flags_that_would_do_nothing_are_refused(line: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        load(ServeSettings, line.split())


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_do_not_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(SetupError, match=f"^--{name}: .{{20}}"):
        load(ServeSettings, [f"--{name}", "7"])


def test_no_flag_of_ours_is_called_foreign() -> None:
    assert not ServeSettings.flags() & (REFUSED.keys() | WITHOUT_EFFECT.keys())
    assert native(["--connect-to", "node1:8000"], {"connect-to"}) == ["--connect-to", "node1:8000"]


def test_max_tokens_and_its_name_here_are_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLM_DEFAULT_MAX_TOKENS", "9")
    assert load(ServeSettings, []).default_max_tokens == 9
    monkeypatch.setenv("PARALLM_MAX_TOKENS", "5")  # the trainer's
    assert load(ServeSettings, []).default_max_tokens == 9
