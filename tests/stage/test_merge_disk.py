"""Full disks: found before a byte is written, or on the way; what is left then."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from merge_house import disk_of, make_adapter, make_base, weights
from tuneserve.errors import DiskFull
from tuneserve.merge import merge_adapter
from tuneserve.merge.journal import JOURNAL_NAME
from tuneserve.merge.proof import verify


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = make_base(tmp_path / "base")
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = make_adapter(tmp_path / "adapter")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def test_a_small_disk_is_seen_before_a_byte_is_written(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    with disk_of(tmp_path / "disk", 700) as disk:
        with pytest.raises(DiskFull, match="bytes\\) needed") as caught:
            merge_adapter(base, adapter, disk / "out", sample=False)
        assert caught.value.exit_status == 3
        assert caught.value.details["needed_bytes"] > caught.value.details["free_bytes"]
        assert names(disk / "out") == [JOURNAL_NAME]


def check_full(error: DiskFull, base: Path, out: Path) -> None:
    """Exit 3, the bytes needed, and nothing left but the journal and finished shards."""
    assert error.exit_status == 3
    weights_bytes = sum(p.stat().st_size for p in base.glob("*.safetensors"))
    assert weights_bytes < error.details["needed_bytes"] < weights_bytes + 10 * 2**20
    assert f"{error.details['needed_bytes']} bytes" in str(error)
    assert not out.exists() or set(names(out)) <= {JOURNAL_NAME, *finished(out)}


def finished(out: Path) -> list[str]:
    """Shards that the journal tells of."""
    path = out / JOURNAL_NAME
    lines = path.read_text().splitlines(keepends=True)[1:] if path.exists() else []
    return [json.loads(line)["shard"] for line in lines if line.endswith("\n")]


SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_a_disk_that_fills_up_midway_leaves_the_journal_or_every_shard(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disks of every size up to the one that suffices: it fills up at every step once."""
    monkeypatch.setattr("tuneserve.merge.run.check_room", lambda *_: None)
    merge_adapter(base, adapter, tmp_path / "whole", sample=False)
    blocks = sum(-(-len(data) // 4096) for data in weights(tmp_path / "whole").values())
    failed, left = 0, []
    with disk_of(tmp_path / "disk", 4) as disk:
        for pages in [*range(1, 8), blocks // 3, blocks // 2, *range(blocks - 8, blocks + 12)]:
            os.system(f"mount -o remount,size={4 * pages}k {disk}")  # noqa: S605
            try:
                merge_adapter(base, adapter, disk / "out", sample=False)
            except DiskFull as error:
                check_full(error, base, disk / "out")
                shards = set(names(disk / "out")) - {JOURNAL_NAME}
                assert shards in (set(), set(SHARDS))  # all, where a small file found no room
                left.append(len(shards))
                failed += 1
        assert set(left) == {0, 3}
        verify(disk / "out")
    assert failed >= 15


class FailingOnce:
    """A call that finds no room after it was made `after` times, and then works again."""

    def __init__(self, real: Callable[..., Any], after: int) -> None:
        self.real, self.after, self.made = real, after, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.made += 1
        if self.made == self.after + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
        return self.real(*args, **kwargs)


@pytest.mark.parametrize(("call", "at_least"), [("fsync", 15), ("write", 4), ("mkdir", 2)])
def test_no_room_at_any_call_is_said_and_given_back(
    call: str,
    at_least: int,
    base: Path,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every single call of each kind fails once: the journal's, the shards', the proof's. The disk
    has room for the rest, so what is finished stays.
    """
    merge_adapter(base, adapter, tmp_path / "whole", sample=False)
    expected, refused = weights(tmp_path / "whole"), 0
    for number in itertools.count():
        out = tmp_path / f"out-{number}"
        with monkeypatch.context() as patch:
            failing = FailingOnce(getattr(os, call), number)
            patch.setattr(os, call, failing)
            try:
                merge_adapter(base, adapter, out, sample=False)
            except DiskFull as error:
                check_full(error, base, out)
                refused += 1
        if failing.made <= number:
            break
        merge_adapter(base, adapter, out, sample=False)  # the journal is no obstacle afterwards
        assert weights(out) == expected
    assert refused >= at_least


def test_a_journal_line_written_in_parts_is_whole(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nearly full disk takes some bytes of a line and no error: the rest must follow."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:7]))

    def stop(done: int, total: int) -> None:
        if (tmp_path / "out" / "model-00002-of-00003.safetensors").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_adapter(base, adapter, tmp_path / "out", sample=False, progress=stop)
    lines = (tmp_path / "out" / JOURNAL_NAME).read_text().splitlines()
    finished = [json.loads(line)["shard"] for line in lines[1:]]
    assert finished == ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]


def test_another_disk_that_is_full_costs_no_finished_shard(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    """Where the progress goes, say; also of an attempt before."""
    out = tmp_path / "out"
    log = tmp_path / "log" / "progress"

    def stop_after(count: int, error: BaseException) -> Callable[[int, int], None]:
        def say(done: int, total: int) -> None:
            if (out / SHARDS[count - 1]).exists():
                raise error

        return say

    with pytest.raises(KeyboardInterrupt):
        merge_adapter(base, adapter, out, sample=False, progress=stop_after(1, KeyboardInterrupt()))
    kept = {name: (out / name).stat().st_ino for name in finished(out)}
    assert list(kept) == SHARDS[:1]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(log))
    with pytest.raises(DiskFull, match=f"no room left for {log}") as caught:
        merge_adapter(base, adapter, out, sample=False, progress=stop_after(2, full))
    assert "on another disk" in caught.value.hint
    assert names(out) == [JOURNAL_NAME, *SHARDS[:2]]
    result = merge_adapter(base, adapter, out, sample=False)
    assert {name: (out / name).stat().st_ino for name in kept} == kept
    assert result.bytes_written == (out / SHARDS[2]).stat().st_size
