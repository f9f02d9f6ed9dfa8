"""Ways in which a script changes files of its user's, in a folder that has some."""

import bz2
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch


def make_files(folder):
    """The files of a user."""
    (folder / "old" / "deep").mkdir(parents=True)
    for name in ("best.pt", "last.pt", "previous.pt", "log.txt", "old/a", "old/deep/b"):
        (folder / name).write_text(f"the user's {name}")
    (folder / "latest").symlink_to("old")
    (folder / "link.txt").symlink_to("log.txt")


def files_of(folder):
    """All that is to be known of a folder's files."""
    known = {}
    for path in folder.rglob("*"):
        entry = path.lstat()
        content = os.readlink(path) if path.is_symlink() else None
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes(), entry.st_mtime_ns
        known[str(path.relative_to(folder))] = entry.st_mode, entry.st_ino, content
    return known


def text(name):
    return Path(name).read_text()


def names(folder="."):
    return sorted(os.listdir(folder))


def write(name, mode, content="!"):
    with open(name, mode) as file:
        file.write(content)


def write_by_os(name, flags):
    file = os.open(name, flags)
    os.write(file, b"!")
    os.close(file)


def save_as_best():
    if os.path.exists("best.pt"):
        os.remove("best.pt")
    torch.save({"epoch": 1}, "best.pt")


def replace_at_once():
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
        json.dump([1], file)
    os.replace(file.name, "last.pt")


def copy_a_temporary_file():
    with tempfile.NamedTemporaryFile("w", dir="old") as file:
        file.write("!")
        file.flush()
        shutil.copy(file.name, "old/a")


def change_mapped_array():
    np.memmap("last.pt", dtype="u1", mode="r+")[:3] = ord("!")


def compress():
    with bz2.open("last.pt", "wt") as file:
        file.write("!")


def uncompressed(name):
    with bz2.open(name, "rt") as file:
        return str(file.read())


def rename_and_append():
    os.rename("last.pt", "new.pt")
    write("new.pt", "a")


def remove_and_make_again():
    shutil.rmtree("old")
    os.makedirs("old/new")


def link_and_append():
    os.link("log.txt", "same.txt")
    write("same.txt", "a")


def link_elsewhere():
    os.unlink("latest")
    os.symlink("old/deep", "latest")


def write_in_another_folder():
    os.chdir("old")
    write("a", "a")
    os.chdir("..")


def is_the_working_directory(folder):
    before = os.getcwd()
    os.chdir(folder)
    here = os.getcwd()
    os.chdir("..")
    return here == os.path.join(before, folder) and os.getcwd() == before


def make_folders_that_are_there():
    os.makedirs("old", exist_ok=True)
    os.makedirs("old/deep", exist_ok=True)
    write("old/deep/b", "a")


def rename_nested_folders():
    os.rename("old", "older")
    os.rename("older/deep", "older/deeper")
    write("older/deeper/b", "a")


