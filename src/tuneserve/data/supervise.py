"""From a conversation to token rows whose supervised tokens are proven, row by row.

Method. For the answer at position i the server renders `messages[:i]` with the generation prompt; what the
model must add is the rest up to the turn's end token. So the prompt's text must be the beginning of the
row's text, and its ids the beginning of the row's ids; the answer's tokens are those between. This needs no
`{% generation %}` tags and cannot be wrong where it succeeds. Where the beginnings differ because the
template rewrites history (Qwen3 drops earlier thinking), the conversation becomes one row per answer, each
rendered as the server renders it.

Proofs on every row: all tokens decode to the row's text; the supervised ones to the answers and their end
tokens, with nothing around them that the template does not put around every answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from tuneserve.data.codes import RowError
from tuneserve.data.engine import Engine, Ids
from tuneserve.data.formats import Conversation
from tuneserve.data.template import ChatTemplate, Message, server_form

IGNORED = -100


@dataclass(slots=True)
class Piece:
    """A row before tokenization.

    Attributes:
        text: The rendered text.
        count: It renders the first `count` messages.
        cuts: (characters before an answer, the answer's message number), for answers to supervise.
        messages: All messages in server form.
    """

    text: str
    count: int
    cuts: list[tuple[int, int]]
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class TokenRow:
    """Ids, and which of them are supervised."""

    ids: Ids
    mask: npt.NDArray[np.bool_]

    @property
    def supervised(self) -> int:
        """Tokens that the loss counts: position 0 is never a target."""
        return int(np.count_nonzero(self.mask[1:]))


@dataclass
class Frames:
    """What the template puts around every answer, learned from a probe: text before and after."""

    around: set[tuple[str, str]] = field(default_factory=set)

    def fits(self, found: str, content: str) -> bool:
        """Whether `found` is the content (or it trimmed) in one of the frames."""
        for before, after in self.around:
            if found == before + content + after or found == before + content.strip() + after:
                return True
        squeezed = _squeeze(found)
        wanted = _squeeze(content)
        return any(
            squeezed == _squeeze(before) + wanted + _squeeze(after) for before, after in self.around
        )


def _squeeze(text: str) -> str:
    return "".join(text.split())


def plan(conversation: Conversation, template: ChatTemplate) -> list[Piece]:
    """Render a conversation and find where its answers begin.

    Raises:
        RowError: The template refuses it, leaves a turn out, or its prompts are not beginnings.
    """
    messages, tools = server_form(conversation.messages), conversation.tools

    def render(count: int, *, prompt: bool) -> str:
        try:
            return template.render(messages[:count], tools, prompt=prompt)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            code = "bad_role_order" if isinstance(error, jinja2.TemplateError) else "template_error"
            text = f"the chat template refuses the row: {error}; the roles are {roles}"
            raise RowError(code, text) from error

    answers = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and conversation.trained[number]
    ]
    if not answers:
        raise RowError("no_supervised_token", "every assistant turn has weight 0")
    text = render(len(messages), prompt=False)
    cuts = _cuts_of_one_row(text, len(messages), answers, render)
    if cuts is not None:
        pieces = [Piece(text, len(messages), cuts, messages, tools)]
    else:
        pieces = [_piece_of_turn(number, messages, tools, render) for number in answers]
    for piece in pieces:
        _check_present(piece)
    return pieces


def _cuts_of_one_row(
    text: str, count: int, answers: list[int], render: Callable[..., str]
) -> list[tuple[int, int]] | None:
    """Where the answers begin in the whole conversation's text; None when history is rewritten."""
    cuts = []
    for number in answers:
        prompt = render(number, prompt=True)
        if not text.startswith(prompt):
            return None
        # An answer that looks otherwise once more turns follow was not trained as it is generated.
        if number + 1 < count and not text.startswith(render(number + 1, prompt=False)):
            return None
        cuts.append((len(prompt), number))
    return cuts


def _piece_of_turn(
    number: int,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    render: Callable[..., str],
) -> Piece:
    text, prompt = render(number + 1, prompt=False), render(number, prompt=True)
    if not text.startswith(prompt):
        pairs = zip(text, prompt, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(prompt)))
        raise RowError(
            "prefix_mismatch",
            f"turn {number + 1}: the prompt is not the beginning of the row's text; the first difference is "
            f"at character {at}: prompt {prompt[at : at + 20]!r}, row {text[at : at + 20]!r}",
        )
    return Piece(text, number + 1, [(len(prompt), number)], messages, tools)


