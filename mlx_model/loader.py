"""Loads a model and describes it: card, tokenizer, KV size. Also used by the trainer.

`base_sha256` names config and weights by content, so that an adapter made for another base is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream

from mlx_model import cuda_graphs, hub, memory
from mlx_model.batching import check_batch
from mlx_model.borrowed import is_borrowed, load_borrowed
from mlx_model.collectives.ranks import Ranks, one_after_another, ranks_of
from mlx_model.config import DraftKv, EngineConfig, check_settings
from mlx_model.device import on_cpu, on_cuda
from mlx_model.draft import DraftModel, check_tokenizer
from mlx_model.fast_blas import cache_folder
from mlx_model.heads.classifier import Classifier, is_classifier
from mlx_model.heads.head import Heads
from mlx_model.kv.cuda import attention as cuda_attention
from mlx_model.kv.kinds import kind_of, leaves, states, window_of
from mlx_model.kv.layout import KvLayout, check_asked, layout_asked, layout_of
from mlx_model.mended import mend
from mlx_model.pipeline import cut
from mlx_model.pooling import hidden_size
from mlx_model.sharding import read_weights, shard
from mlx_model.sites import Whole, module_shapes
from mlx_model.step.decode_step import join_products
from mlx_model.tuned import ModelTuning, tuning_of
from mlx_model.vision.families import AnyTower, chat_template, check_known, is_vision, load_seeing
from shared.errors import SetupError
from shared.fit.model_fit import Asked, Device, demand_of, facts_of, fit_model
from shared.fit.needs import total
from shared.fit.plan import LEAST_TOKENS as ROW_TOKENS
from shared.fit.plan import Demand, MemoryPlan, gb
from shared.gguf.cached import cached_folder, is_gguf
from shared.gguf.conversion import Conversion
from shared.machine.system import this_system, trouble_with_mlx
from shared.process.group_settings import Sharding
from shared.process.model_aliases import is_hub_name, short_name
from shared.process.start_reports import report
from shared.sequences import ModelCard
from shared.text.codec import TokenizerBundle
from shared.text.languages.families import HERMES, TOOL_FORMATS, recognised

log = logging.getLogger(__name__)

_LEAST_TOKENS = 64  # of KV, without which a worker answers nobody
_FEW_ROWS = 4
_LARGE_FILE = 64 << 20  # bytes of a file that is not read again for its hash
_PIECE_BYTES = 64 << 20  # of weights that are evaluated at once
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_DEFAULT_CONTEXT = 4096
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Folders of these, written by transformers before 5.0, split text as Llama 3 does; the models have learned otherwise.
# It mends them when it is asked to. Unasked it warns, and some of its versions warn of other models, too.
_MISTRAL = frozenset({"ministral", "mistral", "mistral3", "pixtral", "voxtral"})


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory and what others need to know of it."""

    card: ModelCard
    tokenizer: TokenizerBundle
    model: Any  # the mlx-lm module; belongs to the thread that loaded it
    config: dict[str, Any]  # the model's config.json
    path: Path
    kv_limit_bytes: int
    prefix_bytes: int = 0  # that the prefix cache may take, at most
    kv: KvLayout = field(default_factory=KvLayout)
    draft: DraftModel | None = None
    heads: Heads = field(default_factory=dict)  # of its own
    tower: AnyTower | None = None  # that sees; of several ranks, the leading one has it
    whole: Whole | None = None  # where ranks divide the model: what it was before
    tuning: ModelTuning | None = None  # what was measured of it on this machine

    @property
    def ranks(self) -> Ranks | None:
        """That divide the model among them; None: it is all here."""
        return None if self.whole is None else self.whole.ranks

    @property
    def shares(self) -> tuple[int, ...]:
        """By cache: layers whose KV it stands for, so that all ranks count alike; () counts what is there."""
        return () if self.whole is None else self.whole.shares

    @property
    def draft_kv(self) -> DraftKv:
        """KV that the draft model stores of a row; zero without one."""
        return DraftKv() if self.draft is None else self.draft.kept


