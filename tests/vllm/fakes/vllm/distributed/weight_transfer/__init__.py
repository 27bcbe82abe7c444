"""A stand-in for vLLM's registry of weight transfer engines."""

from typing import ClassVar


class WeightTransferEngineFactory:
    registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None:
        cls.registered[name] = (module, class_name)