def _check_present(piece: Piece) -> None:
    """Every turn but earlier answers must be in the text: a template may leave out what it does not know."""
    squeezed = None
    for number, message in enumerate(piece.messages[: piece.count]):
        content = message["content"]
        if message["role"] == "assistant" or not content or content in piece.text:
            continue
        squeezed = squeezed or _squeeze(piece.text)
        if _squeeze(content) not in squeezed:
            text = f"the chat template leaves out turn {number + 1} ({message['role']})"
            raise RowError("turn_dropped", text, path=("messages", number))
    for tool in piece.tools or []:
        if tool["function"]["name"] not in piece.text:
            text = f"the chat template does not show the tool {tool['function']['name']}"
            raise RowError("tools_not_rendered", text, path=("tools",))


class Supervisor:
    """Tokenizes pieces and proves the result."""

    def __init__(self, engine: Engine, template: ChatTemplate, frames: Frames) -> None:
        self.engine, self.template, self.frames = engine, template, frames
        self._controls: dict[tuple[Any, ...], int] = {}

    def tokenize(self, pieces: list[Piece]) -> list[TokenRow | RowError]:
        """One result per piece, in order."""
        results: list[TokenRow | RowError] = []
        for piece, ids in zip(
            pieces, self.engine.encode_batch([piece.text for piece in pieces]), strict=True
        ):
            try:
                results.append(self._supervise(piece, ids))
            except RowError as error:
                results.append(error)
        return results

    def _supervise(self, piece: Piece, ids: Ids) -> TokenRow:
        check_range(ids, self.engine.vocab_rows)
        bos = self.engine.bos_id
        if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            raise RowError("double_bos", f"the row begins with token {bos} (BOS) twice")
        layout = _Layout.of(self.engine, piece.text, ids)
        self._check_controls(piece, ids)
        mask = np.zeros(len(ids), dtype=bool)
        stops = np.flatnonzero(self.engine.is_stop[ids])
        for cut, number in piece.cuts:
            begin = layout.token_at(cut, number)
            self._prove_prompt(piece.text[:cut], layout, begin, number)
            at = np.searchsorted(stops, begin)
            if at == len(stops):
                raise RowError("no_end_token", f"turn {number + 1} does not end with a stop token")
            end = int(stops[at])
            self._prove_answer(piece, number, cut, layout, begin, end)
            mask[begin : end + 1] = True
        return TokenRow(ids, mask)

    def _prove_prompt(self, prompt: str, layout: _Layout, begin: int, number: int) -> None:
        """The prompt's own ids must be the first `begin` ids of the row."""
        engine, ids = self.engine, layout.ids
        added = np.flatnonzero(engine.is_added[ids[:begin]])
        anchor = int(added[-1]) if len(added) and layout.exact else -1
        if anchor >= 0:
            before = int(ids[anchor])
            own = engine.tail_ids(
                before, layout.data[int(layout.ends[anchor]) : layout.byte(prompt)]
            )
        else:
            before = -1
            own = engine.tail_ids(before, prompt.encode())
        found = ids[anchor + 1 : begin].tolist()
        if own != found:
            pairs = enumerate(zip(own, found, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(own), len(found)))
            raise _mismatch(number, anchor + 1 + at)

    def _prove_answer(
        self, piece: Piece, number: int, cut: int, layout: _Layout, begin: int, end: int
    ) -> None:
        text = layout.text_between(begin, end, cut)
        if text is None:
            raise RowError(
                "supervision_mismatch",
                f"turn {number + 1}: the supervised tokens decode to "
                f"{self.engine.decode(layout.ids[begin : end + 1])[:80]!r}",
                path=("messages", number),
            )
        message = piece.messages[number]
        if "tool_calls" not in message and "reasoning" not in message:
            if self.frames.fits(text, message["content"]):
                return
            raise RowError(
                "supervision_mismatch",
                f"turn {number + 1}: the supervised tokens say {text[:80]!r}, which is not the turn",
                path=("messages", number),
            )
        squeezed = _squeeze(text)
        for call in message.get("tool_calls", []):
            if call["function"]["name"] not in text:
                text = f"the chat template does not show the tool call of turn {number + 1}"
                raise RowError("tools_not_rendered", text, path=("messages", number))
        for part in (message["content"], message.get("reasoning", "")):
            if _squeeze(part) not in squeezed:
                text = f"turn {number + 1}: the supervised tokens lack {part[:60]!r}"
                raise RowError("supervision_mismatch", text, path=("messages", number))

    def _check_controls(self, piece: Piece, ids: Ids) -> None:
        """As many control ids as the template writes for such roles, so none comes from a text."""
        messages = piece.messages[: piece.count]
        if piece.tools or any("tool_calls" in message for message in messages):
            return  # their number depends on the calls; the texts were searched
        key = tuple((m["role"], "reasoning" in m) for m in messages)
        wanted = self._controls.get(key)
        if wanted is None:
            plain = [{k: v if k == "role" else "x" for k, v in m.items()} for m in messages]
            bare = self.engine.encode(self.template.render(plain, None, prompt=False))
            wanted = int(np.count_nonzero(self.engine.is_control[np.array(bare.ids)]))
            if len(self._controls) < 4096:
                self._controls[key] = wanted
        found = int(np.count_nonzero(self.engine.is_control[ids]))
        if found != wanted:
            text = f"{found} control tokens in the row, but the template writes {wanted}"
            raise RowError("control_token", text)


