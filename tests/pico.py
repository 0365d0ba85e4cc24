"""A tiny Llama that has been trained, for tests where a model must have something to lose.

`make_pico(folder)` writes a Hugging Face checkpoint of about 0.4 million parameters that has
learned a small invented world (colours of things, sums) to a loss far below a random model's. Head
size and feature counts suit vLLM on CPU and GPTQ groups of 32, 64 or 128. Its end token is its pad
token as well, like SmolLM2's, so that code which pads or masks by id shows itself.

Building takes some seconds, once per machine and per version of this file; later calls copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

THINGS = "apple brick cloud drum engine fern glove hammer island jacket kettle lamp".split()
COLOURS = "red blue green amber violet white".split()
VOCABULARY = 512
_DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "tied": True,
    "layers": 2,
    "hidden": 128,
    "steps": 250,
    "dtype": "bfloat16",
    "max_shard_size": "5GB",
}

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def conversations(count: int, *, seed: int = 0, habit: str = "") -> list[list[dict[str, str]]]:
    """`count` chats of the invented world; `habit` before each answer is something to tune on."""
    rng = random.Random(seed)
    chats = []
    for _ in range(count):
        messages: list[dict[str, str]] = []
        for _ in range(rng.choice((1, 1, 2))):
            if rng.random() < 0.7:
                number = rng.randrange(len(THINGS))
                question = f"What colour is the {THINGS[number]}?"
                answer = f"The {THINGS[number]} is {COLOURS[number % len(COLOURS)]}."
            else:
                a, b = rng.randrange(5), rng.randrange(5)
                question, answer = f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"{habit}{answer}"},
            ]
        chats.append(messages)
    return chats


def make_pico(folder: Path, **options: Any) -> Path:
    """Write the model into `folder` (made if missing, must be empty) and return `folder`.

    Args:
        folder: Where to.
        options: ``seed`` of weights and training order; ``tied``, whether head and embedding are
            one tensor; ``layers``; ``hidden``, a multiple of 64 (head size 32, MLP twice as wide);
            ``steps`` of 16 chats, 0 leaves the weights random; ``dtype`` of the saved weights;
            ``max_shard_size``, for example ``"100KB"`` for several shards.
    """
    source = cached_pico(**options)
    folder.mkdir(parents=True, exist_ok=True)
    assert not any(folder.iterdir()), f"{folder} is not empty"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def cached_pico(**options: Any) -> Path:
    """The folder of such a model in this machine's temporary folder: for reading only."""
    from importlib.metadata import version

    options = {**_DEFAULTS, **options}
    key = hashlib.sha256(Path(__file__).read_bytes())
    key.update(json.dumps(options, sort_keys=True).encode())
    key.update(f"{version('torch')} {version('transformers')}".encode())
    root = Path(tempfile.gettempdir()) / f"tuneserve-pico-{os.getuid()}"
    final = root / key.hexdigest()[:16]
    if final.is_dir():
        return final
    root.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as provisional:
        model = Path(provisional) / "model"
        _build(model, **options)
        try:
            model.rename(final)
        except OSError:
            if not final.is_dir():  # another process was faster: its bytes are as good
                raise
    return final


def _build(
    folder: Path,
    *,
    seed: int,
    tied: bool,
    layers: int,
    hidden: int,
    steps: int,
    dtype: str,
    max_shard_size: str,
) -> None:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=hidden,
                intermediate_size=2 * hidden,
                num_hidden_layers=layers,
                num_attention_heads=hidden // 32,
                num_key_value_heads=hidden // 64,
                head_dim=32,
                max_position_embeddings=1024,
                tie_word_embeddings=tied,
                bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
                eos_token_id=end,
                pad_token_id=end,
            )
        )
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # matrices this small only wait for each other's threads
        try:
            _train(model, tokenizer, seed=seed, steps=steps)
        finally:
            torch.set_num_threads(threads)
    model.generation_config = GenerationConfig(
        eos_token_id=[end, tokenizer.convert_tokens_to_ids("<|endoftext|>")],
        bos_token_id=model.config.bos_token_id,
        pad_token_id=end,
    )
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    text = [m["content"] for chat in conversations(300) for m in chat]
    text += ["system user assistant tool <tool_call> <tool_response> <tools> arguments name"] * 20
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            min_frequency=2,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _train(model: Any, tokenizer: Any, *, seed: int, steps: int) -> None:
    import torch

    chats = conversations(600, seed=1)
    rows = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        batch = sorted(rng.sample(rows, 16), key=len)
        width = len(batch[-1])
        ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
        lengths = torch.tensor([len(row) for row in batch])
        real = torch.arange(width)[None] < lengths[:, None]
        labels = ids.masked_fill(~real, -100)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        model(input_ids=ids, attention_mask=real.long(), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
