"""The verifier from a function of the program that runs the sessions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from bridle.harnesses.sandboxes.folder import Folder
from bridle.harnesses.verifiers.delivery import (
    Delivery,
    Judgement,
    NoVerdict,
    Verdict,
    VerifierError,
    fault_of,
    verdict_of,
)

Returned = TypeVar("Returned")


@dataclass(frozen=True, slots=True)
class FunctionVerifier:
    """A verifier from any function that maps a delivery to a value in the form of a judgement.

    The function runs in this process: a plain one in a thread, which cannot be stopped, so that it
    runs on if the verifier is cancelled. An exception of the function and a score that is not
    finite become a :class:`VerifierError`. A function that takes more than ``timeout_s`` seconds,
    or ``verifier_s`` of the delivery's bounds, reaches no verdict.
    """

    function: Callable[[Delivery], Judgement | Awaitable[Judgement]]
    timeout_s: float | None = None

    async def __call__(self, delivery: Delivery) -> Verdict:
        delivery = await with_local_workspace(delivery)
        within = self.timeout_s or delivery.bounds.verifier_s or None
        try:
            return verdict_of(await asyncio.wait_for(_judged(self.function, delivery), within))
        except VerifierError:
            raise
        except TimeoutError as error:
            raise NoVerdict(f"the verifier took more than {within:g} s") from error
        except Exception as error:
            raise fault_of(self.function, error) from error


async def with_local_workspace(delivery: Delivery) -> Delivery:
    """Return the delivery with its workspace, or a copy of it, on this machine.

    The copy is empty if there is no workspace.
    """
    if isinstance(delivery.sandbox, Folder):
        return replace(delivery, workspace=delivery.sandbox.here(delivery.workspace))
    copy = delivery.sandbox.directory / "workspace"
    copy.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        await delivery.sandbox.download(delivery.sandbox.place.workspace, copy)
    return replace(delivery, workspace=copy)


async def _judged(
    function: Callable[[Delivery], Judgement | Awaitable[Judgement]], delivery: Delivery
) -> Judgement:
    given = await _in_thread(function, delivery)
    return await given if isinstance(given, Awaitable) else given


async def _in_thread(function: Callable[[Delivery], Returned], delivery: Delivery) -> Returned:
    """Run a function in a daemon thread.

    A program waits at its end for the threads of ``asyncio.to_thread``, so a function that hangs
    there would make Ctrl-C ineffective.
    """
    judged: Future[Returned] = Future()
    judged.set_running_or_notify_cancel()

    def judge() -> None:
        try:
            judged.set_result(function(delivery))
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            judged.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - `sys.exit` ends the verifier, not the run
            judged.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=judge, name="verifier", daemon=True).start()
    return await asyncio.wrap_future(judged)
