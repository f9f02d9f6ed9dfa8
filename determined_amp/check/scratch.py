"""Keeps what a script changes away from its user's files."""

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
from os import readlink, stat  # not those that are replaced
from types import ModuleType
from typing import Any
from unittest import mock

from determined_amp.amp.patched import patched
from determined_amp.check.confinement import confine

# Loggers and hubs, switched off by their own variables.
_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_OFFLINE": "1",
}

# What is no file that anybody keeps.
_DEVICES = ("/dev/", "/proc/", "/sys/")
# Folders of caches, which stay writable.
_CACHES = (
    *("~/.cache", "$XDG_CACHE_HOME", "$TORCH_HOME", "$HF_HOME"),
    *("~/.triton", "$TRITON_CACHE_DIR", "~/.nv"),
)
# The folder that is looked into in place of one of the user's.
_SHADOW = ".determined_amp"

# What is called in place of functions: their module, the method of `Scratch` that finds
# their paths, which of their arguments are paths, and their names.
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
_NAMES = ("path", "src", "dst", "f", "filename")  # of arguments that are paths
_BESIDE = ("dir_fd", "src_dir_fd", "dst_dir_fd")  # with these they are not
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# Removes a scratch folder when nobody holds its lock any more, in a program of its own:
# a process that is killed or confined cannot.
_REMOVE = """
import fcntl, os, shutil, sys
os.setsid()
os.closerange(0, 3)
with open(sys.argv[1] + "/lock") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    shutil.rmtree(sys.argv[1])
"""

Call = Callable[..., Any]
Find = Callable[[str], str]  # where a path is


def folder_of_launch() -> str:
    """A folder of this process and of the others of its launcher.

    It is removed when the last of them has ended.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        name = f"determined_amp-{os.getppid()}"
        folder = os.path.join(tempfile.gettempdir(), name)
        os.makedirs(folder, mode=0o700, exist_ok=True)
    else:
        folder = tempfile.mkdtemp(prefix="determined_amp-")
    # It is closed where this process ends, and its forks.
    lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)

    remove = [sys.executable, "-I", "-S", "-c", _REMOVE, folder]
    os.posix_spawn(sys.executable, remove, os.environ)
    return folder


@contextmanager
def changing_all_in(folder: str) -> Iterator[Scratch]:
    """Let what is changed in this block change in a folder, or be refused.

    What is not redirected is refused until the process ends.
    """
    scratch = Scratch(folder)
    confine(scratch.writable)
    with changing_only(scratch):
        yield scratch


@contextmanager
def changing_only(scratch: Scratch) -> Iterator[None]:
    """Let what Python changes by a path in this block change in a scratch folder.

    What is read by a path is read there, too, if it was changed.
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
        # Else `rmtree` removes what is in open folders, without a path.
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
            by_suffix = openers._file_openers  # which may get more of them
            stack.callback(by_suffix.update, dict(by_suffix))
            for suffix, each in by_suffix.items():
                by_suffix[suffix] = calls.get(id(each), each)
        stack.callback(scratch.close)
        yield


def _owners() -> list[Any]:
    """Whatever may have taken a function of Python's or torch's."""
    # By the first two Python imports modules.
    left = ("posix", "_io", __name__)
    known = {name: each for name, each in sys.modules.items() if name not in left}
    modules = [each for each in known.values() if isinstance(each, ModuleType)]
    return [*modules, getattr(pathlib, "_NormalAccessor", os)]  # Python 3.10 has it


def _calls(scratch: Scratch) -> Iterator[tuple[Call, Call]]:
    """The functions that take a path, and what is called in place of each."""
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
    """Call a function, with its paths where a scratch folder has them."""
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
        for at in places[: len(given)]:  # the user knows the path that was asked
            if error.filename == given[at]:
                error.filename = args[at]
        raise


def _open(
    scratch: Scratch, own: Call, path: Any, flags: int, *args: Any, **kwargs: Any
) -> Any:
    """`os.open`, to which `open` comes, too."""
    find: Find = scratch.look
    if flags & _TO_WRITE:
        find = scratch.renew if flags & os.O_TRUNC else scratch.change
    return _call(scratch, find, (0,), own, path, flags, *args, **kwargs)


def _list(scratch: Scratch, own: Call, path: Any = ".") -> Any:
    """`os.listdir` and `os.scandir`."""
    return _call(scratch, scratch.look_into, (0,), own, path)


def _getcwd(scratch: Scratch, own: Callable[[], str]) -> str:
    """`os.getcwd`: the path that the user knows."""
    folder, is_in_scratch, place = own().partition(f"{scratch.folder}/files/")
    shown = f"/{place}/".replace(f"/{_SHADOW}/", "/").rstrip("/")
    return shown if is_in_scratch else folder


