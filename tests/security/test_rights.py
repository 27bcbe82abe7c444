"""Test the rights of a session key, a verifier key, no key at all, and the admin key."""

from __future__ import annotations

import base64
import hmac
from typing import Any

import httpx
import pytest

from bridle.proxy.server import ProxyServer
from bridle.proxy.session.keys import hash_key, new_verifier_key
from bridle.proxy.settings import ProxySettings
from bridle.store.reward import RewardSource

ADMIN = "admin-key-of-the-test-0123456789"
CHAT = "/v1/chat/completions"
ASK = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 plus 2?"}]}
BONUS = {"name": "bonus", "value": 100.0}
V1 = "/bridle/v1"


def control_requests(session: str, call: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Every route of the control API that changes or shows something."""
    at = f"{V1}/sessions/{session}"
    return [
        ("GET", f"{V1}/sessions", {}),
        ("POST", f"{V1}/sessions", {"json": {}}),
        ("GET", at, {}),
        ("GET", f"{at}/actions", {}),
        ("GET", f"{at}/calls", {}),
        ("POST", f"{at}/rewards", {"json": BONUS}),
        ("GET", f"{at}/rewards", {}),
        ("POST", f"{at}/verifier-key", {}),
        ("PUT", f"{at}/calls/{call}/kind", {"json": {"kind": "side"}}),
        ("DELETE", f"{at}/calls/{call}/kind", {}),
        ("POST", f"{at}/seal", {"json": {"outcome": "infrastructure"}}),
        ("GET", f"{V1}/private-files", {}),
        ("GET", f"{V1}/policy", {}),
        ("PUT", f"{V1}/policy", {"json": {"version": 9}}),
        ("GET", f"{V1}/runs/R", {}),
        ("PUT", f"{V1}/runs/R", {"json": {"kind": "rollout"}}),
        ("GET", f"{V1}/engines", {}),
        ("GET", f"{V1}/upstreams", {}),
        ("POST", f"{V1}/engines", {"json": {"url": "http://127.0.0.1:1"}}),
        ("DELETE", f"{V1}/engines/0", {}),
        ("POST", f"{V1}/pause", {"json": {}}),
        ("POST", f"{V1}/resume", {}),
        ("GET", "/metrics", {}),
    ]


def test_the_list_of_control_requests_has_every_route(lab: Any) -> None:
    paths = lab.ask("GET", "/openapi.json", ADMIN).json()["paths"]
    for path, operations in paths.items():
        for method in operations:
            shown = path.format(session_id="S", call_id="C", name="0", run_id="R")
            assert any(
                (method.upper(), shown) == (one, there)
                for one, there, _ in control_requests("S", "C")
            ), (method, path)


@pytest.mark.parametrize("whose", ["own", "none"])
def test_an_agent_controls_nothing_with_its_own_key_and_nothing_without(
    lab: Any, whose: str
) -> None:
    mine, other = lab.session(), lab.session()
    key = mine["key"] if whose == "own" else None
    assert lab.ask("POST", CHAT, mine["key"], json=ASK).status_code == 200
    (call,) = lab.reader.call_ids(mine["id"])
    for session in (mine["id"], other["id"]):
        for method, path, body in control_requests(session, call):
            status = lab.ask(method, path, key, **body).status_code
            assert status == (403 if key else 401), (method, path)
    lab.ask("POST", f"{V1}/sessions/{mine['id']}/seal", ADMIN).raise_for_status()
    late = lab.ask("POST", f"{V1}/sessions/{mine['id']}/rewards", key, json=BONUS)
    assert late.status_code == (403 if key else 401)
    assert not lab.reader.rewards(mine["id"])
    assert not lab.reader.rewards(other["id"])
    assert [engine["url"] for engine in lab.ask("GET", f"{V1}/engines", ADMIN).json()] == [
        lab.engine.base_url
    ]


def test_a_session_records_with_its_own_key_only(lab: Any) -> None:
    mine, other = lab.session(name="mine"), lab.session(name="other")
    for path in (f"/s/{other['id']}{CHAT}", f"/s/other{CHAT}"):
        assert lab.ask("POST", path, mine["key"], json=ASK).status_code == 403
        assert lab.ask("POST", path, json=ASK).status_code == 401
        assert lab.ask("POST", path, mine["verifier_key"], json=ASK).status_code == 403
    assert not lab.reader.call_ids(other["id"])


def test_a_verifier_key_scores_and_seals_its_session_and_does_nothing_else(lab: Any) -> None:
    mine, other = lab.session(), lab.session()
    lab.ask("POST", CHAT, mine["key"], json=ASK).raise_for_status()
    (call,) = lab.reader.call_ids(mine["id"])
    key = mine["verifier_key"]
    own = f"{V1}/sessions/{mine['id']}"
    for method, path, body in control_requests(mine["id"], call):
        status = lab.ask(method, path, key, **body).status_code
        mine_to_do = path.startswith(own) and not path.endswith("/verifier-key")
        assert status in (200, 201) if mine_to_do else status == 403, (method, path)
    for method, path, body in control_requests(other["id"], call):
        assert lab.ask(method, path, key, **body).status_code == 403, (method, path)
    assert lab.ask("POST", CHAT, key, json=ASK).status_code == 403
    (reward,) = lab.reader.rewards(mine["id"])
    assert reward.source is RewardSource.VERIFIER


def test_a_verifier_key_is_random_and_stored_only_hashed(lab: Any) -> None:
    one, other = lab.session(), lab.session()
    secrets = [made["verifier_key"].rpartition(".")[2] for made in (one, other)]
    assert len(set(secrets)) == 2
    assert lab.reader.session(one["id"]).verifier_key_hash == hash_key(one["verifier_key"])
    stored = b"".join(file.read_bytes() for file in lab.store.parent.glob("bridle.db*"))
    assert not [secret for secret in secrets if secret.encode() in stored]


def test_a_renewed_verifier_key_scores_also_at_another_proxy_and_the_old_one_does_not(
    lab: Any, model_dir: Any
) -> None:
    mine = lab.session()
    at = f"/bridle/v1/sessions/{mine['id']}"
    settings = ProxySettings(
        lab.engine.base_url, f"sqlite:///{lab.store}", tokenizer_dir=model_dir, admin_key=ADMIN
    )

    def status(url: str, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{url}{at}/rewards", json=BONUS, headers=headers).status_code

    with ProxyServer(settings, grace_s=1) as second:
        assert status(second.base_url, mine["verifier_key"]) == 201
        renewed = lab.ask("POST", f"{at}/verifier-key", ADMIN)
        assert renewed.status_code == 201
        key = renewed.json()["verifier_key"]
        for url in (lab.url, second.base_url):
            assert status(url, key) == 201
            assert status(url, mine["verifier_key"]) == 401
    with ProxyServer(settings, grace_s=1) as restarted:
        assert status(restarted.base_url, key) == 201


def test_a_verifier_key_that_the_proxy_did_not_make_opens_nothing(lab: Any) -> None:
    mine, other = lab.session(), lab.session()
    swapped = mine["verifier_key"].replace(mine["id"], other["id"])
    at = f"{V1}/sessions/{other['id']}/rewards"
    proof = hmac.digest(ADMIN.encode(), other["id"].encode(), "sha256")
    derived = base64.urlsafe_b64encode(proof).decode().rstrip("=")
    for forged in (
        swapped,
        new_verifier_key(other["id"]),
        f"brv_{other['id']}.{derived}",
        "brv_",
        f"brv_{other['id']}.",
        "brv_.",
    ):
        assert lab.ask("POST", at, forged, json=BONUS).status_code == 401, forged
    assert not lab.reader.rewards(other["id"])


def test_the_key_and_not_the_client_decides_the_source(lab: Any) -> None:
    mine = lab.session()
    at = f"{V1}/sessions/{mine['id']}/rewards"
    for key in (ADMIN, mine["verifier_key"]):
        claimed = lab.ask("POST", at, key, json=BONUS | {"source": "verifier"})
        assert claimed.status_code == 422
        lab.ask("POST", at, key, json=BONUS).raise_for_status()
    sources = [reward.source for reward in lab.reader.rewards(mine["id"])]
    assert sources == [RewardSource.OPERATOR, RewardSource.VERIFIER]


@pytest.mark.parametrize("lab", [{"keyless_recording": True}], indirect=True)
def test_a_keyless_recorder_reaches_no_session_that_has_a_key_and_no_control(lab: Any) -> None:
    keyed = lab.session(name="keyed")
    own = lab.ask("POST", "/v1/responses", keyed["key"], json={"model": "m", "input": "hi"})
    (call,) = lab.reader.call_ids(keyed["id"])
    for method, path, body in control_requests(keyed["id"], call):
        assert lab.ask(method, path, **body).status_code == 403, (method, path)
    for path in (f"/s/{keyed['id']}{CHAT}", f"/s/keyed{CHAT}"):
        assert lab.ask("POST", path, json=ASK).status_code == 403
    response = own.json()["id"]
    assert lab.ask("GET", f"/v1/responses/{response}").status_code == 404
    follow = {"model": "m", "input": "more", "previous_response_id": response}
    assert lab.ask("POST", "/v1/responses", json=follow).status_code == 404
    item = own.json()["output"][0]
    echoed = {
        "model": "m",
        "input": [{"role": "user", "content": "hi"}, item, {"role": "user", "content": "on"}],
    }
    assert lab.ask("POST", "/v1/responses", json=echoed).status_code == 200
    assert lab.reader.call_ids(keyed["id"]) == [call], "an echoed id opens no session"

    assert lab.ask("POST", f"/s/free{CHAT}", json=ASK).status_code == 200
    mine = lab.ask("POST", "/v1/responses", json={"model": "m", "input": "hi"}).json()["id"]
    assert lab.ask("GET", f"/v1/responses/{mine}").status_code == 200
