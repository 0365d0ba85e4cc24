"""The licence of a base, as its files say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuneserve.checkpoint.licence import base_licence

APACHE = (
    "\n                                 Apache License\n                           Version 2.0\n"
)


@pytest.mark.parametrize(
    ("files", "id", "name", "source"),
    [
        ({"README.md": "---\nlicense: Apache-2.0\n---\n# A"}, "apache-2.0", "", "README.md"),
        (
            {
                "README.md": "---\nlicense: other\nlicense_name: qwen-research\n---\n",
                "LICENSE": "x",
            },
            "other",
            "qwen-research",
            "README.md",
        ),
        ({"README.md": "---\nlicense: [mit, apache-2.0]\n---\n"}, "mit, apache-2.0", "", "README"),
        ({"README.md": "# no front matter", "LICENSE": APACHE}, "apache-2.0", "", "LICENSE"),
        (
            {"README.md": "---\nlicense: [broken\n---\n", "LICENSE.txt": "MIT License"},
            "mit",
            "",
            "LICENSE.txt",
        ),
        ({"LICENSE.md": "\n# Lamp License\n..."}, "other", "Lamp License", "LICENSE.md"),
        ({"config.json": "{}"}, "unknown", "", "says nothing"),
    ],
)
def test_what_a_folder_says(
    tmp_path: Path, files: dict[str, str], id: str, name: str, source: str
) -> None:
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    found = base_licence(tmp_path)
    assert (found.id, found.name) == (id, name)
    assert source in found.source
    assert all(found.to_json().values())


def test_the_built_in_model_has_one(tmp_path: Path) -> None:
    assert base_licence(tmp_path, "builtin:smollm2-135m").id == "apache-2.0"
