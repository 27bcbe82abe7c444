"""Rollouts from synchronous code: one event loop and one fleet for a whole run."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from bridle.errors import UsageError
from bridle.harnesses.adapters.base import DEFAULT_MODEL, Adapter
from bridle.harnesses.client import Client, ControlError, ProxyUnreachable
from bridle.harnesses.fleet import Fleet, LocalFleet
from bridle.harnesses.given import GivenRewards
from bridle.harnesses.guards import GuardAction
from bridle.harnesses.permissions import NO_PERMISSIONS, Permissions
from bridle.harnesses.rollout import Job, Rollout, RolloutResult, RolloutSettings, grouped
from bridle.harnesses.sampling import POLICY, session_settings
from bridle.harnesses.sandboxes import SandboxProvider
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.scorers import scorers
from bridle.harnesses.tasks import Task
from bridle.harnesses.verifiers import Delivery, FunctionVerifier, Judgement, Verifier
from bridle.reconstruct.rewards import Aggregation, RewardNotice
from bridle.registry import Options
from bridle.run.agents import SANDBOXES, first_tasks
from bridle.run.agents import agent as named_agent
from bridle.run.agents import verifier as named_verifier
from bridle.run.attempts import ending
from bridle.run.config import (
    AgentConfig,
    RolloutConfig,
    ScorersConfig,
    TasksConfig,
    permitted,
    reentrant,
)
from bridle.run.environment import admin_key_for, default_proxy, key_files
from bridle.run.fleets import fleet_of
from bridle.run.groups import GroupPlan
from bridle.store.records import new_id
from bridle.store.schema.accounts import EVALUATION

if TYPE_CHECKING:
    from bridle.trainer.collection.background import StartGroup

log = logging.getLogger(__name__)

Result = TypeVar("Result")

NO_CALL_HINT: Final = (
    "does the program read OPENAI_BASE_URL, ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL?"
)
"""The question to ask if an agent ran and no call was recorded."""


class Rollouts:
    """A runner of jobs against one proxy on one fleet, which stays warm between calls.

    Sessions run on an event loop in a thread of their own, so that groups run while a trainer
    trains. Leaving the context cancels running sessions, and returns when they are sealed.
    """

    def __init__(
        self,
        proxy_url: str,
        fleet: Fleet,
        *,
        key: str | None = None,
        given: GivenRewards | None = None,
    ) -> None:
        """Prepare the event loop, which starts with the context.

        ``given`` records the rewards that are sent to the proxy.
        """
        self.given = GivenRewards() if given is None else given
        self.judgements: Counter[str] = Counter()
        """Judgements that scorers ``asked`` of models, and that were answered as ``cached``."""
        self._proxy_url = proxy_url
        self._key = key
        self._fleet = fleet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._clients: list[Client] = []
        self._running: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        await _cancelled(self._running)
        for client in self._clients:
            await client.__aexit__(None, None, None)
        await self._fleet.close()
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run ``work`` on the event loop until it has ended or the context is left."""

        async def run() -> Result:
            task = asyncio.ensure_future(work)
            self._running.add(task)
            try:
                return await task
            finally:
                self._running.discard(task)

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def _client(self) -> Client:
        return Client(self._proxy_url, self._key, given=self.given)

    @contextmanager
    def run(
        self, name: str, kind: str = "rollout", config: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[str]:
        """Record a run in the proxy's store, and yield its id for ``RolloutSettings.run_id``.

        Its kind is ``rollout``, or ``eval`` if its sessions are held out. With its settings
        ``config``, its sessions can be re-entered (:mod:`bridle.run.siblings`).
        """
        run_id = new_id("run")
        self._put_run(run_id, kind, "running", name, config=config)
        status, reason = "completed", None
        try:
            yield run_id
        except BaseException as error:
            status, reason = ending(error)
            raise
        finally:
            try:
                self._put_run(run_id, kind, status, name, reason)
            except (ProxyUnreachable, ControlError) as error:
                log.warning("how run %s ended is not recorded: %s", run_id, error)

    def _put_run(
        self,
        run_id: str,
        kind: str,
        status: str,
        name: str,
        reason: str | None = None,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        async def put() -> None:
            async with Client(self._proxy_url, self._key) as client:
                await client.put_run(
                    run_id, kind, name=name, status=status, reason=reason, config=config
                )

        self._submit(put()).result()

    def collect(
        self,
        adapter: Adapter,
        jobs: Iterable[Job],
        settings: RolloutSettings,
        progress: Callable[[RolloutResult], None] | None = None,
    ) -> list[RolloutResult]:
        """Run all jobs, and return their results in the order in which they came.

        Ctrl-C ends every session that still runs.
        """
        running = self._submit(self._collect(adapter, jobs, settings, progress))
        try:
            return running.result()
        finally:
            running.cancel()

    def stream(
        self, adapter: Adapter, jobs: Iterable[Job], settings: RolloutSettings
    ) -> Generator[RolloutResult]:
        """Run all jobs, and yield each result as it comes. Leaving early ends the others."""
        ended: SimpleQueue[RolloutResult | None] = SimpleQueue()
        running = self._submit(self._collect(adapter, jobs, settings, ended.put))
        running.add_done_callback(lambda _: ended.put(None))
        try:
            while (result := ended.get()) is not None:
                yield result
            running.result()
        finally:
            running.cancel()

    async def _collect(
        self,
        adapter: Adapter,
        jobs: Iterable[Job],
        settings: RolloutSettings,
        progress: Callable[[RolloutResult], None] | None,
    ) -> list[RolloutResult]:
        async with self._client() as client:
            rollout = self._rollout(client, adapter, settings)
            return await rollout.collect(jobs, progress)

    def _rollout(self, client: Client, adapter: Adapter, settings: RolloutSettings) -> Rollout:
        hidden = _with_keys_hidden(settings)
        return Rollout(client, adapter, self._fleet, hidden, judgements=self.judgements)

    def judgements_line(self) -> str | None:
        """Return the number of judgements as a line for a person, or ``None`` without any."""
        if not self.judgements:
            return None
        asked, cached = self.judgements["asked"], self.judgements["cached"]
        return f"judgements: {asked} asked of models, {cached} answered by equal earlier ones"

    def groups(
        self,
        adapter: Adapter,
        plan: Callable[[int], GroupPlan],
        settings: RolloutSettings,
        progress: Callable[[RolloutResult], None] | None = None,
    ) -> StartGroup:
        """Return a function that starts groups by their number.

        All groups share the slots of ``settings``.

        A group's future raises :class:`bridle.harnesses.client.ProxyUnreachable` if no session can
        be opened for one of its jobs.
        """
        client = self._client()
        self._clients.append(client)
        rollout = self._rollout(client, adapter, settings)

        async def run(
            number: int, begun: Callable[[], None], ended: Callable[[str], None]
        ) -> list[str]:
            planned = plan(number)
            if not planned.jobs:
                begun()
            found = list(planned.finished)
            for session_id in found:
                ended(session_id)
            running = [asyncio.ensure_future(rollout.one(job, begun)) for job in planned.jobs]
            try:
                for finished in asyncio.as_completed(running):
                    result = await finished
                    if progress is not None:
                        progress(result)
                    if result.session_id is None:
                        # Without the proxy nothing ends well; the group is finished another time.
                        raise ProxyUnreachable(result.error)
                    found.append(result.session_id)
                    ended(result.session_id)
            finally:
                await _cancelled(running)
            return found

        def start(
            number: int, begun: Callable[[], None], ended: Callable[[str], None]
        ) -> Future[Sequence[str]]:
            return self._submit(run(number, begun, ended))

        return start


def configured_fleet(
    agent: AgentConfig, tasks: TasksConfig, chosen: Sequence[Task], fleet: str | None = None
) -> tuple[Adapter, Fleet]:
    """Return the adapter and the fleet that a configuration names; ``fleet`` replaces its own."""
    return fleet_of(
        fleet or agent.fleet,
        agent.name,
        tasks.verifier,
        chosen,
        agent.sandbox,
        cpus=agent.cpus,
        options={**tasks.options, **agent.options},
        permissions=permitted(agent, tasks),
    )


def configured_settings(
    agent: AgentConfig, scoring: ScorersConfig, directory: Path, **more: Any
) -> RolloutSettings:
    """Return the settings of sessions that a configuration states, with ``more`` of them."""
    own = RolloutSettings(
        directory,
        agent.parallel,
        agent.timeout_s,
        session_settings=session_settings(agent.sampling),
        guards=agent.guards,
        bounds=agent.bounds,
        scorers=scorers(scoring.named, scoring.options),
        artefacts=scoring.artefacts,
        judgements=scoring.judgements,
    )
    return replace(own, **more)


def _with_keys_hidden(settings: RolloutSettings) -> RolloutSettings:
    """Return the settings with this machine's key files among the files that no session sees."""
    return replace(settings, hidden=(*settings.hidden, *key_files()))


async def _cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel those of ``tasks`` that still run, and wait until they have ended."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def rollout(
    agent: str | Adapter,
    tasks: str | Iterable[Task],
    verifier: str | Verifier | Callable[[Delivery], Judgement | Awaitable[Judgement]],
    *,
    proxy: str | None = None,
    key: str | None = None,
    sandbox: str | SandboxProvider | None = None,
    fleet: str = "local",
    sampling: str = POLICY,
    group_size: int = 1,
    parallel: int = 4,
    timeout_s: float = 600.0,
    model: str = DEFAULT_MODEL,
    directory: str | Path = "runs/rollout",
    guards: GuardAction = "warn",
    on_result: Callable[[RolloutResult], None] | None = None,
    held_out: bool = False,
    on_rule: Callable[[str], None] = log.info,
    options: Options = MappingProxyType({}),
    permissions: Permissions = NO_PERMISSIONS,
    bounds: Bounds | None = None,
) -> list[RolloutResult]:
    """Run an agent on tasks through a running proxy. Each session is verified, rewarded and sealed.

    Names are those of the command line: ``agent`` as for :func:`bridle.run.agents.agent`, ``tasks``
    as for :func:`bridle.harnesses.tasks.tasks_from`, ``verifier`` as for
    :func:`bridle.run.agents.verifier`, and ``fleet`` as for :func:`bridle.run.fleets.fleet_of`; Ray
    takes the others by name only. An adapter runs in a process sandbox if ``sandbox`` names none.
    ``proxy`` and ``key`` default to ``$BRIDLE_PROXY`` and ``$BRIDLE_ADMIN_KEY``, else the key that
    the proxy on this machine made. ``guards`` is the cost of a finding
    (:mod:`bridle.harnesses.guards`); ``sampling`` is as for
    :func:`bridle.harnesses.sampling.session_settings`. ``group_size`` is the number of sessions per
    task. ``directory`` receives workspaces and logs. ``on_result`` is called with each result, and
    ``on_rule`` once with a line about which rewards make a session's number. ``held_out`` sessions
    are measurements: their tokens are accounted for as ``dropped: evaluation``. ``options`` are the
    own options of the named parts, by name. ``permissions`` are given to sessions and tasks of this
    process from now on. ``bounds`` of a session's processes default to those of :class:`Bounds`.

    Return the results in the order in which they came. Raise :class:`bridle.errors.BridleError`.
    """
    permissions.grant()
    chosen = first_tasks(tasks, None) if isinstance(tasks, str) else list(tasks)
    adapter, running = _parts(agent, chosen, verifier, sandbox, fleet, options)
    jobs = grouped(chosen, group_size)
    notice = RewardNotice(on_rule)

    def ended(result: RolloutResult) -> None:
        notice(Aggregation(), result.rewards)
        if on_result is not None:
            on_result(result)

    url = proxy or default_proxy()
    with (
        Rollouts(url, running, key=admin_key_for(url, key)) as rollouts,
        rollouts.run(
            adapter.name,
            EVALUATION if held_out else "rollout",
            _stated(agent, tasks, verifier, sandbox, sampling, options),
        ) as run_id,
    ):
        settings = RolloutSettings(
            Path(directory),
            parallel,
            timeout_s,
            model,
            run_id,
            session_settings=session_settings(sampling),
            guards=guards,
            bounds=bounds or Bounds(),
        )
        return rollouts.collect(adapter, jobs, settings, ended)


def _stated(
    agent: object, tasks: object, verifier: object, sandbox: object, sampling: str, options: Options
) -> dict[str, Any]:
    """Return the settings with which the sessions can be re-entered, if all parts are named."""
    if not (isinstance(agent, str) and isinstance(tasks, str) and isinstance(verifier, str)):
        return {}
    kind = sandbox if isinstance(sandbox, str) else None
    own = dict(options)
    named = AgentConfig(agent, sandbox=kind, sampling=sampling, options=own)
    return reentrant(RolloutConfig(TasksConfig(tasks, verifier, options=own), named))


def _parts(
    agent: str | Adapter,
    tasks: Sequence[Task],
    verifier: str | Verifier | Callable[[Delivery], Judgement | Awaitable[Judgement]],
    sandbox: str | SandboxProvider | None,
    fleet: str,
    options: Options,
) -> tuple[Adapter, Fleet]:
    kind = sandbox if isinstance(sandbox, str) else None
    if isinstance(agent, str) and isinstance(verifier, str) and (sandbox is None or kind):
        return fleet_of(fleet, agent, verifier, tasks, kind, options=options)
    if fleet != "local":
        raise UsageError(
            f"the fleet {fleet} makes its parts on other machines: name agent, sandbox and verifier"
        )
    if isinstance(agent, str):
        adapter, suited = named_agent(agent, kind, tasks, options)
    else:
        adapter, suited = agent, SANDBOXES.configured(kind or "process", options)(agent)
    provider = suited if sandbox is None or isinstance(sandbox, str) else sandbox
    if isinstance(verifier, str):
        return adapter, LocalFleet(provider, named_verifier(verifier, options))
    return adapter, LocalFleet(provider, FunctionVerifier(verifier))
