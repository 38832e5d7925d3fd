"""Tenants whose policies learn from their own sessions at night, over HTTP: none learns from another's, or sees it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.e2e.rings import Process, Ring, ring
from tests.training.simulated_user import SimulatedUser
from tests.training.wishes import Greeting
from tests.waiting import HANG_S

KEYS = {name: f"{name}-" + "0" * 32 for name in ("acme", "bolt", "root")}
RIGHTS = {"acme": "tenant=acme learn=yes", "bolt": "tenant=bolt learn=yes", "root": "role=admin learn=yes"}
SESSIONS = 6
QUOTED = "green winter garden"
ASKS = {"acme": "hello", "bolt": "What is"}  # a piece of what only this tenant's user says


class Quoting(Greeting):
    """Its user says how a greeting should have been answered, word by word."""

    def correction(self, text: str) -> str:
        return f'Repeat: "{QUOTED}"'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys"
    keys.write_text("".join(f"{KEYS[name]} name={name} {rights}\n" for name, rights in RIGHTS.items()))
    with ring(folder / "data", "--api-key-file", str(keys), "--feedback-ttl-days", "1") as started:
        asyncio.run(_talk(started))
        yield started


async def _talk(served: Ring) -> None:
    """Tenant acme greets, and bolt asks sums; each corrects what it hears."""
    for name, is_greeting in (("acme", True), ("bolt", False)):
        async with SimulatedUser(served.url, wish=Quoting(), key=KEYS[name], poisons=not is_greeting) as user:
            await user.talk(SESSIONS, task_share=0.0 if is_greeting else 1.0)


def client(served: Ring, name: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    return httpx.Client(base_url=served.url, headers=headers, timeout=HANG_S, trust_env=False)


def night(served: Ring, name: str, folder: Path, *flags: str) -> Process:
    """A night's run of a tenant, which knows the api's URL and the tenant's key."""
    return Process.start(
        "trainer", "--connect-to", served.url, "--model", "models/tiny", "--mode", "distill", "--candidate",
        "--dataset", "sessions:policy", "--teacher", "tiny", "--adapter", f"policy-of-{name}", "--steps", "1",
        "--evaluate-every", "1", "--prompts-per-step", "4", "--max-tokens", "8", "--reward-margin", "1",
        "--max-base-kl", "50", "--run-dir", str(folder), *flags, environment={"PARALLM_CONNECT_KEY": KEYS[name]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def taught(served: Ring, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both tenants' runs have ended; the folder of runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ASKS:
        process = night(served, name, folder, "--over-http")
        try:
            assert process.wait() == 0, process.output
        finally:
            process.stop()
    return folder


@pytest.mark.parametrize("name", ASKS)
def test_a_tenant_s_night_learns_from_its_own_sessions_alone(served: Ring, taught: Path, name: str) -> None:
    folder = taught / f"policy-of-{name}"
    found = json.loads((folder / "learned_from.json").read_text())
    assert found["sessions"] == SESSIONS and found["rows"] >= 2
    tokenizer = Tokenizer.from_file("models/tiny/tokenizer.json")
    rows = [json.loads(line) for line in (folder / "teacher.jsonl").read_text().splitlines()]
    prompts = [tokenizer.decode(row["prompt_ids"]) for row in rows]
    assert len(prompts) == found["rows"]
    assert not any(said in prompt for other, said in ASKS.items() if other != name for prompt in prompts), prompts
    replies = [tokenizer.decode(row["completion_ids"]) for row in rows]
    assert (QUOTED in replies) == (name == "acme"), "a correction that quotes a reply is a lesson as it stands"
    with client(served, name) as http:
        versions = http.get(f"/v1/adapters/policy-of-{name}").json()
        assert [each["version"] for each in versions["versions"]] == [1, 2], "what is rolled back to, and the candidate"
        assert versions["latest"] == 1


def test_a_tenant_s_key_sees_and_changes_nothing_of_another_s(served: Ring, taught: Path) -> None:
    policy = "policy-of-acme"
    with client(served, "acme") as acme, client(served, "bolt") as bolt, client(served, "root") as root:
        own, others = (_sessions(each) for each in (acme, bolt))
        assert len(own) == len(others) == SESSIONS and not own & others
        assert _sessions(root) == set(), "nor does a night of the operator's key learn from a tenant's sessions"
        session = min(own)
        chat = {"model": f"{policy}@2", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        before = acme.get(f"/v1/sessions/{session}").json(), acme.get(f"/v1/adapters/{policy}").json()
        asked: list[tuple[str, str, dict[str, Any] | None]] = [
            ("GET", f"/v1/sessions/{session}", None),
            ("DELETE", f"/v1/sessions/{session}", None),
            ("POST", "/v1/feedback", {"session": session, "rating": "down"}),
            ("GET", f"/v1/adapters/{policy}", None),
            ("POST", f"/v1/adapters/{policy}/promote", {"version": 2}),
            ("POST", f"/v1/adapters/{policy}/rollback", {"version": 1}),
            ("PUT", f"/v1/trainers/{policy}", {"owner": "bolt"}),
            ("POST", "/v1/chat/completions", chat),
        ]
        for method, path, body in asked:
            answer = bolt.request(method, path, json=body)
            assert answer.status_code == 404, (method, path, answer.text)
        for page in ("/dashboard/nights", "/dashboard/sessions"):
            assert bolt.get(page).headers["location"].startswith("/dashboard/login"), page
        signed_in = bolt.post("/dashboard/login", data={"key": KEYS["bolt"]})
        assert (signed_in.status_code, signed_in.cookies) == (403, {}), "only an admin may look there"
        assert policy not in bolt.get("/v1/adapters").text and policy not in bolt.get("/v1/models").text
        named = {"model": "tiny", "messages": chat["messages"], "max_tokens": 2}
        same = bolt.post("/v1/chat/completions", json=named, headers={"X-Session-Id": session})
        assert same.status_code == 200, "a session of its own, of the same name"
        assert (acme.get(f"/v1/sessions/{session}").json(), acme.get(f"/v1/adapters/{policy}").json()) == before
        assert acme.post("/v1/chat/completions", json=chat).status_code == 200
        assert acme.post(f"/v1/adapters/{policy}/promote", json={"version": 2}).status_code == 200
        assert acme.get(f"/v1/adapters/{policy}").json()["latest"] == 2


def test_a_tenant_s_key_does_not_lead_to_the_ring_s_redis(served: Ring, tmp_path: Path) -> None:
    """What joins by Redis publishes for all tenants."""
    process = night(served, "acme", tmp_path)
    try:
        assert process.wait() == 2, process.output
        assert "--over-http" in process.output, process.output
    finally:
        process.stop()


def _sessions(http: httpx.Client) -> set[str]:
    return {each["id"] for each in http.get("/v1/sessions", params={"limit": 100}).json()["data"]}
