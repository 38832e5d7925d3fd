"""A model as its host has to know it before it is loaded; its spare (`spare.py`) finds this: the host has no MLX."""

import contextlib
import os
import threading
from collections.abc import Iterator

import msgspec

from shared.errors import ParallmError
from shared.fit.model_fit import Device
from shared.process import start_reports
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from shared.sequences import ModelCard
from shared.text.codec import TokenizerBundle
from worker.downloads import hub_download, whole_size

FURTHER_ROWS = 3  # of the shortest useful length, that a worker is to have KV for in addition to one
DOWNLOAD_LOOK_S = 1.0
PROCESS_BYTES = 400 << 20  # Python, MLX and their libraries


class Described(msgspec.Struct, frozen=True):
    """A model as a host knows it."""

    card: ModelCard
    tokenizer: TokenizerBundle
    family: str  # `model_type`
    weight_bytes: int
    need_bytes: int  # all that its worker needs
    device: Device


class Answer(msgspec.Struct, frozen=True):
    """One model's description, or why there is none; without either, how far its download is."""

    described: Described | None = None
    why: str = ""
    progress: float = 0.0


def describe(settings: dict[str, str]) -> Answer:
    """Describe the model of a worker's settings, given as variables; one of the hub is fetched first."""
    from mlx_model.loader import describe_model
    from worker.engine.messages import engine_config

    os.environ.update(settings)
    try:
        asked = load(WorkerSettings, [])
        with _reporting_download(asked.model):
            found = describe_model(engine_config(asked))
    except ParallmError as error:
        return Answer(why=str(error))
    except Exception as error:  # of a library, over one model's files: the others can be described
        return Answer(why=f"{type(error).__name__}: {error}")
    finally:
        for name in settings:
            os.environ.pop(name, None)
    need = found.demand.firm + PROCESS_BYTES
    if not found.demand.kv_bytes:
        need += FURTHER_ROWS * found.demand.least_kv
    return Answer(Described(found.card, found.tokenizer, found.family, found.weight_bytes, need, found.device))


@contextlib.contextmanager
def _reporting_download(model: str) -> Iterator[None]:
    """Report to the host how far a download is."""
    download, ended = hub_download(model), threading.Event()

    def look() -> None:
        assert download is not None
        whole = whole_size(download.name)
        while whole and not ended.wait(DOWNLOAD_LOOK_S):
            here = download.progress()
            if here is not None:
                start_reports.write(msgspec.json.encode(Answer(progress=min(1.0, here / whole))))

    looking = threading.Thread(target=look, daemon=True)
    if download is not None:
        looking.start()
    try:
        yield
    finally:
        ended.set()
        if download is not None:
            looking.join()  # its line is not to be mixed with the answer
