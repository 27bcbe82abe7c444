"""The verdict on a chat template and its consequences, in words for ``bridle doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bridle.proxy.continuation.roles import RoleRules

Thinking = Literal["kept", "stripped after the next user turn", "stripped", "not rendered"]


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The verdict on one chat template."""

    usable: bool
    """True if it renders a plain conversation at all."""
    prefix_preserving: bool
    """True if a rendered reply stays the same in every later rendering."""
    tails_local: bool
    """True if every tail that was tried renders on its own as it does at the end of the whole."""
    thinking: Thinking
    arguments_reserialised: bool
    """True if tool-call arguments are written anew rather than as sampled."""
    system: bool
    """True if it takes a leading system message; ``late_system`` is the same for a later one."""
    late_system: bool
    alternation: bool
    """True if it refuses two user turns in a row."""
    tools: bool
    """True if tool calls' names and arguments and their results are shown in its rendering."""
    calls_vanish: bool
    """True if it renders a conversation with calls and leaves the calls or their results out."""
    parallel_calls: bool
    """True if it shows several calls of one reply."""
    text_beside_calls: bool
    """True if it shows the text of a reply that has calls too."""
    bare_calls: bool
    """True if it takes a reply that has calls and no text."""
    ids_refused: bool
    """True if it refuses tool-call ids that are not of its own form."""
    end_of_turn_ids: frozenset[int]
    """Ids that end a reply in this template's text."""
    generation_prompt: str
    roles: RoleRules
    """The orders of roles that it takes; requests are brought into one of them."""
    refused_efforts: tuple[str, ...] = ()
    """The reasoning efforts that it raises on; a request with one gets the nearest."""
    bare_tools_refused: bool = False
    """True if it raises on a tool without parameters; such a tool gets an empty schema."""
    reasons: tuple[str, ...] = ()
    """The findings and their consequences for recording and training, in words."""


def in_words(
    report: TemplateReport, rewrites: Sequence[str], failures: Sequence[str]
) -> tuple[str, ...]:
    """Put the consequences of ``report`` for recording and training into words.

    ``rewrites`` names the replies that later renderings change, ``failures`` the tails that do not
    render on their own.
    """
    if not report.usable:
        return ("The template does not render a plain conversation; nothing can be continued.",)
    return (*_of_continuation(report, rewrites, failures), *_of_shapes(report))


def _of_continuation(
    report: TemplateReport, rewrites: Sequence[str], failures: Sequence[str]
) -> list[str]:
    words = []
    if failures:
        words.append(
            "Tails are not local ("
            + "; ".join(failures)
            + "): such calls are rendered with their history; where the new turns change the text "
            "of earlier ones, the calls are recorded as breaks."
        )
    else:
        words.append("Tails are local: calls continue exactly, one line stays one sample.")
    if rewrites:
        words.append(
            f"The template rewrites history ({', '.join(rewrites)}): rendered mode breaks there, "
            "exact mode trains on what was sampled."
        )
    else:
        words.append("History is prefix-preserving: both modes give the same text.")
    if report.thinking.startswith("stripped"):
        words.append(
            f"Thinking is {report.thinking}: the policy sees its own earlier thoughts in exact "
            "mode only."
        )
    elif report.thinking == "not rendered":
        words.append(
            "Reasoning is not rendered: a policy that thinks sees its own earlier thoughts in "
            "exact mode only."
        )
    if report.arguments_reserialised:
        words.append(
            "Tool-call arguments are written anew from JSON: rendered mode breaks where the policy "
            "formats them otherwise."
        )
    return words


def _of_shapes(report: TemplateReport) -> list[str]:
    words = []
    if report.calls_vanish:
        words.append(
            "Tool calls or their results vanish: they are rendered without an error and are not in "
            "the text. Rendered mode trains on prompts without them; exact mode keeps the sampled "
            "calls, and the results where the template shows those."
        )
    elif not report.tools:
        words.append("Tool calls are refused.")
    elif not report.parallel_calls:
        words.append("Several tool calls in one reply are refused or not shown.")
    if report.tools and not report.text_beside_calls:
        words.append("The text beside tool calls is not shown: only exact mode keeps it.")
    if report.tools and not report.bare_calls:
        words.append("A reply of tool calls without text is refused.")
    if report.ids_refused:
        words.append(
            "Tool-call ids of another form are refused: a conversation continues with the ids that "
            "the engine gave its calls, and one that another engine began is refused."
        )
    if not report.end_of_turn_ids:
        words.append("Replies have no end-of-turn token; the next turn's first token ends them.")
    return words
