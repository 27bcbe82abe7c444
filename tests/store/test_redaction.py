"""Secrets scrubbed from bodies at write, when asked."""

import json
import re
import sys

import msgspec
import pytest

from bridle.extras import install_command
from bridle.proxy.session.keys import new_session_key
from bridle.store.encoding.packing import dump_json
from bridle.store.errors import RecordRejected
from bridle.store.records import CallStatus, Conversation, Message, Note, ToolCall
from bridle.store.writing.redaction import (
    LIBRARY,
    PATTERNS,
    READERS,
    DetectorsMissing,
    Redactor,
)
from bridle.store.writing.writer import Writer

SECRETS = {
    "private_key": "-----BEGIN RSA PRIVATE KEY-----\\nMIIEow\\n-----END RSA PRIVATE KEY-----",
    "bearer_token": "a1B2c3D4e5" * 3,
    "aws_access_key": "AKIA" + "IOSFODNN7EXAMPLE",
    "azure_storage_key": "AccountKey=" + "a1B2" * 22,
    "discord_token": "MTk4NjIyNDgzNDcxOTI1MjQ4.Cl2FMQ.ZnCjm1XVW7vRze4b7Cq4se7kKWs",
    "npm_token": "//registry.npmjs.org/:_authToken=" + "npm_" + "a1B2" * 9,
    "password_in_url": "hunter22pass",
    "pypi_token": "pypi-AgEIcHlwaS5vcmc" + "a1B2" * 20,
    "sendgrid_key": "SG." + "a1B2c3D4e5F6g7H8i9J0kl" + "." + "a1B2c3D4e5" * 4 + "abc",
    "square_token": "sq0csp-" + "ABCDEFGHIJK_LMNOPQRSTUVWXYZ-0123456789" + "abcde",
    "stripe_key": "sk_" + "live_" + "a1B2" * 6,
    "github_fine_token": "github_pat_" + "a1B2c3D4e5" * 6,
    "github_token": "ghp_" + "a1B2" * 9,
    "gitlab_token": "glpat-" + "a1B2c3D4e5" * 2,
    "google_api_key": "AIza" + "SyA-1234567" * 3 + "ab",
    "hugging_face_token": "hf_" + "aBcD1" * 7,
    "session_key": new_session_key(),
    "slack_token": "xoxb-" + "123456789012-abcdef",
    "api_key": "sk-" + "proj-abcdefghij0123456789",
    "json_web_token": "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKK",
}
IN_CONTEXT = {"bearer_token": "Bearer {}", "password_in_url": "postgres://me:{}@db/x"}
"""The text around the secrets that only their surroundings show."""
ALONE = sorted(SECRETS.keys() - IN_CONTEXT.keys() - {"private_key", "npm_token"})


def recorded(url, calls, redactor, begun, **fields):
    session = calls.session()
    with Writer(url, redactor=redactor) as writer:
        writer.add_sync(session)
        call = calls.begun(session, **begun)
        writer.begin_call(call)
        writer.end_call_sync(calls.ended(call, [1, 2], [3], **fields))
    return call.id


def test_every_pattern_has_a_secret_that_it_finds():
    assert SECRETS.keys() == PATTERNS.keys() | LIBRARY.keys() | READERS.keys()


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_nowhere_in_the_record_and_the_call_says_so(url, reader, calls, name):
    secret = SECRETS[name]
    shown = IN_CONTEXT.get(name, "{}").format(secret)
    written = json.loads(f'"{shown}"')
    request = b'{"messages":[{"role":"user","content":"use %s now"}]}' % shown.encode()
    found = recorded(
        url,
        calls,
        Redactor(),
        {
            "request_body": request,
            "conversation": Conversation((Message("user", f"use {written} now"),), length=1),
        },
        response_body=f'{{"content":"I use {shown}"}}'.encode(),
        replies=(Message("assistant", f"I use {written}"),),
    )
    row = reader.call(found)
    for stored in (
        reader.request_body(row.id),
        reader.response_body(row.id),
        msgspec.json.encode([row.replies, row.conversation.tail]),
    ):
        assert secret.encode()[-12:] not in stored
        assert b"[redacted:%b]" % name.encode() in stored
    assert [note.detail for note in row.notes if note.name == "redacted"] == [f"2 {name}"]
    assert row.status is CallStatus.COMPLETE
    assert reader.prompt_token_ids(found).tolist() == [1, 2], "tokens stay what they were"


def test_a_secret_spelled_across_a_stream_takes_the_raw_body_with_it(url, reader, calls):
    secret = SECRETS["aws_access_key"]
    stream = b"".join(b'data: {"delta":"%c"}\n\n' % letter for letter in secret.encode())
    said = (Message("assistant", f"it is {secret}"),)
    found = recorded(url, calls, Redactor(), {}, response_body=stream, replies=said)
    row = reader.call(found)
    assert reader.response_body(row.id).startswith(b"[redacted")
    assert row.replies[0].content == "it is [redacted:aws_access_key]"


def test_a_stream_that_spells_a_secret_and_then_shows_it_whole_is_not_kept(url, reader, calls):
    secret = SECRETS["aws_access_key"]
    stream = b"".join(b'data: {"delta":"%c"}\n\n' % letter for letter in secret.encode())
    stream += b'data: {"text":"%b"}\n\n' % secret.encode()
    for said in (
        (Message("assistant", secret),),
        (Message("assistant", "no"), Message("assistant", secret)),
    ):
        found = recorded(url, calls, Redactor(), {}, response_body=stream, replies=said)
        assert reader.response_body(found).startswith(b"[redacted")


