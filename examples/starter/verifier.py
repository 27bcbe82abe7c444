"""The verifier: it scores an answer, and what it returns is what the policy learns."""

from bridle import Delivery


def check(delivery: Delivery) -> float:
    """Return a reward from 0 to 1: half for writing only digits, half for the right number.

    A reward that is easier to earn in part teaches faster: where all sessions of a task get the
    same reward, nothing is learned from it. `delivery` also has the agent's folder
    (`delivery.workspace`) and its exit code.
    """
    answer = delivery.answer.strip()
    digits = sum(character in "0123456789" for character in answer) / max(len(answer), 1)
    right = answer == delivery.task.payload["answer"]
    return 0.5 * digits + 0.5 * right
