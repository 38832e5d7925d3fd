"""Tenants: what one's key has made is not there for another's, on every route that there is.

A thing of another tenant has to be answered as one that never was: same status, same words. Every route has a rule
(api/tenants.py), every rule has a request here; a new route without one of them fails.
"""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from api.tenants import ADMIN, LIST, NOTHING, PAGE, RULES
from tests.redis.scripted_worker import MODEL
from tests.redis.tenants import (
    BODIES,
    KEYS,
    MAKES,
    NAMES_NOTHING,
    UNKNOWN,
    Ring,
    check_nothing_has_changed,
    filled,
    listed,
    named,
    routes,
    tenants_ring,
    told,
)


@pytest.fixture
async def ring(redis_url: str, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ring]:
    async with tenants_ring(redis_url, redis, tmp_path, monkeypatch) as made:
        yield made


def test_every_route_has_a_rule_and_every_rule_a_route() -> None:
    found = dict(routes())
    assert [route for route, rule in found.items() if rule is None] == [], "state a rule in api/tenants.py"
    assert RULES.keys() - found.keys() == set(), "rules of routes that are not there"
    asked = named("a", "f").keys() | NAMES_NOTHING
    free = {route for route, rule in found.items() if rule == LIST and rule.kind is None} - asked
    shown = {"GET /v1/models", "GET /models", "GET /v1/files", "GET /v1/batches", "GET /v1/jobs", "GET /v1/adapters"}
    shown |= {"GET /v1/deadletters", "GET /health", "GET /livez", "GET /readyz", "GET /metrics", "GET /is_paused"}
    shown |= {"GET /v1/messages/batches", "GET /api/hello"}  # see below
    shown |= {
        "GET /v1/feedback",
        "GET /v1/sessions",
        "GET /version",
        "GET /ping",
        "POST /ping",
        "GET /load",
        "GET /server_info",
    }
    shown |= {f"GET /api/v1/{each}" for each in ("healthz", "get_server_capabilities", "training_runs", "checkpoints")}
    shown |= {"GET /", "GET /api/version", "GET /api/tags", "GET /api/ps"}
    assert free == shown | {"GET /v1/spec_decode/metrics"}, "say in `named` how it names another's things"
    assert NOTHING == LIST


async def test_another_tenant_s_thing_is_answered_as_one_that_never_was(ring: Ring) -> None:
    looked = 0
    for route, rule in routes():
        if rule is None or rule.kind is None:
            continue
        thing, unknown = ring.things[rule.kind], UNKNOWN[rule.kind]
        body = BODIES.get(route, {})
        foreign = await ring.ask("bob", route, path=filled(route, rule, thing), **body)
        assert foreign.status_code == 404, (route, foreign.text)
        if rule.right != "make":
            never = await ring.ask("bob", route, path=filled(route, rule, unknown), **body)
            assert told(foreign, thing) == told(never, unknown), route
        looked += 1
    assert looked > 20
    held = await ring.ask("bob", "PUT /v1/trainers/learns", json={"owner": "b", "instead_of": "t"})
    assert held.status_code == 404, "a policy that has a trainer and no version yet"
    await check_nothing_has_changed(ring)


async def test_what_a_body_names_is_looked_at_too(ring: Ring) -> None:
    foreign, unknown = named("hers", ring.things["file"]), named("nobodys", UNKNOWN["file"])
    for route, request in foreign.items():
        answer = await ring.ask("bob", route, **request)
        if route in MAKES:
            assert answer.status_code == 409 and "not free" in answer.text, (route, answer.text)
            continue
        assert answer.status_code == 404, (route, answer.text)
        never = await ring.ask("bob", route, **unknown[route])
        there = ring.things["file"] if route == "POST /v1/batches" else "hers"
        missing = UNKNOWN["file"] if route == "POST /v1/batches" else "nobodys"
        assert told(answer, there) == told(never, missing), route
    collected = {"prompt": "hi", "collect_trajectory": True}
    shared = {**collected, "adapter": "shared"}
    assert (await ring.ask("bob", "POST /v1/completions", json=shared)).status_code == 200
    assert (await ring.ask("alice", "PUT /v1/trainers/policy", json={"owner": "t"})).status_code == 200
    default = [await ring.ask(who, "POST /v1/completions", json=collected) for who in ("alice", "bob")]
    assert [answer.status_code for answer in default] == [200, 404], "the default policy has become alice's"
    await check_nothing_has_changed(ring)