def load_model(config: EngineConfig, group: Any | None = None) -> LoadedModel:
    """Load by folder or hub name; `SetupError` says what is wrong. `group`: of MLX, whose ranks all load it."""
    if trouble := trouble_with_mlx(this_system()):
        raise SetupError(trouble)
    cuda_graphs.prepare()
    cuda_attention.install()
    ranks = ranks_of(group)
    if ranks is None:
        return _load(config, None)
    check_settings(config)
    ranks = one_after_another(ranks) if config.sharding == "pipeline" else ranks
    with mx.stream(generation_stream):  # where their sums are in the batch, too
        return _load(config, ranks)


def _load(config: EngineConfig, ranks: Ranks | None) -> LoadedModel:
    path = model_folder(config.model)
    planned = _memory_plan(config, path, 1 if ranks is None or config.sharding == "data" else ranks.size)
    if config.memory.wired_bytes:  # off by default: macOS has panicked under it (ml-explore/mlx#3186)
        memory.check_wired(config.memory.wired_bytes)
        mx.set_wired_limit(config.memory.wired_bytes)
    state, sha256 = _state_of(path), base_sha256(path)
    tuning = tuning_of(sha256) if ranks is None else None  # ranks would differ
    joins = ranks is None and (on_cuda() or (tuning is not None and bool(tuning.joins)))
    read = _read(path, config, ranks, joins=joins)
    if _state_of(path) != state:  # the weights may be others than those of the hash, by which KV is stored
        raise SetupError(f"the files of {path} have changed while they were read; load it again")
    model, bundle, model_config, heads, tower, whole = read
    times = None if tuning is None else tuning.kv.get(config.kv_bits)
    bound = _bound(config, _context_length(model_config, config.max_context))
    kv = layout_of(model, config.kv_bits, config.kv_group_size, bound, times, invariant=config.batch_invariant)
    card = _card(config, sha256, read, kv, ranks)
    draft = _draft_model(config, bundle)
    limit, prefix = planned.kv_bytes, planned.prefix_bytes
    if ranks is not None:  # all admit the same rows, and keep the same prefixes
        limit, prefix = ranks.least(limit), ranks.least(prefix)
    if config.memory.serves:
        _check_kv(limit, card, planned)
    else:  # a trainer's batches have ever other shapes, and what it keeps of them others on this GPU lack
        memory.bound_freed_memory(config.memory.limit_bytes or memory.memory_status().available)
    eyes = tower if _sees(ranks) else None
    return LoadedModel(card, bundle, model, model_config, path, limit, prefix, kv, draft, heads, eyes, whole, tuning)


def _card(
    config: EngineConfig,
    sha256: str,
    read: _ReadModel,
    kv: KvLayout,
    ranks: Ranks | None = None,
    *,
    computes: bool = True,
) -> ModelCard:
    """The card of a model that was read; `computes` as in `_measure`."""
    model, bundle, model_config, heads, tower, whole = read
    (kv_bytes, unshared, state), kv_window, vocab, dtype = _measure(model, replace(kv, apart=None), computes=computes)
    if ranks is not None:
        kv_bytes, unshared, state = (ranks.largest(each) for each in (kv_bytes, unshared, state))
    states = hidden_size(model)
    return ModelCard(
        name=config.served_name or short_name(config.model),
        context_length=_context_length(model_config, config.max_context),
        vocab_size=vocab,
        eos_token_ids=bundle.eos_token_ids,
        tokenizer_sha256=bundle.sha256,
        base_sha256=sha256,
        kv_bytes_per_token=kv_bytes,
        kv_window=kv_window,
        kv_unshared_bytes=unshared,
        kv_state_bytes=state,
        dtype=dtype,
        quantization=_quantization(model_config),
        kv=kv.name,
        created=int(time.time()),
        modules=whole.shapes if whole is not None and whole.by_layers else module_shapes(model, whole),
        sources=(config.model,),
        hidden_size=states,
        heads={name: head.spec for name, head in heads.items()},
        shows_states=states > 0,
        vision=None if tower is None else tower.vision,
    )


@dataclass(frozen=True)
class ModelDescription:
    """Properties of a model in files here, found without its weights in memory."""

    card: ModelCard  # as a worker's that loads it with the same settings
    tokenizer: TokenizerBundle
    family: str  # `model_type`
    weight_bytes: int  # in memory
    demand: Demand  # of memory
    device: Device


