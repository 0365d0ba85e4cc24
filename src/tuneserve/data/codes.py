"""The codes of everything that `validate` can find in a row, and what each of them means.

A code never changes its meaning: scripts filter `quarantine.jsonl` by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["reject", "policy", "warning"]
# Two encodings that spreadsheets save in: of western Windows, and of Chinese.
SAVE_AS_UTF8 = "save it as UTF-8: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW (Chinese: -f GB18030)"


@dataclass(frozen=True)
class Code:
    """One kind of finding.

    Attributes:
        name: The stable code.
        level: ``reject``: bad data, counts against `data.max_rejected`; ``policy``: a good row that
            the run file asks to leave out; ``warning``: the row is kept.
        meaning: What was found.
        hint: What to do about it.
    """

    name: str
    level: Level
    meaning: str
    hint: str


def _table(*rows: tuple[str, Level, str, str]) -> dict[str, Code]:
    return {name: Code(name, level, meaning, hint) for name, level, meaning, hint in rows}


CODES: dict[str, Code] = _table(
    # reading
    ("bad_json", "reject", "The line is not JSON, for example cut in half.", "mend the line"),
    ("bad_encoding", "reject", "The bytes are not UTF-8.", SAVE_AS_UTF8),
    ("bad_csv", "reject", "The record does not have the header's number of cells.", "quote it"),
    ("two_objects", "reject", "Two JSON values on one line.", "put each on a line of its own"),
    ("duplicate_key", "reject", "A key occurs twice in one object.", "keep one of them"),
    ("not_finite", "reject", "NaN, Infinity or a number too large for a double.", "remove it"),
    ("lone_surrogate", "reject", "Half of a UTF-16 pair as an escape.", "mend what cut the text"),
    ("too_deep", "reject", "Nested deeper than 100 levels.", "flatten the row"),
    ("huge_integer", "reject", "An integer beyond 64 bits.", "write it as a string"),
    ("not_an_object", "reject", "The row is JSON, but not an object.", "wrap it in an object"),
    # shape
    ("unknown_format", "reject", "The row does not have the file's format.", "see docs/data.md"),
    ("preference_pair", "reject", "A pair of a chosen and a rejected answer.", "use DPO for it"),
    ("class_label", "reject", "A text with a class label.", "turn the label into an answer"),
    ("class_label_range", "reject", "A class label outside 0..n-1.", "number classes from 0"),
    ("class_label_type", "reject", "A class label that is not an integer.", "write integers"),
    ("bad_type", "reject", "A field has the wrong type.", "strings are never made up from others"),
    ("not_text_part", "reject", "A content part that is not text.", "images cannot be trained on"),
    ("unknown_role", "reject", "A role that is not known.", "see docs/data.md for the roles"),
    ("bad_role_order", "reject", "Turns in an order that cannot be rendered.", "mend the order"),
    ("no_assistant", "reject", "There is no assistant turn to learn from.", "remove the row"),
    ("empty_content", "reject", "A turn without visible text.", "fill or remove it"),
    ("null_literal", "reject", "An answer that is the word None, null or NaN.", "mend the export"),
    ("bad_tool_call", "reject", "A tool call that cannot be parsed.", "arguments are an object"),
    ("unanswered_call", "reject", "A tool call without its result, or a result of no call.",
     "give each call one result, with the call's id"),
    ("control_token", "reject", "A control token of the tokenizer inside the text.",
     "remove it, or set data.control_tokens: neutralize"),
    # rendering and tokens
    ("template_error", "reject", "The chat template refuses the row.", "see the message"),
    ("turn_dropped", "reject", "The chat template leaves a turn out.", "use another template"),
    ("tools_not_rendered", "reject", "The chat template shows no tools or tool calls.",
     "set model.chat_template to one that supports tools"),
    ("prefix_mismatch", "reject", "The prompt's ids are not the beginning of the row's ids.",
     "remove white space at the beginning of the answer"),
    ("supervision_mismatch", "reject", "The supervised tokens are not the assistant's turns.",
     "use another template"),
    ("no_end_token", "reject", "An assistant turn without a supervised end token.",
     "use a template that ends turns"),
    ("double_bos", "reject", "Two BOS tokens at the start.", "remove BOS from the template"),
    ("id_out_of_range", "reject", "A token id outside the embedding.", "resize the embedding"),
    ("label_out_of_range", "reject", "A label that is neither -100 nor a token id.", "a bug"),
    ("unknown_token", "reject", "Text that the tokenizer cannot represent.", "remove it"),
    # policy
    ("duplicate", "policy", "The same conversation as an earlier row.", "nothing to do"),
    ("too_long", "policy", "More tokens than data.max_length.", "raise data.max_length"),
    ("no_supervised_token", "policy", "No supervised token, or none left after truncation.",
     "raise data.max_length, or drop the row"),
    ("eval_overlap", "reject", "A held-out conversation that is also trained on.",
     "remove it from one side"),
    # warnings
    ("placeholder", "warning", "An unresolved {{placeholder}}.", "fill it in, if it is one"),
    ("length_outlier", "warning", "Far longer than the other rows.", "look at it"),
    ("unknown_tool", "warning", "A call of a tool that is not listed.", "list it in `tools`"),
    ("truncated", "warning", "Cut to data.max_length.", "raise data.max_length"),
    ("answer_left_out", "warning", "An answer of a kept row is left out, mostly for its length.",
     "raise data.max_length"),
    ("eval_greeting", "warning", "A held-out conversation that many trained ones begin with.",
     "remove it from data.eval: its answer is trained on"),
    ("neutralized", "warning", "Control tokens in the text were defused.", "nothing to do"),
)  # fmt: skip


class RowError(Exception):
    """A row that is rejected.

    Args:
        code: A key of `CODES`.
        message: What was found, without the place.
        offset: Where in the row's text, in characters from its start.
        path: Where in the parsed row, for example ``("messages", 3, "role")``; used when `offset`
            is None.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        offset: int | None = None,
        path: tuple[str | int, ...] = (),
    ) -> None:
        assert code in CODES, code
        super().__init__(message)
        self.code, self.message, self.offset, self.path = code, message, offset, path