class _Local(threading.local):
    """What each thread has of its own."""

    is_busy = False  # with finding a path


class Scratch:
    """A folder that stands before the user's files: what changes, changes in it.

    A folder of the user's in which something changes gets a shadow: a folder with a
    link to each of its files, and a folder with a link for each of its folders. One
    looks into it from then on. A file that is written takes the place of its link, and
    a file that is removed leaves none. All of that is on the disk, so that several
    processes can share it.

    Args:
        folder: Where it is.

    Attributes:
        folder: The same.
        writable: All folders whose files change: it, and those of caches that the
            script does not run in.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        caches = [os.path.expanduser(os.path.expandvars(each)) for each in _CACHES]
        known = map(os.path.realpath, (folder, *caches))
        self.writable = [each for each in known if not _is_in(os.getcwd(), each)]
        self._is_open = True
        self._local = _Local()

    def close(self) -> None:
        """Find no path any more: a module may have kept a function that asks."""
        self._is_open = False

    @property
    def is_used(self) -> bool:
        """Whether something has changed."""
        return os.path.exists(f"{self.folder}/files")

    def find(self, find: Find, path: Any) -> Any:
        """Where a path of a call is; what is none as it is.

        Args:
            find: A method of this object.
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
        """Where a path leads."""
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
        """Where a path leads, when it is asked about a link at its end."""
        return self.look(path, follows=False)

    def look_into(self, path: str) -> str:
        """Where the entries of a folder are."""
        return self._shown(self.look(path))

    def read_link(self, path: str) -> str:
        """Where the link at the end of a path is; `scandir` gives more of them."""
        folder, name = os.path.split(path)
        place = os.path.join(self.look_into(folder), name)
        original = _original(place)
        return original if _target(original) else place

    def make(self, path: str) -> str:
        """Where the name of a path is taken, or can be."""
        place = self.look(path, follows=False)
        if any(_is_in(place, each) for each in self.writable):
            return place
        folder, name = os.path.split(path.rstrip("/"))
        return os.path.join(self._shadowed(self.look(folder)), name)

    def name(self, path: str) -> str:
        """Where the name of a path can change."""
        place = self.make(path)
        mark = f"{place}/{_SHADOW}"
        if _target(mark):
            shadow = self._shadowed(_original(place))
            os.unlink(mark)
            os.rename(shadow, place)
        return place

    def change(self, path: str, *, empty: bool = False) -> str:
        """Where what is at a path can change: a copy, or with `empty` a new file."""
        place = self.name(path)
        original = _original(place)
        link = original or place
        target = _target(link)
        if target:
            path = os.path.join(os.path.dirname(link), target)
            return self.change(path, empty=empty)
        if not os.path.isfile(original):
            return link  # there is none, or it is a pipe
        os.unlink(place)
        if empty:
            open(place, "x").close()
        else:
            shutil.copy2(original, place)
        return place

    def renew(self, path: str) -> str:
        """Where a path can be written anew."""
        return self.change(path, empty=True)

    def _shadow(self, folder: str) -> str:
        return f"{self.folder}/files{folder}/{_SHADOW}"

    def _shown(self, folder: str) -> str:
        """The shadow of a folder, if it has one."""
        try:
            stat(self._shadow(folder))
        except OSError:
            return folder
        return self._shadow(folder)

    def _shadowed(self, folder: str) -> str:
        """The shadow of a folder, which gets one now."""
        if _is_in(folder, self.folder) or not os.path.isdir(folder):
            return folder  # in the scratch folder all can change
        shadow = self._shadow(folder)
        if not os.path.isdir(shadow):
            made = tempfile.mkdtemp(dir=self.folder)
            for entry in os.scandir(folder):
                link = f"{made}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    os.mkdir(link)
                    link = f"{link}/{_SHADOW}"
                # No link of a user's or a script's begins with two slashes.
                os.symlink(f"/{entry.path}", link)
            os.makedirs(os.path.dirname(shadow), exist_ok=True)
            with suppress(OSError):  # another process was the first
                os.rename(made, shadow)
        return shadow


def _is_in(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _original(place: str) -> str:
    """What an entry of a shadow stands for, or nothing."""
    targets = _target(place), _target(f"{place}/{_SHADOW}")
    return next((each[1:] for each in targets if each.startswith("//")), "")


def _target(place: str) -> str:
    """Where a link leads; nothing if it is none."""
    try:
        return readlink(place)
    except OSError:
        return ""