def describe_model(config: EngineConfig) -> ModelDescription:
    """Describe a model of which only the shapes are looked at; SetupError where it cannot be loaded.

    MLX reads a weight when something is computed with it, and nothing is.
    """
    path = model_folder(config.model)
    described, asked, draft_config = _asked_memory(config, path, 1)
    device = memory.plan_device(config.dtype)
    facts, draft = facts_of(path, described, asked, device, draft_config)
    read = _read(path, config, computes=False)
    bound = _bound(config, _context_length(read[2], config.max_context))
    kv = layout_asked(read[0], config.kv_bits, config.kv_group_size, bound)
    kv = replace(kv, apart="keys" if config.batch_invariant else None)
    return ModelDescription(
        _card(config, base_sha256(path), read, kv, computes=False),
        read[1],
        str(described.get("model_type", "")),
        total(facts.weights()),
        demand_of(facts, asked, draft),
        device,
    )


def check_model(config: EngineConfig, ranks: int = 1) -> str:
    """SetupError for what `load_model` refuses before it reads weights; else how it fits, as a comment in YAML.

    A hub name is not looked at, nor fetched; of it, and of a GGUF file, it is not known how it fits.
    """
    fits = ""
    if config.memory.wired_bytes:
        memory.check_wired(config.memory.wired_bytes)
    draft = "" if config.speculation is None else config.speculation.draft_model
    for name in filter(None, (config.model, draft)):
        if not Path(name).expanduser().exists() and is_hub_name(name):
            continue
        described = Conversion(Path(name)).config if is_gguf(name) else _described(model_folder(name))
        if name == config.model:
            context = _context_length(described, config.max_context)
            check_asked(config.kv_bits, config.kv_group_size, _bound(config, context))
            if is_gguf(name):  # its folder, by which room is planned, is made when it is loaded
                continue
            rehearsed = replace(config, memory=replace(config.memory, reserves=False))
            planned = _memory_plan(rehearsed, model_folder(name), ranks, fetches=False)
            fits = f"# {name} fits: {planned}\n"
    return fits


def _memory_plan(config: EngineConfig, path: Path, ranks: int, *, fetches: bool = True) -> MemoryPlan:
    """Room for the model on this machine; SetupError with the numbers, before any weight is read, if there is none.

    Unless it `fetches`, a draft model of the hub is not counted.
    """
    described, asked, draft_config = _asked_memory(config, path, ranks, fetches=fetches)
    device = memory.plan_device(config.dtype)
    return fit_model(path, described, asked, device, draft_config, keeps=config.memory.reserves)


def _asked_memory(
    config: EngineConfig, path: Path, ranks: int, *, fetches: bool = True
) -> tuple[dict[str, Any], Asked, dict[str, Any] | None]:
    """The model's config.json, the memory that the settings ask for, and the draft model's config.json."""
    described = _described(path)
    draft = None if config.speculation is None else config.speculation.draft_model or None
    is_here = draft is not None and (fetches or Path(draft).expanduser().exists() or not is_hub_name(draft))
    try:
        draft_path = model_folder(draft) if draft is not None and is_here else None
        draft_config = None if draft_path is None else _described(draft_path)
    except SetupError as error:
        raise SetupError(f"--draft-model-path {draft}: {error}") from error
    own = config.memory
    asked = Asked(
        purpose=f"{'worker' if own.serves else 'trainer'} of {config.model}",
        context=_context_length(described, config.max_context),
        kv_bytes=config.kv_limit_bytes or 0,
        kv_bits=config.kv_bits,
        kv_group=config.kv_group_size,
        prefix_bytes=config.prefix_cache_bytes,
        adapter_slots=own.adapter_slots,
        learner_rank=own.learner_rank,
        limit_bytes=own.limit_bytes,
        ranks=ranks,
        sees=config.sees,
        serves=own.serves,
        draft=draft_path,
    )
    return described, asked, draft_config


