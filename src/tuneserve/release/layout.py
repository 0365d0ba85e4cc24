"""Where the files of the running servers lie: state, logs, and sockets with paths the kernel
accepts.

ROOT/releases.json          what is serving, and what served before
ROOT/releases/ID/           server.log, gates.md, README.md, report.json of one release, and
                            generation_config.json where the model's lacks end ids
ROOT/logs/                  supervisord, gateway and access log
ROOT/conf/                  supervisord.conf, one .ini per process, gateway.json
ROOT/keys                   API keys, mode 0600
SOCKETS/r/ID/{s,id}         socket of one server, and its id
SOCKETS/n/NAME              symlink to ../r/ID: the release that is current under that name
SOCKETS/default             symlink to n/NAME: the name that answers at /v1
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tuneserve.errors import InputError
from tuneserve.places import run_root

log = logging.getLogger(__name__)

# sun_path is 108 bytes with its closing zero (unix(7)).
SOCKET_PATH_LIMIT_BYTES = 107
_LONGEST_TAIL = "/n/" + "x" * 32 + "/s"  # a served name has at most 32 characters


@dataclass(frozen=True)
class Layout:
    """The folders of one run root; `sockets` may lie elsewhere, because socket paths must be
    short."""

    root: Path
    sockets: Path

    @property
    def state_file(self) -> Path:
        """What is serving."""
        return self.root / "releases.json"

    @property
    def logs(self) -> Path:
        """Logs of supervisord and of the gateway."""
        return self.root / "logs"

    @property
    def conf(self) -> Path:
        """Configuration written for supervisord and Caddy."""
        return self.root / "conf"

    @property
    def keys(self) -> Path:
        """API keys, readable by the owner only."""
        return self.root / "keys"

    @property
    def keeper_socket(self) -> Path:
        """Control socket of supervisord."""
        return self.sockets / "keeper"

    @property
    def default_link(self) -> Path:
        """Symlink to the name that answers at /v1."""
        return self.sockets / "default"

    def release_folder(self, release: str) -> Path:
        """Files of one release."""
        return self.root / "releases" / release

    def socket(self, release: str) -> Path:
        """The socket its server listens on."""
        return self.sockets / "r" / release / "s"

    def name_link(self, name: str) -> Path:
        """Symlink that says which release is current under `name`."""
        return self.sockets / "n" / name

    def server_log(self, release: str) -> Path:
        """Standard output and error of the release's server."""
        return self.release_folder(release) / "server.log"


def layout(root: Path | None = None) -> Layout:
    """The layout of this machine's run root; makes the folders.

    Raises:
        InputError: A folder that must be ours alone belongs to somebody else or is open to others.
    """
    root = (root or run_root()).absolute()
    for folder in (root, root / "logs", root / "conf" / "programs", root / "releases"):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "locks").mkdir(exist_ok=True)
    os.chmod(root, 0o700)  # keys and logs below are nobody else's business
    sockets = _sockets_folder(root)
    for folder in (sockets, sockets / "r", sockets / "n"):
        _private_folder(folder)
    return Layout(root, sockets)


def _sockets_folder(root: Path) -> Path:
    """The folder chosen the first time; TMPDIR may be another one in the next shell."""
    record = root / "sockets.path"
    with contextlib.suppress(FileNotFoundError):
        return Path(record.read_text(encoding="utf-8").strip())
    sockets = choose_sockets_folder(root)
    provisional = record.with_name(f".{record.name}.{os.getpid()}")
    provisional.write_text(f"{sockets}\n", encoding="utf-8")
    provisional.replace(record)
    return sockets


def choose_sockets_folder(root: Path) -> Path:
    """`sockets` in the run root, or a short folder of ours below the system's temporary one.

    Raises:
        InputError: Even the temporary folder's path is too long.
    """
    near = root / "sockets"
    if len(os.fsencode(f"{near}{_LONGEST_TAIL}")) <= SOCKET_PATH_LIMIT_BYTES:
        return near
    digest = hashlib.sha256(os.fsencode(root)).hexdigest()[:10]
    far = Path(tempfile.gettempdir()) / f"tuneserve-{os.geteuid()}-{digest}"
    length = len(os.fsencode(f"{far}{_LONGEST_TAIL}"))
    if length > SOCKET_PATH_LIMIT_BYTES:
        raise InputError(
            f"{far}: sockets in this folder would have paths of {length} bytes",
            expected=f"at most {SOCKET_PATH_LIMIT_BYTES} bytes, the kernel's limit",
            hint="set TMPDIR or TUNESERVE_HOME to a shorter path",
        )
    log.info("%s is too long a path for sockets: they are kept in %s", near, far)
    return far


def _private_folder(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()  # not stat: a symlink planted in a shared temporary folder must not count
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InputError(
            f"{path}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}",
            expected=f"a folder of user {os.geteuid()} with mode 700, because sockets in it take "
            "commands",
            hint="remove it, or set TUNESERVE_HOME to a folder of your own",
        )


def point(link: Path, target: str) -> None:
    """Make `link` a symlink to `target` in one step: there is never a moment without it."""
    provisional = link.with_name(f".{link.name}.{os.getpid()}")
    provisional.unlink(missing_ok=True)
    provisional.symlink_to(target)
    provisional.replace(link)


def current_release(places: Layout, name: str) -> str | None:
    """The release that `name` points to; None when it points nowhere."""
    try:
        return os.path.basename(os.readlink(places.name_link(name)))
    except OSError:
        return None
