"""Redirects what a script writes to a scratch folder; the user's files do not change.

`any_loop.py` runs scripts in `changing_all_in`, and `doctor.py` the runs of a trial. It
replaces the functions of Python and torch that take a path. Each replacement asks a
`Scratch` where the path is. `confinement.py` refuses the writes that bypass them.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from os import readlink, stat  # the originals, which are not replaced here
from types import ModuleType
from typing import Any
from unittest import mock

from determined_amp.amp.patched import patched
from determined_amp.check.confinement import confine

# The environment variables that switch loggers and hubs off.
_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_OFFLINE": "1",
}

# Paths that are not redirected, because they are no files on a disk.
_DEVICES = ("/dev/", "/proc/", "/sys/")
# The folders of caches, which stay writable.
_CACHES = (
    *("~/.cache", "$XDG_CACHE_HOME", "$TORCH_HOME", "$HF_HOME"),
    *("~/.triton", "$TRITON_CACHE_DIR", "~/.nv"),
)
# The name of a shadow: the folder that stands for one of the user's folders.
_SHADOW = ".determined_amp"

# The functions that are replaced. A row has their module, the method of `Scratch` that
# finds their paths, the positions of the arguments that are paths, and their names.
_CALLS = """
    os                 look          0    stat access chdir statvfs getxattr listxattr
    os                 look_at_link  0    lstat
    os                 read_link     0    readlink
    os                 make          0    mkdir mkfifo
    os                 make          1    symlink
    os                 name          0    rmdir remove unlink
    os                 name          0,1  rename replace
    os                 change        0    truncate chmod chown utime setxattr
    os                 change        0    removexattr
    os                 change        0,1  link
    torch              renew         1    save
    safetensors.torch  renew         1    save_file save_model
    safetensors.torch  look          0    load_file
    safetensors.torch  look          1    load_model
"""
_NAMES = ("path", "src", "dst", "f", "filename")  # keyword arguments that are paths
# With one of these arguments, a path is relative to an open folder.
_BESIDE = ("dir_fd", "src_dir_fd", "dst_dir_fd")
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# A program that removes a scratch folder when no process holds its lock any more. The
# examined process cannot do that, because it may be killed or confined.
_REMOVE = """
import fcntl, os, shutil, sys
os.setsid()
os.closerange(0, 3)
with open(sys.argv[1] + "/lock") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    shutil.rmtree(sys.argv[1])
"""

Call = Callable[..., Any]
Find = Callable[[str], str]  # finds where a path is


def folder_of_launch() -> str:
    """Make a scratch folder for this process and the other ranks of its launcher.

    It is removed when the last of them has ended.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        name = f"determined_amp-{os.getppid()}"
        folder = os.path.join(tempfile.gettempdir(), name)
        os.makedirs(folder, mode=0o700, exist_ok=True)
    else:
        folder = tempfile.mkdtemp(prefix="determined_amp-")
    # The kernel releases the lock when this process and its forks have ended.
    lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)

    remove = [sys.executable, "-I", "-S", "-c", _REMOVE, folder]
    os.posix_spawn(sys.executable, remove, os.environ)
    return folder


@contextmanager
def changing_all_in(folder: str) -> Iterator[Scratch]:
    """Redirect the changes in this block to a folder, and refuse all others.

    Others are refused until the process ends.
    """
    scratch = Scratch(folder)
    confine(scratch.writable)
    with changing_only(scratch):
        yield scratch


@contextmanager
def changing_only(scratch: Scratch) -> Iterator[None]:
    """Redirect what Python changes by a path in this block to a scratch folder.

    What has changed is also read there.
    """
    temporary = os.path.join(scratch.folder, "tmp")
    os.makedirs(temporary, exist_ok=True)
    folders = {"MLFLOW_TRACKING_URI": f"file:{temporary}", "TMPDIR": temporary}
    calls = {id(own): call for own, call in _calls(scratch)}
    able = {calls.get(id(own), own) for own in os.supports_follow_symlinks}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {**_OFF, **folders}))
        stack.enter_context(patched(tempfile, "tempdir", temporary))
        stack.enter_context(patched(os, "supports_follow_symlinks", able))
        # Otherwise `rmtree` removes by open folders, without a path.
        stack.enter_context(patched(shutil, "_use_fd_functions", False))
        for owner in _owners():
            for name, value in [*vars(owner).items()]:
                if id(value) in calls:
                    stack.enter_context(patched(owner, name, calls[id(value)]))
        for method in vars(vars(tempfile)["_TemporaryFileCloser"]).values():
            if kept := getattr(method, "__defaults__", None):
                given = tuple(calls.get(id(each), each) for each in kept)
                stack.enter_context(mock.patch.object(method, "__defaults__", given))
        numpy = sys.modules.get("numpy.lib._datasource")
        if openers := getattr(numpy, "_file_openers", None):
            by_suffix = openers._file_openers  # numpy may add more of them
            stack.callback(by_suffix.update, dict(by_suffix))
            for suffix, each in by_suffix.items():
                by_suffix[suffix] = calls.get(id(each), each)
        stack.callback(scratch.close)
        yield