def _check_kv(limit: int, card: ModelCard, planned: MemoryPlan) -> None:
    """SetupError where a worker would be ready and refuse every request."""
    kv_bytes = card.kv_bytes_per_token
    tokens = min(_LEAST_TOKENS, card.context_length)
    if limit < tokens * kv_bytes:
        raise SetupError(
            f"the model is loaded and leaves {gb(limit)} for KV, of which a token takes {kv_bytes} bytes: not even "
            f"{tokens} tokens fit. There was room for {planned.room}; give --kv-memory-gb or --memory-limit, "
            "--kv-bits, or take a smaller model"
        )
    if (rows := planned.rows(kv_bytes, min(ROW_TOKENS, card.context_length))) < _FEW_ROWS:
        log.warning("engine.few_rows_fit rows=%d tokens_each=%d kv=%s", rows, ROW_TOKENS, gb(limit))


def _described(path: Path) -> dict[str, Any]:
    """The config.json of a model that can be loaded; SetupError for another one."""
    try:
        described: dict[str, Any] = mlx_lm.utils.load_config(path)
        if not (
            is_classifier(described) or is_vision(described) or described.get("model_file") or is_borrowed(described)
        ):
            _check_class(described)
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(f"cannot load the model at {path}: {type(error).__name__}: {error}") from error
    return described


def _check_class(described: dict[str, Any]) -> None:
    """ValueError for a model that mlx-lm does not have; SetupError if that is because it sees."""
    try:
        mlx_lm.utils._get_classes(described)
    except ValueError:
        check_known(described)
        raise


def _bound(config: EngineConfig, context: int) -> int:
    """Positions that a row's KV keeps; 0: all, as where a longer row is refused in any case."""
    return config.max_kv_size if config.max_kv_size < context else 0


def _sees(ranks: Ranks | None) -> bool:
    """True if this rank encodes images; the others receive its vectors."""
    return ranks is None or ranks.rank == 0


_ReadModel = tuple[Any, TokenizerBundle, dict[str, Any], Heads, AnyTower | None, Whole | None]


def _read(
    path: Path, config: EngineConfig, ranks: Ranks | None = None, *, joins: bool = False, computes: bool = True
) -> _ReadModel:
    """The module with its weights in memory, its tokenizer, its config.json, its own heads, and what it sees with.

    Of several ranks: this one's part of the module, and what the whole was. Unless it `computes`, the weights stay in
    their files.
    """
    heads: Heads = {}
    whole: Whole | None = None
    tower: AnyTower | None = None
    try:
        described = mlx_lm.utils.load_config(path)
        if is_classifier(described):
            classifier = Classifier(described)
            model, model_config = classifier.load(path)
            heads = classifier.heads(hidden_size(model))
        elif is_vision(described) and config.sees:
            (model, tower), model_config = load_seeing(path, described), described
        elif is_borrowed(described):
            model, model_config = load_borrowed(path), described
        else:
            check_known(described)
            model, model_config = mlx_lm.utils.load_model(path, True, trust_remote_code=config.trust_remote_code)
            mend(model)
        if ranks is not None:
            whole = _divide(model, ranks, config.sharding)
        split = {"fix_mistral_regex": described.get("model_type") in _MISTRAL}
        tokenizer = mlx_lm.utils.load_tokenizer(path, split, model_config.get("eos_token_id"))
        if tower is not None and not tokenizer.chat_template:
            tokenizer.chat_template = chat_template(path)
        _set_dtype(model, config.dtype)
        if computes:
            _read_in_pieces(model) if ranks is None else read_weights(model)
        parts = tower.parts if computes and tower is not None and _sees(ranks) else ()
        for part in parts:
            _set_dtype(part, config.dtype)
            mx.eval(part.parameters())
    except SetupError as error:
        raise SetupError(f"cannot load the model at {path}: {error}") from error
    except Exception as error:
        raise SetupError(f"cannot load the model at {path}: {type(error).__name__}: {error}") from error
    if joins and computes:
        join_products(model)
    bundle = with_formats(export_tokenizer(tokenizer), tokenizer.get_vocab(), path, config)
    return model, bundle, model_config, heads, tower, whole


