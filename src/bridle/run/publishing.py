"""The publisher of a training run's versions to the engines that serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from bridle.engine.contract.client import EngineRefused
from bridle.engine.vllm.lora import VllmLora
from bridle.engine.vllm.transfer import TransferRoute, VllmTransfer
from bridle.run.stack import Stack
from bridle.run.training_plan import TrainingPlan
from bridle.store.writing.writer import Writer
from bridle.trainer.policy.weights import Weights
from bridle.trainer.publish.lora import LoraPublisher
from bridle.trainer.publish.publisher import Publisher, default_probes
from bridle.trainer.publish.replicas import ReplicaPublisher
from bridle.trainer.publish.transfer import TransferPublisher

AnyPublisher = Publisher | ReplicaPublisher | TransferPublisher | LoraPublisher
Open = Callable[[TrainingPlan, Stack, Weights, Writer], AbstractContextManager[AnyPublisher]]


@contextmanager
def publishing(
    plan: TrainingPlan, stack: Stack, policy: Weights, writer: Writer
) -> Iterator[AnyPublisher]:
    """Yield the publisher to the stack's engine, or to all of its engines as to one."""
    others: dict[str, Open] = {"transfer": _transferring, "lora": _publishing_lora}
    if (other := others.get(plan.config.publish.through)) is not None:
        with other(plan, stack, policy, writer) as publisher:
            yield publisher
        return
    directory, probes = plan.directory / "published", default_probes(policy.vocabulary)

    with ExitStack() as open_clients:
        if not stack.more_engines:
            yield Publisher(
                open_clients.enter_context(stack.engine()),
                directory,
                plan.beginning,
                probes=probes,
                config=plan.config.publish,
                announce=stack.announce,
                record=writer.add_sync,
            )
            return
        urls = (stack.engine_url, *stack.more_engines)
        yield ReplicaPublisher(
            {url: open_clients.enter_context(stack.engine(url)) for url in urls},
            directory,
            plan.beginning,
            probes=probes,
            config=plan.config.publish,
            announce=stack.announce,
            retract=stack.retract,
            record=writer.add_sync,
        )


@contextmanager
def _transferring(
    plan: TrainingPlan, stack: Stack, policy: Weights, writer: Writer
) -> Iterator[TransferPublisher]:
    """Yield a publisher that sends weights to the stack's engines.

    It is yielded once each engine has shown that it takes them.
    """
    if stack.kind != "vllm":
        raise EngineRefused(f"{stack.engine_url} is not a vLLM: publish through directories")
    config = plan.config.publish
    route = TransferRoute(address=config.transfer_address, backend=config.transfer_backend)
    alone = not stack.more_engines
    with ExitStack() as opened:
        engines = {}
        for url in (stack.engine_url, *stack.more_engines):
            engine = VllmTransfer(url, route=route, api_key=stack.engine_key)
            engines[url] = opened.enter_context(engine)
            engine.require_transfers()
        publisher = TransferPublisher(
            engines,
            plan.directory / "published",
            plan.beginning,
            probes=default_probes(policy.vocabulary),
            config=config,
            announce=lambda version, url: stack.announce(version, None if alone else url),
            retract=stack.retract,
            record=writer.add_sync,
        )
        yield opened.enter_context(publisher)


@contextmanager
def _publishing_lora(
    plan: TrainingPlan, stack: Stack, policy: Weights, writer: Writer
) -> Iterator[LoraPublisher]:
    """Yield a publisher of adapters alone, once the stack's engine has shown that it takes them."""
    if stack.kind != "vllm" or stack.more_engines:
        raise EngineRefused(
            f"{stack.engine_url}: adapters are published to one vLLM: publish merged weights with "
            "training.publish.through=directory"
        )
    with VllmLora(stack.engine_url, api_key=stack.engine_key) as engine:
        engine.require_lora(plan.config.lora.rank)
        yield LoraPublisher(
            engine,
            plan.directory / "published",
            plan.beginning,
            probes=default_probes(policy.vocabulary),
            config=plan.config.publish,
            announce=stack.announce_lora,
            record=writer.add_sync,
        )
