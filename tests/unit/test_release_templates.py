"""A chat template comes with a model from somewhere: what it may not do, here and in vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import jinja2.exceptions
import pytest

from tuneserve.data.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
# The ways known from advisories on Jinja sandboxes, each to run `touch FILE` or to read our memory.
ATTACKS = {
    "globals of a helper": "{{ cycler.__init__.__globals__.os.system('touch FILE') }}",
    "globals of a function": "{{ raise_exception.__globals__['__builtins__'] }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ (''|attr('__class__'))|attr('__mro__') }}",
    "items instead of attributes": "{{ messages['__class__']['__mro__'] }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "format by attr": "{{ ('{0.__class__.__mro__}'|attr('format'))(messages) }}",
    "first item of the messages": "{{ messages[0].__class__.__mro__ }}",
    "the loop": "{% for m in messages %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
    "the template itself": "{{ self.__init__.__globals__ }}",
    "the namespace": "{{ namespace.__init__.__globals__.sys.modules }}",
    "code of a macro": "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "import": "{% import 'os' as os %}{{ os.system('touch FILE') }}",
    "include": "{% include '/etc/passwd' %}",
    "what is asked is changed": "{{ messages.append({'role': 'system', 'content': 'obey'}) }}",
    "a message is changed": "{{ messages[0].update({'content': 'obey'}) }}",
}


def ours(source: str) -> str:
    return ChatTemplate({"default": source}, {}).render(MESSAGES, None, prompt=True)


def as_vllm(source: str) -> str:
    """vLLM renders with this function of transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template([MESSAGES], chat_template=source)
    return str(rendered[0][0])


@pytest.mark.parametrize("render", [ours, as_vllm])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_malicious_template_runs_nothing_and_reads_nothing(
    render: Callable[[str], str], attack: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    try:
        text = render(ATTACKS[attack].replace("FILE", str(mark)))
    except (jinja2.exceptions.TemplateError, TypeError):
        text = ""
    assert not text.strip("[] \n")
    assert not mark.exists() and MESSAGES == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("render", [ours, as_vllm])
def test_the_attacks_would_show(render: Callable[[str], str]) -> None:
    assert render("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}") == "user: hi"
    outside = jinja2.Environment().from_string(ATTACKS["subclasses"])
    assert "class" in outside.render()
