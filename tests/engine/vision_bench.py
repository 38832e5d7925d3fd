"""A bench whose sequences bring images."""

from dataclasses import replace
from typing import Any

import msgspec

from mlx_model.loader import LoadedModel
from shared.images.refs import Picture
from tests.engine.adapter_bench import AdapterBench
from tests.engine.adapter_models import MadeAdapter
from tests.engine.conftest import Bench
from tests.engine.vision_models import alone, image_spec
from worker.engine.messages import RowRequest
from worker.engine.orders import Submit


class Gaze(Bench):
    """Asks with pictures, and checks what mlx-vlm alone says."""

    def __init__(self, loaded: LoadedModel, **config: object) -> None:
        super().__init__(loaded, **({"block_size": 16} | config))
        self.shown: dict[str, tuple[Any, list[Any]]] = {}

    def ask(
        self, seq: str, text: str, pictures: list[Any] = (), *, group: str = "", adapter: str = "", **sampling: Any
    ) -> None:  # type: ignore[assignment]
        assert self.loaded.card.vision is not None
        detail, breaks, cache = (
            sampling.pop("detail", "high"),
            sampling.pop("breaks", False),
            sampling.pop("cache", True),
        )
        spec, sent = image_spec(seq, self.loaded.card.vision, text, list(pictures), detail, **sampling)
        spec = msgspec.structs.replace(spec, group=group, adapter=adapter, cache=cache)
        self.shown[seq] = spec, list(pictures)
        if breaks:
            sent = tuple(replace(each, tiles=[tile[:-7] for tile in each.tiles]) for each in sent)
        self.send(spec, sent)

    def send(self, spec: Any, sent: tuple[Picture, ...]) -> None:
        order = Submit([RowRequest(spec, pictures=sent)])
        ranks = self.loaded.ranks
        self.engine.submit((order if ranks is None or ranks.rank == 0 else order.for_followers()).requests)

    def check(self, reference: Any, *names: str) -> None:
        for seq in names or self.shown:
            spec, pictures = self.shown[seq]
            assert self.tokens(seq) == alone(reference, spec.prompt_ids, pictures, spec.sampling.max_tokens), seq


class AdaptedGaze(AdapterBench, Gaze):
    """With adapters, too."""

    def __init__(self, loaded: LoadedModel, made: dict[str, MadeAdapter], **config: Any) -> None:
        super().__init__(loaded, made, **({"block_size": 16} | config))
        self.shown = {}
