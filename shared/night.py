"""A night's report: what a run learned from its users' sessions, what got better and worse, what it proposes.

The run's folder has it as JSON and as Markdown, and the policy's board the newest one, for the dashboard. It quotes
prompts and replies of sessions, so it is deleted with what else a run says of itself.
"""

from typing import Literal

import msgspec

from shared.adapters import GateCheck, version_id

NightOutcome = Literal["proposed", "rejected", "unfinished", "failed"]
OUTCOMES: dict[NightOutcome, str] = {
    "proposed": "A candidate passed the gate and waits for you.",
    "rejected": "No candidate passed the gate; nothing changes.",
    "unfinished": "The night was too short; the run goes on with the next one.",
    "failed": "The run failed; nothing changes.",
}


class Compared(msgspec.Struct, frozen=True):
    """One prompt's replies before and after; rewards where it is a task of the suite."""

    prompt: str
    before: str
    after: str
    reward_before: float | None = None
    reward_after: float | None = None

    @property
    def source(self) -> str:
        """Where the prompt comes from, for people."""
        return "a held-out session" if self.reward_before is None else "your suite"


class NightReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run of night school."""

    policy: str
    run: str
    began_ms: int  # Unix milliseconds, as the next one
    ended_ms: int
    outcome: NightOutcome
    why: str = ""  # it is no candidate
    began_with: int = 0  # version; 0: the base
    version: int = 0  # the candidate; 0: there is none
    replaces: int = 0  # the latest version at the night's end, to which its promotion is rolled back; 0: not known
    train_step: int = 0
    steps: int = 0  # that the run is to make
    sessions: int = 0  # that it learned from, with the next figures
    turns: int = 0
    corrected: int = 0
    edited: int = 0
    content: int = 0
    rows: int = 0
    rehearsed: int = 0
    signals: dict[str, int] = {}  # by kind
    held_out_before: float | None = None  # share of held-out sessions' tokens on which policy and teacher agree
    held_out_after: float | None = None
    suite_before: float | None = None  # mean reward of the suite
    suite_after: float | None = None
    suite_tasks: int = 0
    suite_better: int = 0  # tasks that earn more than before
    suite_worse: int = 0
    base_kl: float | None = None  # nats per token
    checks: tuple[GateCheck, ...] = ()
    interruptions: dict[str, int] = {}  # by reason
    samples: tuple[Compared, ...] = ()

    @property
    def changes(self) -> list[tuple[str, float | None, float | None]]:
        """Figures before and after, of those that were measured."""
        figures = [
            ("held-out sessions", self.held_out_before, self.held_out_after),
            ("your suite", self.suite_before, self.suite_after),
        ]
        return [figure for figure in figures if figure[1] is not None or figure[2] is not None]

    @property
    def interrupted(self) -> int:
        """How often the run was interrupted."""
        return sum(self.interruptions.values())


def in_markdown(report: NightReport) -> str:
    """The report as a person reads it in a terminal or an editor."""
    lines = [
        f"# {report.policy}: {report.run}",
        "",
        f"{OUTCOMES[report.outcome]}{f' {report.why}' if report.why else ''}",
        "",
        f"- Learned from {report.sessions} sessions, {report.turns} turns: {report.corrected} corrected, "
        f"{report.edited} edited, {report.content} content; {report.rows} rows, {report.rehearsed} of them rehearsed.",
        f"- Signals: {', '.join(f'{count} {kind}' for kind, count in report.signals.items()) or 'none'}.",
        f"- Train steps: {report.train_step} of {report.steps}; interrupted {report.interrupted} times"
        f"{''.join(f'; {count} x because {why}' for why, count in report.interruptions.items())}.",
        f"- KL from the base: {_number(report.base_kl)} nats per token.",
        f"- Suite: {report.suite_better} of {report.suite_tasks} tasks better, {report.suite_worse} worse.",
        "",
        "| | before | after |",
        "|---|---|---|",
        *(f"| {name} | {_number(before)} | {_number(after)} |" for name, before, after in report.changes),
    ]
    if report.version:
        lines += ["", f"    mlx_parallm adapters promote {report.policy} {report.version}"]
        if report.replaces:
            lines += [f"    mlx_parallm adapters rollback {report.policy} {report.replaces}"]
        lines += ["", f"Try it first: ask for the model `{version_id(report.policy, report.version)}`."]
    lines += ["", *(f"- {'passed' if each.passed else 'FAILED'} {each.name}: {each.detail}" for each in report.checks)]
    for number, each in enumerate(report.samples, 1):
        lines += ["", f"## Sample {number}, of {each.source}", "", *_quoted("prompt", each.prompt)]
        lines += _quoted(f"before{_earned(each.reward_before)}", each.before)
        lines += _quoted(f"after{_earned(each.reward_after)}", each.after)
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _earned(reward: float | None) -> str:
    return "" if reward is None else f", reward {reward:.3g}"


def _quoted(title: str, text: str) -> list[str]:
    return [f"{title}:", "", *(f"    {line}" for line in text.splitlines() or ["(nothing)"]), ""]