# By name: what a script does, and what it sees afterwards.
WRITES = {
    "open": (lambda: write("log.txt", "w"), lambda: text("log.txt"), "!"),
    "append": (
        lambda: write("log.txt", "a"),
        lambda: text("log.txt"),
        "the user's log.txt!",
    ),
    "read and write": (
        lambda: write("log.txt", "r+", "THE"),
        lambda: text("link.txt"),
        "THE user's log.txt",
    ),
    "through a link": (lambda: write("link.txt", "w"), lambda: text("log.txt"), "!"),
    "through a linked folder": (
        lambda: write("latest/a", "w"),
        lambda: text("old/a"),
        "!",
    ),
    "os.open": (
        lambda: write_by_os("log.txt", os.O_WRONLY | os.O_TRUNC),
        lambda: text("log.txt"),
        "!",
    ),
    "os.open to append": (
        lambda: write_by_os("log.txt", os.O_WRONLY | os.O_APPEND),
        lambda: text("log.txt"),
        "the user's log.txt!",
    ),
    "pathlib": (lambda: Path("log.txt").write_text("!"), lambda: text("log.txt"), "!"),
    "torch.save": (
        lambda: torch.save([1], "best.pt"),
        lambda: torch.load("best.pt"),
        [1],
    ),
    "remove and torch.save": (
        save_as_best,
        lambda: torch.load("best.pt"),
        {"epoch": 1},
    ),
    "numpy's text": (
        lambda: np.savetxt("log.txt", [1.0]),
        lambda: (float(np.loadtxt("log.txt")), float(np.genfromtxt("log.txt"))),
        (1, 1),
    ),
    "a temporary file": (
        copy_a_temporary_file,
        lambda: (text("old/a"), names("old")),
        ("!", ["a", "deep"]),
    ),
    "a mapped array": (
        change_mapped_array,
        lambda: text("last.pt"),
        "!!! user's last.pt",
    ),
    "bz2": (compress, lambda: uncompressed("last.pt"), "!"),
    "remove": (lambda: os.remove("best.pt"), lambda: "best.pt" in names(), False),
    "unlink": (
        lambda: Path("best.pt").unlink(),
        lambda: Path("best.pt").exists(),
        False,
    ),
    "unlink a link": (lambda: os.unlink("latest"), lambda: names("old"), ["a", "deep"]),
    "rename": (
        lambda: os.rename("last.pt", "previous.pt"),
        lambda: (text("previous.pt"), os.path.lexists("last.pt")),
        ("the user's last.pt", False),
    ),
    "rename and append": (
        rename_and_append,
        lambda: (text("new.pt"), os.path.exists("last.pt")),
        ("the user's last.pt!", False),
    ),
    "rename a folder": (
        lambda: os.rename("old", "older"),
        lambda: ([*os.walk("older")], os.path.exists("latest/a")),
        ([("older", ["deep"], ["a"]), ("older/deep", [], ["b"])], False),
    ),
    "replace": (replace_at_once, lambda: text("last.pt"), "[1]"),
    "move into a folder": (
        lambda: shutil.move("last.pt", "old"),
        lambda: (text("latest/last.pt"), os.path.exists("last.pt")),
        ("the user's last.pt", False),
    ),
    "copy": (
        lambda: shutil.copy("last.pt", "best.pt"),
        lambda: text("best.pt"),
        "the user's last.pt",
    ),
    "copy a tree": (
        lambda: shutil.copytree(
            ".", "old/copy", symlinks=True, ignore=lambda *_: ["old"]
        ),
        lambda: (text("old/copy/link.txt"), os.readlink("old/copy/latest")),
        ("the user's log.txt", "old"),
    ),
    "rmtree": (
        lambda: shutil.rmtree("old"),
        lambda: (sorted(Path().glob("o*")), os.path.exists("latest")),
        ([], False),
    ),
    "rmtree and mkdir": (
        remove_and_make_again,
        lambda: names("latest"),
        ["new"],
    ),
    "makedirs of folders that are there": (
        make_folders_that_are_there,
        lambda: (text("latest/deep/b"), [*os.walk("old")]),
        ("the user's old/deep/b!", [("old", ["deep"], ["a"]), ("old/deep", [], ["b"])]),
    ),
    "rename nested folders": (
        rename_nested_folders,
        lambda: (text("older/deeper/b"), [*os.walk("older")]),
        (
            "the user's old/deep/b!",
            [("older", ["deeper"], ["a"]), ("older/deeper", [], ["b"])],
        ),
    ),
    "truncate": (lambda: os.truncate("log.txt", 3), lambda: text("log.txt"), "the"),
    "hard link": (
        link_and_append,
        lambda: text("log.txt"),
        "the user's log.txt!",
    ),
    "symlink": (
        link_elsewhere,
        lambda: names("latest"),
        ["b"],
    ),
    "chmod": (
        lambda: os.chmod("log.txt", 0o600),
        lambda: os.stat("log.txt").st_mode & 0o777,
        0o600,
    ),
    "utime": (
        lambda: os.utime("log.txt", (1, 1)),
        lambda: os.stat("log.txt").st_mtime,
        1,
    ),
    "in a new working directory": (
        lambda: os.mkdir("new"),
        lambda: is_the_working_directory("new"),
        True,
    ),
    "in another working directory": (
        write_in_another_folder,
        lambda: (text("old/a"), Path.cwd() == Path().resolve()),
        ("the user's old/a!", True),
    ),
}