def _read_in_pieces(model: Any) -> None:
    """Evaluate the weights some at a time, and report how far that is.

    Other processes' kernels run in between, and what a cast leaves behind is freed before the next piece is read.
    """
    arrays = [array for _, array in tree_flatten(model.parameters())]
    whole, done, piece, held = sum(array.nbytes for array in arrays), 0, [], 0
    for array in arrays:
        piece.append(array)
        held += array.nbytes
        if held >= _PIECE_BYTES:
            mx.eval(piece)
            done, piece, held = done + held, [], 0
            report(progress=done / whole)
    mx.eval(piece)


def _divide(model: Any, ranks: Ranks, sharding: Sharding) -> Whole:
    """Keep this rank's part of it; what it was."""
    shapes = module_shapes(model)
    if sharding == "data":
        return Whole(ranks, shapes, by_data=True)
    if sharding == "pipeline":
        return Whole(ranks, shapes, by_layers=True, shares=cut(model, ranks).shares)
    shard(model, ranks)
    return Whole(ranks, shapes)


def _draft_model(config: EngineConfig, bundle: TokenizerBundle) -> DraftModel | None:
    """The model that drafts, if one is named; `bundle` is the tokenizer of the model that it drafts for."""
    if config.speculation is None or not config.speculation.draft_model:
        return None
    name = config.speculation.draft_model
    try:
        model, its_bundle, its_config, *_ = _read(model_folder(name), config, joins=on_cuda())
        check_tokenizer(bundle, its_bundle)
        check_batch(model, config.max_rows)
        kv = KvLayout()
        (kv_bytes, *_), _, vocab, _ = _measure(model, kv)
        short = name.rstrip("/").rsplit("/", 1)[-1]
        draft = DraftModel(short, model, vocab, _context_length(its_config, None), kv_bytes, kv)
        draft.check()
    except SetupError as error:
        raise SetupError(f"--draft-model-path {name}: {error}") from error
    return draft


def model_folder(name: str) -> Path:
    """The model's folder; a hub name is downloaded or found in the hub's cache, a GGUF file is converted into ours."""
    path = Path(name).expanduser()
    if is_gguf(name):
        return cached_folder(path)
    if path.exists():
        return path
    if not is_hub_name(name):
        raise SetupError(
            f"no model folder {name!r}; a GGUF file and a name on the hub (mlx-community/...) will do, too"
        )
    try:
        return hub.fetch(name)
    except Exception as error:
        raise SetupError(f"cannot get {name!r} from the hub: {type(error).__name__}: {error}") from error


def _set_dtype(model: Any, dtype: str | None) -> None:
    """Cast the floating weights; on a CPU to fp32 by default: 16-bit arithmetic is emulated there, 8-40x slower."""
    if dtype is None and on_cpu():
        dtype = "float32"
    if dtype is None:
        return
    if dtype not in _DTYPES:
        raise SetupError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    model.set_dtype(_DTYPES[dtype])


def _measure(model: Any, kv: KvLayout, *, computes: bool = True) -> tuple[tuple[int, int, int], int, int, str]:
    """KV bytes per position, how many a row holds, vocabulary size and activation dtype, by a forward of one token.

    The second number of bytes is that of leaves whose KV rows never share, the third that of a row's recurrent states.
    Unless it `computes`, the forward is not evaluated: its shapes are known without that.
    """
    caches = kv.new(model)
    logits_1LV = model(mx.zeros((1, 1), mx.int32), cache=caches)
    if computes:
        mx.eval(logits_1LV, [cache.state for cache in caches])
    each = [(_bytes_per_position(leaf), kind_of(leaf).is_cut) for leaf in leaves(caches)]
    per_token = max(1, sum(nbytes for nbytes, _ in each))
    unshared = sum(nbytes for nbytes, is_cut in each if not is_cut)
    dtype = str(logits_1LV.dtype).removeprefix("mlx.core.")
    state = sum(array.nbytes for arrays in states(caches) for array in arrays if array is not None)
    return (per_token, unshared, state), window_of(caches), logits_1LV.shape[-1], dtype


