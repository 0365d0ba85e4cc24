"""Which TUNESERVE_HOME is which: moved, copied, in other containers and on other machines."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from gc_house import House
from tuneserve.artifacts import Store
from tuneserve.errors import InputError
from tuneserve.gc import survey
from tuneserve.homes import home_id


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    return House(tmp_path)


def copied(house: House, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the home as `cp -a` makes one; it is the TUNESERVE_HOME then."""
    copy = house.home.parent / name
    shutil.copytree(house.home, copy, symlinks=True)
    monkeypatch.setenv("TUNESERVE_HOME", str(copy))
    return copy


def forget_uses(house: House) -> None:
    for path in house.store.root.glob(".used/*"):
        os.utime(path, (0, 0))


def test_a_copied_home_is_another_than_its_original(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = house.chain("old"), house.chain("new")
    house.releases("r1", r1=old[-1])
    house.store.note_use(old[-1])
    copy = copied(house, "copy", monkeypatch)
    assert home_id(copy) == ""
    house.releases("r2", r2=new[-1])  # the original goes on, and the copy stays with r1
    forget_uses(house)
    wanted = {*old, *new}
    assert set(survey(house.store, keep_days=14).kept) == wanted, "from the copy, before it ran"
    house.store.note_use(old[-1])
    house.store.note_use(old[-1])
    assert caplog.messages == [m for m in caplog.messages if f"{copy} is a copy of" in m]
    assert len(caplog.messages) == 1 and str(house.home) in caplog.text
    assert home_id(copy) not in ("", home_id(house.home))
    forget_uses(house)
    for place in (copy, house.home, house.home.parent / "third"):
        monkeypatch.setenv("TUNESERVE_HOME", str(place))
        assert set(survey(house.store, keep_days=14).kept) == wanted, place
    assert len(list(house.store.root.glob(".users/*"))) == 2


def test_a_copy_of_a_moved_home_is_another_too(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.chain("a")
    house.store.note_use()
    first = home_id(house.home)
    moved = house.home.rename(house.home.parent / "moved")
    house.home = moved
    copy = copied(house, "copy", monkeypatch)
    house.store.note_use()
    monkeypatch.setenv("TUNESERVE_HOME", str(moved))
    house.store.note_use()
    assert home_id(moved) == first != home_id(copy) != ""
    notes = {p.name: p.read_text() for p in house.store.root.glob(".users/*")}
    assert notes == {home_id(home): f"{socket.gethostname()}\n{home}\n" for home in (moved, copy)}


@pytest.mark.parametrize(
    ("what", "same"),
    [
        ("seen through a link", True),
        ("in another container", True),
        ("in another container, numbered anew", True),
        ("with another owner, in another container", True),
        ("restored in its place", True),
        ("of an older version", True),
        ("copied to another host", False),
        ("a snapshot", False),
    ],
)
def test_when_a_home_is_the_same(
    house: House, what: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, place = home_id(house.home, make=True), house.home
    note, where = place / "home-id", place / "home-place"
    if what == "seen through a link":
        place = house.home.parent / "link"
        place.symlink_to(house.home)
    elif "in another container" in what:
        monkeypatch.setattr(socket, "gethostname", lambda: "8f3c2b")
        if "anew" in what:  # as after a restart under gVisor, or on FUSE
            inode = str(note.stat().st_ino)
            where.write_text(where.read_text().replace(f"\n{inode}\n", "\n1\n"))
        if "owner" in what:  # as Kubernetes gives it to a group
            note.chmod(0o600)
    elif what == "of an older version":
        where.unlink()
    elif what == "a snapshot":  # with its inodes, at another path
        place = copied(house, "snapshot", monkeypatch)
        found = (place / "home-id").stat()
        lines = [*where.read_text().splitlines()[:2], str(found.st_ino), str(found.st_ctime_ns)]
        (place / "home-place").write_text("\n".join(lines))
    else:
        copy = copied(house, "copy", monkeypatch)
        shutil.rmtree(house.home)
        copy.rename(house.home)
        if what == "copied to another host":
            monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert (home_id(place) == first) == same
    settled = home_id(place, make=True)
    assert (settled == first) == same and settled
    assert home_id(place) == home_id(place, make=True) == settled


def test_a_home_with_its_store_goes_to_another_machine(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What used the original store is no matter to the copy of it, which nobody else uses."""
    house.store = Store(house.home / "store")
    old, new = house.chain("old"), house.chain("new")
    house.releases("r1", r1=new[-1])
    house.store.note_use(*old)
    forget_uses(house)
    copied(house, "copy", monkeypatch)
    shutil.rmtree(house.home)
    monkeypatch.setattr(socket, "gethostname", lambda: "the-new-one")
    house.store = Store(tmp_path / "copy" / "store")
    with pytest.raises(InputError, match="cannot be seen here"):
        survey(house.store, keep_days=14)
    house.store.note_use()
    assert set(survey(house.store, keep_days=14).artifacts) == set(old)
    (house.store.root / ".users" / "another").write_text("its-host\n/its/home\n")
    house.store.note_use()
    with pytest.raises(InputError, match="used from /its/home on its-host"):
        survey(house.store, keep_days=14)