def _owners() -> list[Any]:
    """All modules and classes that may hold one of the replaced functions."""
    # Python's own import system needs the first two.
    left = ("posix", "_io", __name__)
    known = {name: each for name, each in sys.modules.items() if name not in left}
    modules = [each for each in known.values() if isinstance(each, ModuleType)]
    return [*modules, getattr(pathlib, "_NormalAccessor", os)]  # Python 3.10 has it


def _calls(scratch: Scratch) -> Iterator[tuple[Call, Call]]:
    """Yield each function that takes a path, with its replacement."""
    for row in _CALLS.strip().splitlines():
        module, method, at, *names = row.split()
        find, places = getattr(scratch, method), [*map(int, at.split(","))]
        with suppress(ImportError):
            owner = importlib.import_module(module)
            for own in [getattr(owner, each) for each in names if hasattr(owner, each)]:
                yield own, partial(_call, scratch, find, places, own)
    yield os.getcwd, partial(_getcwd, scratch, os.getcwd)
    yield os.open, partial(_open, scratch, os.open)
    yield open, partial(open, opener=partial(_open, scratch, os.open, mode=0o666))
    for own in (os.listdir, os.scandir):
        yield own, partial(_list, scratch, own)


def _call(
    scratch: Scratch,
    find: Find,
    places: Sequence[int],
    own: Call,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function with its paths redirected.

    Args:
        scratch: The scratch folder.
        find: The method of `scratch` that finds a path for this function.
        places: The positions of the arguments that are paths.
        own: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    if any(kwargs.get(name) is not None for name in _BESIDE):
        return own(*args, **kwargs)
    if kwargs.get("follow_symlinks") is False:
        find = scratch.look_at_link if find == scratch.look else scratch.name
    found = partial(scratch.find, find)
    given = [found(arg) if at in places else arg for at, arg in enumerate(args)]
    named = {name: found(kwargs[name]) for name in kwargs.keys() & _NAMES}
    try:
        return own(*given, **{**kwargs, **named})
    except OSError as error:
        for at in places[: len(given)]:  # the error names the path that the user gave
            if error.filename == given[at]:
                error.filename = args[at]
        raise


def _open(
    scratch: Scratch, own: Call, path: Any, flags: int, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `os.open`, which the replacement of `open` calls, too."""
    find: Find = scratch.look
    if flags & _TO_WRITE:
        find = scratch.renew if flags & os.O_TRUNC else scratch.change
    return _call(scratch, find, (0,), own, path, flags, *args, **kwargs)


def _list(scratch: Scratch, own: Call, path: Any = ".") -> Any:
    """Replaces `os.listdir` and `os.scandir`."""
    return _call(scratch, scratch.look_into, (0,), own, path)


def _getcwd(scratch: Scratch, own: Callable[[], str]) -> str:
    """Replaces `os.getcwd`: returns the path that the user knows."""
    folder, is_in_scratch, place = own().partition(f"{scratch.folder}/files/")
    shown = f"/{place}/".replace(f"/{_SHADOW}/", "/").rstrip("/")
    return shown if is_in_scratch else folder


class _Local(threading.local):
    """The state of one thread.

    Attributes:
        is_busy: Whether the thread is finding a path. Its calls are not redirected
            then.
    """

    is_busy = False


class Scratch:
    """A folder in front of the user's files, which gets all changes.

    When something changes in one of the user's folders, that folder gets a shadow. The
    shadow is in the scratch folder. It has a link to each file of the user's folder,
    and a folder with a link for each subfolder. From then on, paths lead into the
    shadow. A file that is written replaces its link, and the link of a file that is
    removed goes. Everything is on the disk, so several processes can share it.

    Args:
        folder: The path of the scratch folder.

    Attributes:
        folder: Its path, without links.
        writable: The folders in which files change in place: the scratch folder, and
            the folders of caches, unless the script runs in them.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        caches = [os.path.expanduser(os.path.expandvars(each)) for each in _CACHES]
        known = map(os.path.realpath, (folder, *caches))
        self.writable = [each for each in known if not _is_in(os.getcwd(), each)]
        self._is_open = True
        self._local = _Local()

    def close(self) -> None:
        """Stop redirecting, as a module may have kept a replacement that asks this."""
        self._is_open = False

    @property
    def is_used(self) -> bool:
        """Whether something has changed."""
        return os.path.exists(f"{self.folder}/files")

    def find(self, find: Find, path: Any) -> Any:
        """Where a path of a call is; any other argument is returned as it is.

        Args:
            find: The method of this object that finds the path.
            path: An argument of the call.
        """
        is_path = isinstance(path, (str, bytes, os.PathLike))
        if self._local.is_busy or not (is_path and self._is_open):
            return path
        text = os.fsdecode(path)
        if not text or text.startswith(_DEVICES):
            return path
        self._local.is_busy = True
        try:
            place = find(text)
        finally:
            self._local.is_busy = False
        return os.fsencode(place) if isinstance(path, bytes) else place

    def look(self, path: str, *, follows: bool = True) -> str:
        """Where the file or folder at a path is.

        Args:
            path: The path.
            follows: Whether to follow a link at its end.
        """
        here, known = "/", set[str]()
        parts = os.path.join(os.getcwd(), path).split("/")[::-1]
        while parts:
            part = parts.pop()
            if part == "..":
                here = os.path.dirname(here)
            elif part not in ("", "."):
                place = os.path.join(self._shown(here), part)
                here = _original(place) or place
            target = _target(here) if parts or follows else ""
            if target and here not in known:
                known.add(here)
                parts += os.path.join(os.path.dirname(here), target).split("/")[::-1]
                here = "/"
        return here

    def look_at_link(self, path: str) -> str:
        """Where the file, the folder or the link at a path is."""
        return self.look(path, follows=False)

    def look_into(self, path: str) -> str:
        """Where the entries of a folder are: its shadow, if it has one."""
        return self._shown(self.look(path))

    def read_link(self, path: str) -> str:
        """Where the link at a path is.

        The path may be an entry of `os.scandir`, which lists links that only we made.
        """
        folder, name = os.path.split(path)
        place = os.path.join(self.look_into(folder), name)
        original = _original(place)
        return original if _target(original) else place

    def make(self, path: str) -> str:
        """Where an entry of a folder is made: in the folder's shadow."""
        place = self.look(path, follows=False)
        if any(_is_in(place, each) for each in self.writable):
            return place
        folder, name = os.path.split(path.rstrip("/"))
        return os.path.join(self._shadowed(self.look(folder)), name)

    def name(self, path: str) -> str:
        """Where an entry of a folder is renamed or removed: in the folder's shadow."""
        place = self.make(path)
        mark = f"{place}/{_SHADOW}"
        if _target(mark):
            shadow = self._shadowed(_original(place))
            os.unlink(mark)
            os.rename(shadow, place)
        return place

    def change(self, path: str, *, empty: bool = False) -> str:
        """Where a file is changed: at a copy.

        Args:
            path: The path of the file.
            empty: Whether the copy is an empty file.
        """
        place = self.name(path)
        original = _original(place)
        link = original or place
        target = _target(link)
        if target:
            path = os.path.join(os.path.dirname(link), target)
            return self.change(path, empty=empty)
        if not os.path.isfile(original):
            return link  # no file, or a pipe
        os.unlink(place)
        if empty:
            open(place, "x").close()
        else:
            shutil.copy2(original, place)
        return place

    def renew(self, path: str) -> str:
        """Where a file is written from its beginning."""
        return self.change(path, empty=True)

    def _shadow(self, folder: str) -> str:
        """The path of a folder's shadow."""
        return f"{self.folder}/files{folder}/{_SHADOW}"

    def _shown(self, folder: str) -> str:
        """The shadow of a folder, if it has one, or the folder."""
        try:
            stat(self._shadow(folder))
        except OSError:
            return folder
        return self._shadow(folder)

    def _shadowed(self, folder: str) -> str:
        """The shadow of a folder, which is made if it has none."""
        if _is_in(folder, self.folder) or not os.path.isdir(folder):
            return folder  # no folder, or one that may change
        shadow = self._shadow(folder)
        if not os.path.isdir(shadow):
            made = tempfile.mkdtemp(dir=self.folder)
            for entry in os.scandir(folder):
                link = f"{made}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    os.mkdir(link)
                    link = f"{link}/{_SHADOW}"
                # Two slashes mark our links: a user's link does not begin so.
                os.symlink(f"/{entry.path}", link)
            os.makedirs(os.path.dirname(shadow), exist_ok=True)
            with suppress(OSError):  # another process made it first
                os.rename(made, shadow)
        return shadow


def _is_in(path: str, folder: str) -> bool:
    """Whether a path is a folder or in it."""
    return f"{path}/".startswith(f"{folder}/")


def _original(place: str) -> str:
    """The user's path that an entry of a shadow stands for; empty for other paths."""
    targets = _target(place), _target(f"{place}/{_SHADOW}")
    return next((each[1:] for each in targets if each.startswith("//")), "")


def _target(place: str) -> str:
    """The target of a link; empty if the path is no link."""
    try:
        return readlink(place)
    except OSError:
        return ""
