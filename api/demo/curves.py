"""The picture of a run: reward, versions, lag and time to first token over the same seconds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

from api.demo.chats import StreamedChat
from api.demo.report import plotting

_WINDOW = 15  # chats in a running median
_FOLLOWING, _PINNED, _PUBLISHED = "#c2571a", "#3b6ea5", "#777777"


def draw(
    path: Path,
    steps: Sequence[dict[str, Any]],
    held_out: Sequence[tuple[float, float]],
    chats: Sequence[StreamedChat],
    goal: float,
    measured: str,
) -> None:
    """Write the picture; `steps` are lines of metrics.jsonl with the second at which each appeared."""
    pyplot = plotting()
    figure, (reward, versions, lag, first) = pyplot.subplots(
        4, 1, figsize=(9, 10), sharex=True, height_ratios=(3, 2, 1, 2)
    )
    at = [step["at_s"] for step in steps]
    reward.plot(at, [step["reward"] for step in steps], color=_PUBLISHED, lw=1, label="rollouts, sampled")
    reward.plot(*zip(*held_out, strict=True), "o-", color=_FOLLOWING, label=f"{measured}, greedy")
    reward.axhline(goal, color="black", lw=0.7, ls=":")
    reward.set_ylabel("reward")
    reward.set_ylim(0, 1.04)
    reward.legend(loc="lower right")
    reward.set_title("learning while serving: reward, versions, lag and time to first token")
    versions.step(at, [step["version"] for step in steps], where="post", color=_PUBLISHED, label="published")
    _draw_versions(versions, chats)
    _draw_lag(lag, steps)
    _draw_first_tokens(first, chats)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_versions(axes: Any, chats: Sequence[StreamedChat]) -> None:
    """Which version answered at what time."""
    for model, color in _models(chats):
        seen = [(chat.at_s, _number(chat.versions[-1])) for chat in chats if chat.model == model and chat.versions]
        if seen:
            axes.plot(*zip(*seen, strict=True), ".", ms=3, color=color, label=f"chats on {model}")
    axes.set_ylabel("version")
    axes.legend(loc="upper left")


def _draw_lag(axes: Any, steps: Sequence[dict[str, Any]]) -> None:
    at = [step["at_s"] for step in steps]
    axes.plot(at, [step["lag_max"] for step in steps], color=_FOLLOWING, lw=1, label="oldest token")
    axes.plot(at, [step["lag_mean"] for step in steps], color=_PUBLISHED, lw=1, label="mean")
    axes.set_ylabel("lag, policy steps")
    axes.set_ylim(-0.1, 1 + max([1, *(step["lag_max"] for step in steps)]))
    axes.legend(loc="upper left", ncols=2)


def _draw_first_tokens(axes: Any, chats: Sequence[StreamedChat]) -> None:
    for model, color in _models(chats):
        whole = [(chat.at_s, chat.first_ms) for chat in chats if chat.model == model and not chat.error]
        if whole:
            axes.plot(*zip(*whole, strict=True), ".", ms=2, alpha=0.35, color=color)
            axes.plot([at for at, _ in whole], _running_median([ms for _, ms in whole]), color=color, label=model)
    axes.set_yscale("log")
    axes.set_ylabel("time to first token, ms")
    axes.set_xlabel("seconds since the trainer's start")
    axes.legend(loc="upper left")


def _models(chats: Sequence[StreamedChat]) -> list[tuple[str, str]]:
    return [(model, _PINNED if "@" in model else _FOLLOWING) for model in sorted({chat.model for chat in chats})]


def _number(version: str) -> int:
    _, _, number = version.rpartition("@")
    return int(number) if number.isdigit() else 0


def _running_median(values: Sequence[float]) -> list[float]:
    half = _WINDOW // 2
    return [median_high(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
