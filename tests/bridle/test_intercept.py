"""``bridle run --intercept``: agents that go to the providers' own addresses, through mitmproxy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.harnesses.install import search_path
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus

pytestmark = pytest.mark.usefixtures("warm_start")

OPENAI = """
import openai
client = openai.OpenAI(base_url="https://api.openai.com/v1", api_key="sk-own")
messages = [{"role": "user", "content": "What is 2 plus 3?"}]
print(client.chat.completions.create(model="gpt", messages=messages).choices[0].message.content)
stream = client.responses.create(model="gpt", input="What is 2 plus 3?", stream=True)
print("".join(event.delta for event in stream if event.type == "response.output_text.delta"))
"""
ANTHROPIC = """
import anthropic
client = anthropic.Anthropic(base_url="https://api.anthropic.com", api_key="sk-ant-own")
messages = [{"role": "user", "content": "What is 2 plus 3?"}]
with client.messages.stream(model="claude", max_tokens=20, messages=messages) as stream:
    print("".join(stream.text_stream))
"""
GOOGLE = """
from google import genai
from google.genai.types import HttpOptions
own = HttpOptions(base_url="https://generativelanguage.googleapis.com")
client = genai.Client(api_key="AIzaown", http_options=own)
print(client.models.generate_content(model="gemini", contents="What is 2 plus 3?").text)
"""
FURTHER = """
import openai
client = openai.OpenAI(base_url="https://models.example/api/v1", api_key="own")
messages = [{"role": "user", "content": "What is 2 plus 3?"}]
print(client.chat.completions.create(model="gpt", messages=messages).choices[0].message.content)
"""
ANSWER = "The answer is unknown.\n"


def run(
    proxy_url: str, script: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bridle", "run", "--proxy", proxy_url, *options]
    return subprocess.run(
        [*command, "--", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.intercept
@pytest.mark.parametrize(
    ("script", "dialects", "own"),
    [
        (OPENAI, ["chat", "responses"], "sk-own"),
        (ANTHROPIC, ["messages"], "sk-ant-own"),
        (GOOGLE, ["google"], "AIzaown"),
    ],
    ids=["openai", "anthropic", "google"],
)
def test_calls_to_a_providers_address_are_the_sessions(
    proxy_url: str, store: str, script: str, dialects: list[str], own: str
) -> None:
    done = run(proxy_url, script, "--intercept")
    assert (done.returncode, done.stdout) == (0, ANSWER * len(dialects)), done.stderr
    with Reader(store) as reader:
        (session,) = reader.sessions()
        calls = reader.calls(session.id)
    assert [call.dialect for call in calls] == dialects
    assert {call.status for call in calls} == {CallStatus.COMPLETE}
    assert all(call.sampled_tokens for call in calls)
    assert own.encode() not in b"".join(each.read_bytes() for each in Path(store).parent.iterdir())


@pytest.mark.intercept
def test_a_further_address_may_have_more_before_its_version(proxy_url: str, store: str) -> None:
    done = run(proxy_url, FURTHER, "--intercept-host", "models.example")
    assert (done.returncode, done.stdout) == (0, ANSWER), done.stderr
    with Reader(store) as reader:
        (session,) = reader.sessions()
        assert len(reader.calls(session.id)) == 1


@pytest.mark.intercept
@pytest.mark.parametrize(
    ("base_url", "command", "dialect"),
    [
        ("ANTHROPIC_BASE_URL", ["claude", "-p", "Say hello."], "messages"),
        ("OPENAI_BASE_URL", ["codex", "exec", "--skip-git-repo-check", "Say hello."], "responses"),
    ],
    ids=["claude-code", "codex"],
)
def test_a_harness_that_is_told_no_base_url_is_recorded(
    model_dir: Path, store: str, tmp_path: Path, base_url: str, command: list[str], dialect: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {
        "PATH": search_path(os.environ["PATH"]),
        "HOME": str(home),
        "CODEX_HOME": str(home),
    }
    with (
        ScriptedEngine(
            model_dir, lambda _request: ScriptedReply("Hello."), max_model_len=400_000
        ) as engine,
        ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=model_dir)) as proxy,
    ):
        program = [sys.executable, "-m", "bridle", "run", "--proxy", proxy.base_url, "--intercept"]
        done = subprocess.run(
            [*program, "--", "env", f"--unset={base_url}", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=home,
            env=environment,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "Hello." in done.stdout
    with Reader(store) as reader:
        (session,) = reader.sessions()
        calls = reader.calls(session.id)
    assert {call.dialect for call in calls} == {dialect}
    assert CallStatus.COMPLETE in {call.status for call in calls}


OTHERS = """
import http.server, os, pathlib, ssl, subprocess, threading
import httpx
folder = os.environ["FOLDER"]
key, certificate = f"{folder}/key.pem", f"{folder}/certificate.pem"
subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=other",
    "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate], check=True,
    stderr=subprocess.DEVNULL)
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"its own")
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Page)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); context.load_cert_chain(certificate, key)
server.socket = context.wrap_socket(server.socket, server_side=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"https://127.0.0.1:{server.server_port}/"
trusted = ssl.create_default_context(cafile=certificate)
proxy = os.environ["HTTPS_PROXY"]
print(httpx.Client(proxy=proxy, verify=trusted, trust_env=False).get(url).text)
try:
    httpx.Client(proxy=proxy.replace("bridle:", "bridle:no"), trust_env=False).get(url)
except httpx.ProxyError as error:
    print(error)
commands = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
print(sum(os.environ["OPENAI_API_KEY"].encode() in command for command in commands))
print(os.environ["NODE_EXTRA_CA_CERTS"])
"""


@pytest.mark.intercept
def test_others_are_passed_through_strangers_are_not_and_nothing_stays_behind(
    proxy_url: str, tmp_path: Path
) -> None:
    done = run(proxy_url, OTHERS, "--intercept", FOLDER=str(tmp_path))
    assert done.returncode == 0, done.stderr
    others, unrelated, told, certificate = done.stdout.splitlines()
    assert others == "its own"
    assert "407" in unrelated
    assert told == "0"
    assert not Path(certificate).parent.exists()
    assert Path(certificate).parent.name.startswith("bridle-intercept-")
    running = [each.read_bytes() for each in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(Path(certificate).parent.name.encode() in each for each in running)


def test_without_mitmproxy_it_says_so_and_opens_no_session(proxy_url: str, store: str) -> None:
    done = run(proxy_url, "", "--intercept", BRIDLE_MITMDUMP="/nowhere/mitmdump")
    assert done.returncode == 1
    assert "there is no /nowhere/mitmdump: `pip install 'mitmproxy>=11,<12'`" in done.stderr
    with Reader(store) as reader:
        assert not list(reader.sessions())


def test_a_mitmproxy_that_does_not_start_leaves_a_session_of_infrastructure(
    proxy_url: str, store: str, tmp_path: Path
) -> None:
    broken = tmp_path / "mitmdump"
    broken.write_text("#!/bin/sh\necho 'no such option'\nexit 1\n")
    broken.chmod(0o755)
    done = run(proxy_url, "", "--intercept", BRIDLE_MITMDUMP=str(broken))
    assert done.returncode == 1
    assert "mitmproxy does not start: no such option" in done.stderr
    with Reader(store) as reader:
        assert [session.outcome for session in reader.sessions()] == ["infrastructure"]