def _mismatch(number: int, index: int) -> RowError:
    return RowError(
        "prefix_mismatch",
        f"turn {number + 1}: the prompt's ids are not the beginning of the row's ids; the first index that "
        f"differs is {index}",
        path=("messages", number),
    )


class _Layout:
    """Where each token of a row lies in the row's text.

    `exact`: the ids decode to the text byte for byte, and `ends` are ends in bytes. Otherwise (tokenizers
    that are not byte-level, or that normalize) offsets come from a second encoding, in characters.
    """

    def __init__(self, engine: Engine, text: str, ids: Ids) -> None:
        self.engine, self.text, self.ids = engine, text, ids
        self.data = text.encode()
        self.ascii = len(self.data) == len(text)
        self.exact = False
        self.ends: npt.NDArray[np.int64]
        self.starts: npt.NDArray[np.int64]

    @staticmethod
    def of(engine: Engine, text: str, ids: Ids) -> _Layout:
        layout = _Layout(engine, text, ids)
        table = engine.bytes_of
        if table is not None and b"".join(map(table.__getitem__, ids.tolist())) == layout.data:
            assert engine.lengths is not None
            layout.exact = True
            layout.ends = np.cumsum(engine.lengths[ids])
            return layout
        encoding = engine.encode(text)
        if encoding.ids != ids.tolist():
            raise RowError("supervision_mismatch", "the tokenizer gives different ids each time")
        if (
            engine.unknown_id is not None
            and (unknown := np.flatnonzero(ids == engine.unknown_id)).size
        ):
            begin, end = encoding.offsets[int(unknown[0])]
            shown = text[begin:end]
            raise RowError("unknown_token", f"the tokenizer has no token for {shown[:20]!r}")
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        layout.starts, layout.ends = offsets[:, 0], offsets[:, 1]
        return layout

    def byte(self, prefix: str) -> int:
        """Bytes of a beginning of the text."""
        return len(prefix) if self.ascii else len(prefix.encode())

    def token_at(self, cut: int, number: int) -> int:
        """Number of tokens before character `cut`, which must be a border between tokens."""
        place = self.byte(self.text[:cut]) if self.exact else cut
        before = int(np.searchsorted(self.ends, place, side="right"))
        if self.exact:
            # Tokens that are empty cannot be: every token of the table has bytes.
            if before == 0 or self.ends[before - 1] != place:
                raise _mismatch(number, before)
            return before
        if before == len(self.ends) or self.starts[before] < place:
            raise _mismatch(number, before)
        return before

    def text_between(self, begin: int, end: int, cut: int) -> str | None:
        """Text of the tokens `begin` to `end` if they decode to it, else None."""
        if self.exact:
            first = int(self.ends[begin - 1]) if begin else 0
            return self.data[first : int(self.ends[end])].decode("utf-8", "replace")
        text = self.text[cut : int(self.ends[end])]
        decoded = self.engine.decode(self.ids[begin : end + 1])
        return text if _same(decoded, text) else None


def _same(decoded: str, text: str) -> bool:
    """Equal but for white space and composition, which such decoders do not keep."""
    import unicodedata

    def bare(value: str) -> str:
        return _squeeze(unicodedata.normalize("NFKC", value))

    return bare(decoded) == bare(text)


def check_range(ids: Ids, vocab_rows: int) -> None:
    """Every id must be a row of the embedding.

    Raises:
        RowError: Names the position and the value.
    """
    if len(ids) and (int(ids.max()) >= vocab_rows or int(ids.min()) < 0):
        at = int(np.flatnonzero((ids >= vocab_rows) | (ids < 0))[0])
        text = f"token {at} is {int(ids[at])}, but the embedding has rows 0 to {vocab_rows - 1}"
        raise RowError("id_out_of_range", text)


def check_labels(labels: Ids, vocab_rows: int) -> int:
    """Every label must be a token id or exactly -100; the number of supervised ones is returned.

    Raises:
        RowError: Names the position and the value.
    """
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab_rows))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        text = f"label {at} is {int(labels[at])}, neither -100 nor 0 to {vocab_rows - 1}"
        raise RowError("label_out_of_range", text)
    return int(np.count_nonzero(labels[1:] != IGNORED))
