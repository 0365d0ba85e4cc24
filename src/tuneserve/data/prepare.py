"""The tokenizer folder of the artifact, and all that the workers need to know of the base model."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from tuneserve.artifacts import write_json_atomic
from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.data.engine import Engine
from tuneserve.data.probe import PROBES, TemplateFacts, add_tools, check_parity, examine
from tuneserve.data.template import ChatTemplate
from tuneserve.data.tokenizer_child import replace_template
from tuneserve.errors import DataError, ModelError
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer"
# Embeddings by the name they have in the model families that transformers serves causal LMs of.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_CHILD_SECONDS = 600


@dataclass(frozen=True)
class Prepared:
    """The tokenizer, proven to be the one the server will use.

    `tool_template` renders conversations with tools; it is `template` itself where that shows them.
    """

    template: ChatTemplate
    engine: Engine
    facts: TemplateFacts
    tool_template: ChatTemplate
    vocab_rows: int


def start_tokenizer(context: StageContext) -> subprocess.Popen[str]:
    """Start the child that loads the tokenizer; it works while the files are opened."""
    assert context.base is not None
    request = {
        "base": str(context.base),
        "out": str(context.out / TOKENIZER),
        "backend": str(context.work / "tokenizer_backend.json"),
        "chat_template": context.run.model.chat_template,
        "trust_remote_code": context.run.model.trust_remote_code,
        "probes": PROBES,
    }
    request_path = context.work / "tokenizer_request.json"
    request_path.write_text(json.dumps(request), encoding="utf-8")
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tuneserve.data.tokenizer_child",
            str(request_path),
            str(context.work / "tokenizer_answer.json"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_tokenizer(
    context: StageContext, child: subprocess.Popen[str], *, vocab_rows: int | None = None
) -> Prepared:
    """Wait for the child, compare its renderings with ours, and examine the template.

    Args:
        context: The stage's.
        child: What `start_tokenizer` gave.
        vocab_rows: Rows of the embedding, where the weights that say so are not here.

    Raises:
        ModelError: The tokenizer cannot be loaded, or its template not be supervised.
        DataError: `data.max_length` is over the model's context.
    """
    base = context.base
    assert base is not None
    answer = _answer(child, context.work / "tokenizer_answer.json", base)
    backend = (context.work / "tokenizer_backend.json").read_text(encoding="utf-8")
    for name in ("request", "answer", "backend"):
        (context.work / f"tokenizer_{name}.json").unlink(missing_ok=True)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    check_context(config, answer["model_max_length"], context.run.data.max_length)
    vocab_rows = vocab_rows or embedding_rows(base, config)
    generation = _generation_config(base)
    stops = stop_ids(answer["eos_id"], generation)
    try:
        template = ChatTemplate(answer["sources"], answer["variables"])
    except jinja2.TemplateError as error:
        raise ModelError(
            f"the chat template is not valid Jinja: {error}",
            expected="a Jinja template",
            hint="mend model.chat_template",
        ) from error
    engine = Engine(backend, stop_ids=stops, vocab_rows=vocab_rows, bos_id=answer["bos_id"])
    check_parity(template, engine, answer["renderings"])
    facts = examine(template, engine)
    if facts.extra_stop:
        stops = stops | {facts.end_id}
        generation["eos_token_id"] = sorted(stops)
        engine.is_stop[facts.end_id] = True
    if generation:
        write_json_atomic(context.out / TOKENIZER / "generation_config.json", generation)
    for note in facts.notes:
        log.info("template: %s", note)
    tool_template = add_tools(template) or template
    return Prepared(template, engine, facts, tool_template, vocab_rows)


def save_tool_template(context: StageContext, prepared: Prepared) -> None:
    """Make the template with the tools' prelude the one that is passed on."""
    source = prepared.tool_template.sources["default"]
    replace_template(context.out / TOKENIZER, source)
    prepared.facts.notes.append(
        "the base's template shows no tools; a prelude that writes them was put before it (the "
        "format of Hermes models: serve.tool_parser: hermes reads the calls back)"
    )


def _answer(child: subprocess.Popen[str], path: Path, base: Path) -> dict[str, Any]:
    try:
        _, errors = child.communicate(timeout=_CHILD_SECONDS)
    except subprocess.TimeoutExpired as error:
        child.kill()
        child.communicate()
        raise ModelError(
            f"{base}: the tokenizer did not load in {_CHILD_SECONDS} s",
            expected="a tokenizer that loads in seconds",
        ) from error
    if child.returncode:
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
        raise ModelError(
            f"{base}: the tokenizer cannot be loaded: {last.strip()}",
            expected="a folder that AutoTokenizer of transformers reads",
            hint="check tokenizer.json and tokenizer_config.json of the base model",
        )
    answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "error" in answer:
        raise ModelError(
            f"{base}: {answer['error']}",
            expected="a tokenizer and a template that go together",
            hint="set model.chat_template, or choose another base",
        )
    return answer


def stop_ids(eos_id: int | None, generation: dict[str, Any]) -> set[int]:
    """Ids at which the server stops: the tokenizer's EOS and those of generation_config.json."""
    found = generation.get("eos_token_id")
    ids = set(found if isinstance(found, list) else [found] if isinstance(found, int) else [])
    return ids | ({eos_id} if eos_id is not None else set())


def embedding_rows(base: Path, config: dict[str, Any]) -> int:
    """Rows of the input embedding, from the weights' headers; config.json may differ (padding).

    Raises:
        ModelError: No embedding is found.
    """
    tensors = Checkpoint.open(base).tensors
    for name, tensor in tensors.items():
        if name.endswith(_EMBEDDINGS) and len(tensor.shape) == 2:
            return int(tensor.shape[0])
    raise ModelError(
        f"{base}: no embedding among its {len(tensors)} tensors",
        expected=f"a tensor that ends in {', '.join(_EMBEDDINGS)}",
        hint="is it a causal language model?",
        details={"vocab_size": config.get("vocab_size")},
    )


def check_context(config: dict[str, Any], tokenizer_limit: int, max_length: int) -> None:
    """Refuse rows longer than the model has positions.

    Raises:
        DataError: `max_length` is larger.
    """
    text = config.get("text_config") or config
    limits = [text[name] for name in _CONTEXT_FIELDS if isinstance(text.get(name), int)]
    # Tokenizers without a limit say 1e30; one that says something real bounds models that say
    # nothing.
    if not limits and tokenizer_limit < 10**9:
        limits = [tokenizer_limit]
    if limits and max_length > limits[0]:
        raise DataError(
            f"data.max_length is {max_length}, but the model's context is {limits[0]} tokens",
            expected=f"at most {limits[0]}",
            hint="lower data.max_length",
            details={"max_length": max_length, "context": limits[0]},
        )


def _generation_config(base: Path) -> dict[str, Any]:
    path = base / "generation_config.json"
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    return data if isinstance(data, dict) else {}


def discard_tokenizer(context: StageContext, child: subprocess.Popen[str]) -> None:
    """End the child and remove its files, when something else failed first."""
    child.kill()
    child.communicate()
    shutil.rmtree(context.out / TOKENIZER, ignore_errors=True)
    for path in context.work.glob("tokenizer_*.json"):
        path.unlink(missing_ok=True)
