"""The notes of a call as sentences for people."""

from __future__ import annotations

from typing import Final

from bridle.store.records import Note

_SENTENCES: Final = {
    "constrained_by_grammar": "a grammar limited the reply ({})",
    "defer_loading_ignored": "the tools whose loading was deferred were offered at once",
    "effort_converted": "the reasoning effort was converted: {}",
    "exact_continuation_ignored": "the engine ignored the recorded ids, so the call is not exact",
    "field_dropped": "the engine has no {}, so the field was not sent",
    "history_at_upstream": "the upstream keeps the earlier conversation, which is not recorded",
    "item_converted": "the item {} was converted to a message",
    "namespace_flattened": "the tools of the namespace {} were offered one by one",
    "part_as_text": "the content part {} was sent as text",
    "part_dropped": "the content part {} was not sent to the model",
    "replay_diverged": "the request differs from the recorded one: {}",
    "replay_edited": "the recorded {} was replaced by an edited text",
    "replay_handle": "work in the background has another name: {}",
    "replay_live": "an engine was asked in the place of {}",
    "replay_noise": "the request differs only in noise: {}",
    "replay_reworded": "the upstream got the recorded words in the client's JSON",
    "response_not_stored": "the client asked not to store it, so no request can refer to it",
    "role_converted": "the role of a message was converted: {}",
    "sampling_capped": "{} was limited by the session",
    "sampling_not_forwarded": "the engine does not support {}, so it was not sent",
    "sampling_pinned": "the session set {}, in place of the client's value",
    "tool_choice_dropped": "the engine cannot force the tool choice {}",
    "tool_dropped": "{} is not a function, so it was not offered to the model",
    "upstream_retry": "the engine was asked again after an error ({})",
    "version_changed_midway": "new weights were loaded during the reply",
}
"""A sentence for each common name of a note; ``{}`` is the note's detail."""


def sentence(note: Note) -> str:
    """Return a note as a sentence, or its name in words where there is no sentence for it."""
    if (form := _SENTENCES.get(note.name)) is None:
        words = note.name.replace("_", " ")
        return f"{words}: {note.detail}" if note.detail else words
    return form.replace("{}", note.detail or "it")