@pytest.mark.parametrize("name", ALONE)
def test_a_secret_that_begins_a_line_is_found(url, reader, calls, name):
    text = " ".join(f"KEY:{before}{SECRETS[name]}" for before in ("\n", "\r\n", "\t", "\x1b"))
    once = dump_json({"content": text})
    found = recorded(
        url,
        calls,
        Redactor(),
        {"request_body": once},
        replies=(Message("assistant", text, None, (ToolCall("c", "f", once.decode()),)),),
    )
    for stored in (reader.request_body(found), msgspec.json.encode(reader.call(found).replies)):
        assert SECRETS[name].encode() not in stored


def test_two_halves_of_a_key_in_two_strings_leave_the_message_whole(url, reader, calls):
    call = ToolCall("c", "f", '{"x":"-----END RSA PRIVATE KEY-----"}')
    reply = Message("assistant", "it begins -----BEGIN RSA PRIVATE KEY-----", None, (call,))
    found = recorded(url, calls, Redactor(), {}, replies=(reply,))
    assert reader.call(found).replies == (reply,)


def test_a_secret_in_a_command_is_scrubbed(url, reader, calls):
    secret = SECRETS["github_token"]
    argv = ("agent", f"--token={secret}")
    with Writer(url, redactor=Redactor()) as writer:
        known, late = calls.session(argv=argv), calls.session()
        writer.add_sync(known, late)
        writer.update_session_sync(late.id, argv=argv)
    for session in (known, late):
        assert reader.session(session.id).argv == ("agent", "--token=[redacted:github_token]")


@pytest.mark.parametrize("name", ALONE)
def test_a_secret_in_a_header_is_scrubbed(url, reader, calls, name):
    """Codex tells the addresses of git remotes, some with the token that opens them."""
    origin = f"https://git:{SECRETS[name]}@example.org/a.git"
    told = json.dumps({"workspaces": {"/w": {"associated_remote_urls": {"origin": origin}}}})
    headers = {"user-agent": "codex", "x-codex-turn-metadata": told}
    row = reader.call(recorded(url, calls, Redactor(), {"headers": headers}))
    scrubbed = told.replace(SECRETS[name], f"[redacted:{name}]")
    assert row.headers == headers | {"x-codex-turn-metadata": scrubbed}
    assert [note.detail for note in row.notes if note.name == "redacted"] == [f"1 {name}"]


def test_a_secret_in_what_a_calls_columns_quote_of_its_request_is_scrubbed(url, reader, calls):
    secret = SECRETS["api_key"]
    quoted = {
        "sampling": {"stop": [f"KEY={secret}"], "temperature": 0.5},
        "role": f"agent-{secret}",
        "notes": (Note("field_dropped", secret), Note("retry", "call_1 failed")),
    }
    found = recorded(url, calls, Redactor(), {"model_requested": secret}, **quoted)
    row = reader.call(found)
    assert row.model_requested == "[redacted:api_key]"
    assert row.sampling == {"stop": ["KEY=[redacted:api_key]"], "temperature": 0.5}
    assert row.role == "agent-[redacted:api_key]"
    assert row.notes == (
        Note("field_dropped", "[redacted:api_key]"),
        Note("retry", "call_1 failed"),
        Note("redacted", "4 api_key"),
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"url": "postgres:\\/\\/me:hunter22pass@db\\/x", "n": 1.50}',
        b'{"key": "\\u0041KIAIOSFODNN7EXAMPLE", "n": 1.50}',
        b'data: {"text": "Bearer\\u0020a1B2c3D4e5a1B2c3D4e5", "n": 1.50}\n\n',
    ],
)
def test_a_string_is_looked_through_as_it_reads_and_the_rest_stays(url, reader, calls, body):
    stored = reader.request_body(recorded(url, calls, Redactor(), {"request_body": body}))
    assert b"[redacted:" in stored
    assert stored.endswith(body[body.index(b', "n"') :])
    assert b"hunter22pass" not in stored
    assert b"KIAIOS" not in stored
    assert b"a1B2c3" not in stored


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "detect_secrets.plugins.aws", None)
    with pytest.raises(DetectorsMissing, match=re.escape(install_command("redact"))):
        Redactor()


def test_bodies_without_a_secret_stay_byte_for_byte(url, reader, calls):
    body = b'{"messages": [ {"content":"task-sk-1, AKIA, xoxo" } ]}'
    row = reader.call(recorded(url, calls, Redactor(), {"request_body": body}))
    assert reader.request_body(row.id) == body
    assert [note for note in row.notes if note.name == "redacted"] == []


def test_without_being_asked_nothing_is_scrubbed(url, reader, calls):
    body = SECRETS["api_key"].encode()
    row = reader.call(recorded(url, calls, None, {"request_body": body}))
    assert reader.request_body(row.id) == body


class Fails(Redactor):
    """Cannot scrub the end of one call."""

    call_id = ""

    def ended(self, ended):
        if ended.id == self.call_id:
            raise ValueError("no way to scrub it")
        return super().ended(ended)


def test_a_record_that_cannot_be_scrubbed_is_rejected_alone(url, reader, calls):
    redactor, session = Fails(), calls.session()
    with Writer(url, redactor=redactor) as writer:
        writer.add_sync(session)
        bad, good = (calls.begun(session) for _ in range(2))
        redactor.call_id = bad.id
        writer.begin_call(bad)
        with pytest.raises(RecordRejected, match=r"cannot be redacted.*no way to scrub it"):
            writer.end_call_sync(calls.ended(bad, [1, 2], [3]))
        writer.begin_call(good)
        writer.end_call_sync(calls.ended(good, [1, 2], [3]))
    assert reader.call(good.id).status is CallStatus.COMPLETE
    assert reader.call(bad.id).status is not CallStatus.COMPLETE
