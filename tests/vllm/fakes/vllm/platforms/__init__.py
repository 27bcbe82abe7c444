"""A stand-in for vLLM's platform: a CPU."""


class _Platform:
    @staticmethod
    def is_cpu() -> bool:
        return True


current_platform = _Platform()