def _bytes_per_position(cache: Any) -> int:
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return 0  # state of fixed size
    return int((keys.nbytes + values.nbytes) // keys.shape[-2])


def _context_length(model_config: dict[str, Any], limit: int | None) -> int:
    text_config = model_config.get("text_config") or {}
    known = [section[key] for section in (model_config, text_config) for key in _CONTEXT_KEYS if section.get(key)]
    context = int(known[0]) if known else _DEFAULT_CONTEXT
    return min(context, limit) if limit else context


def head_size(model_config: dict[str, Any]) -> int:
    """Numbers of an attention head; 0: not known, or keys and values have heads of other sizes than queries."""
    text_config = {**model_config, **(model_config.get("text_config") or {})}
    if text_config.get("kv_lora_rank"):
        return 0
    heads = text_config.get("num_attention_heads") or 0
    return int(text_config.get("head_dim") or (text_config.get("hidden_size", 0) // heads if heads else 0))


def _quantization(model_config: dict[str, Any]) -> str:
    quantization = model_config.get("quantization") or {}
    if not quantization.get("bits"):
        return ""
    return f"{quantization['bits']} bits, groups of {quantization.get('group_size', 64)}"


def export_tokenizer(tokenizer: Any) -> TokenizerBundle:
    """All that api and job runner need to tokenize; `tokenizer` is mlx-lm's wrapper of a fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SetupError("the model's tokenizer has no tokenizer.json (a fast tokenizer); convert it first")
    template = tokenizer.chat_template or ""
    if not isinstance(template, str):  # several templates by name
        template = template.get("default", "")
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TokenizerBundle(
        tokenizer_json=backend.to_str(),
        chat_template=template,
        eos_token_ids=tuple(sorted(int(token) for token in tokenizer.eos_token_ids)),
        special_tokens=special,
    )


def with_formats(
    bundle: TokenizerBundle, vocabulary: Mapping[str, int], path: Path, config: EngineConfig
) -> TokenizerBundle:
    """The bundle with the formats of the model's calls and reasoning that its worker was given.

    Where none is given and neither template nor vocabulary show how calls are written, the name of mlx-lm's parser in
    tokenizer_config.json does.
    """
    calls, file = config.tool_format, path / "tokenizer_config.json"
    if not calls and file.is_file() and not recognised(bundle.chat_template, vocabulary.__contains__).family:
        named = str(json.loads(file.read_text()).get("tool_parser_type"))
        named = {"json_tools": HERMES, "laguna": "glm47"}.get(named, named)
        calls = named if named in TOOL_FORMATS else ""
    return msgspec.structs.replace(bundle, tool_format=calls, reasoning_format=config.reasoning_format)


def base_sha256(path: Path) -> str:
    """sha256 over the names and contents of config.json and the weight files."""
    digest = hashlib.sha256()
    for file in _base_files(path):
        digest.update(f"{file.name} {_file_sha256(file)}\n".encode())
    return digest.hexdigest()


def _base_files(path: Path) -> list[Path]:
    return [file for file in (path / "config.json", *sorted(path.glob("*.safetensors"))) if file.exists()]


def _state_of(path: Path) -> list[str]:
    """Stamps of the files that the hash is over; equal ones: nobody has written to them."""
    return [_stamp(file.resolve()) for file in _base_files(path)]


def _stamp(file: Path) -> str:
    stat = file.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _file_sha256(file: Path) -> str:
    """Content hash; the hub's cache stores large files under theirs."""
    stored = file.resolve().name
    if file.is_symlink() and _SHA256.fullmatch(stored):
        return stored
    if file.stat().st_size < _LARGE_FILE:
        return _digest(file)
    return _remembered(file)


def _remembered(file: Path) -> str:
    """Hash of a large file, which is read once: until it changes, its hash is in our cache folder."""
    real = file.resolve()
    state = _stamp(real)
    note = cache_folder() / "weights" / hashlib.sha256(os.fsencode(real)).hexdigest()[:32]
    with contextlib.suppress(OSError, ValueError):
        before, _, sha256 = note.read_text().strip().rpartition(" ")
        if before == state and _SHA256.fullmatch(sha256):
            return sha256
    sha256 = _digest(file)
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        new = note.with_name(f"{note.name}.{os.getpid()}")
        new.write_text(f"{state} {sha256}\n")
        new.replace(note)
    return sha256


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