async def test_lists_show_one_s_own_and_pages_go_on_only_from_one_s_own(ring: Ring) -> None:
    for route, kind, after in (
        ("GET /v1/jobs", "job", "before"),
        ("GET /v1/files", "file", "after"),
        ("GET /v1/batches", "batch", "after"),
        ("GET /v1/deadletters", "dead letter", ""),
    ):
        shown = {who: await listed(ring, who, route) for who in ("alice", "anna", "bob", "root")}
        thing = ring.things[kind]
        theirs = [ring.things["batch's job"]] * (kind == "job") + [thing]
        everybody = {"alice": theirs, "anna": theirs, "bob": [], "root": theirs}
        assert {who: sorted(ids) for who, ids in shown.items()} == {w: sorted(i) for w, i in everybody.items()}, route
        if after:
            foreign = await ring.ask("bob", route, params={after: thing})
            never = await ring.ask("bob", route, params={after: UNKNOWN[kind]})
            assert foreign.status_code == 404
            assert told(foreign, thing) == told(never, UNKNOWN[kind]), route
    assert await listed(ring, "bob", "GET /v1/adapters", "name") == ["shared"]
    assert sorted(await listed(ring, "anna", "GET /v1/adapters", "name")) == ["hers", "shared"]
    assert "hers" not in await listed(ring, "bob", "GET /v1/models")
    assert "hers" in await listed(ring, "root", "GET /models")


async def test_one_s_own_jobs_are_found_behind_those_of_others_until_they_are_deleted(ring: Ring) -> None:
    job = {"kind": "generate", "model": MODEL, "prompts": ["hi"]}
    mine = [(await ring.ask("bob", "POST /v1/jobs", json=job)).json()["id"] for _ in range(2)]
    for _ in range(5):
        await ring.ask("alice", "POST /v1/jobs", json=job)
    assert sorted(await listed(ring, "bob", "GET /v1/jobs")) == sorted(mine)
    first = await ring.ask("bob", "GET /v1/jobs", params={"limit": 1})
    second = await ring.ask("bob", "GET /v1/jobs", params={"limit": 1, "before": first.json()["data"][0]["id"]})
    assert sorted(each.json()["data"][0]["id"] for each in (first, second)) == sorted(mine)
    await ring.ask("bob", f"POST /v1/jobs/{mine[0]}/cancel")
    assert (await ring.ask("bob", f"DELETE /v1/jobs/{mine[0]}")).status_code == 200
    assert await listed(ring, "bob", "GET /v1/jobs") == mine[1:]
    assert mine[0] not in await listed(ring, "root", "GET /v1/jobs")


async def test_a_message_batch_is_its_tenant_s(ring: Ring) -> None:
    route = "POST /v1/messages/batches"
    mine = (await ring.ask("alice", route, **named("hers", "")[route])).json()["id"]
    seen = {who: await listed(ring, who, "GET /v1/messages/batches") for who in ("alice", "anna", "bob", "root")}
    assert seen == {"alice": [mine], "anna": [mine], "bob": [], "root": [mine]}
    for page in ({"after_id": mine}, {"before_id": mine}):
        assert (await ring.ask("bob", "GET /v1/messages/batches", params=page)).status_code == 404
    assert (await ring.ask("bob", f"POST /v1/messages/batches/{mine}/cancel")).status_code == 404
    canceled = await ring.ask("anna", f"POST /v1/messages/batches/{mine}/cancel")
    assert (canceled.status_code, canceled.json()["processing_status"]) == (200, "canceling")


async def test_what_concerns_the_ring_takes_an_admin_s_key(ring: Ring) -> None:
    for route, rule in routes():
        if rule != ADMIN:
            continue
        path = route.split(" ", 1)[1].replace("{letter_id:path}", ring.things["dead letter"])
        refused = await ring.ask("alice", route, path=path)
        assert refused.status_code == 403, (route, refused.text)
        assert "admin" in refused.json()["error"]["message"]
        if route.startswith("GET "):
            assert (await ring.ask("root", route, path=path)).status_code == 200, route
    assert (await ring.ask("alice", "GET /is_paused")).json()["is_paused"] is False


async def test_the_dashboard_takes_an_admin_s_key(ring: Ring) -> None:
    for route, rule in routes():
        if rule != PAGE or re.search(r"/(login|logout|static/\{name\})$", route):
            continue
        path = re.sub(r"\{(\w+)_id(:path)?\}", lambda m: ring.things.get(m[1], "x"), route.split(" ", 1)[1])
        path = path.replace("{name}", "hers").replace("{ordinal}", "0")
        signed = {"headers": {"origin": ring.server.url}}
        refused = await ring.ask(
            "alice", route, path=path, data={"version": "1"} if "POST" in route else None, **signed
        )
        assert refused.status_code in (303, 401), (route, refused.status_code, refused.text)
        assert "login" in refused.headers.get("location", "login")
    same = {"origin": ring.server.url}
    wrong = await ring.server.http.post("/dashboard/login", data={"key": KEYS["alice"]}, headers=same)
    assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False) and "tenant" in wrong.text
    right = await ring.server.http.post("/dashboard/login", data={"key": KEYS["root"]}, headers=same)
    assert right.status_code == 303
    page = await ring.server.http.get(f"/dashboard/jobs/{ring.things['job']}")
    assert page.status_code == 200
