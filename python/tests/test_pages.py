"""Follows pages by task: writes the files that a page shows, runs its commands, and compares their output."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from running import SOURCE

from bulkhead._private import find_supervisor

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: Seconds for all commands of a page.
LIMIT = 240

#: An environment with the package, which needs neither pip nor the network.
ENVIRONMENT = {
    "python3 -m venv venv": f"{sys.executable} -m venv --without-pip venv",
    "venv/bin/pip install --quiet ../bulkhead/python": f"cp -r {SOURCE}/bulkhead venv/lib/python*/site-packages/",
}

#: Line between the outputs of two commands.
MARK = "-- end of a command --"


@dataclass
class Command:
    """A command of a page, and the output that the page shows."""

    text: str
    output: list[str] = field(default_factory=list)


@dataclass
class File:
    """A file that a page asks to write."""

    name: str
    text: str


def steps(page: str) -> Iterator[Command | File]:
    """Yields files and commands in the order of the page. A file is a block after a line that ends with its name."""
    parts = re.split(r"^```(\w*)\n(.*?)^```\n", page, flags=re.DOTALL | re.MULTILINE)
    for text, language, block in zip(parts[::3], parts[1::3], parts[2::3], strict=False):
        before = text.strip().rsplit("\n", 1)[-1]
        name = re.search(r"`([\w./-]+)`[^`]*:$", before)
        if language == "console":
            yield from commands(block)
        elif name is not None:
            yield File(name[1], block)


def commands(block: str) -> list[Command]:
    found: list[Command] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:]))
        elif found[-1].text.endswith("\\"):
            found[-1].text += "\n" + line
        else:
            found[-1].output.append(line)
    return found


def normal(text: str) -> str:
    """Replaces numbers, and the widths of columns, because they differ from run to run."""
    lines = (re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "N", line)).strip() for line in text.splitlines())
    return "\n".join(lines).strip()


def is_shown(command: Command, output: str) -> bool:
    """Returns true if the output is the one of the page. `[...]` stands for any lines, `…` for the rest of a line."""
    wanted = re.escape(normal("\n".join(command.output)))
    wanted = wanted.replace(re.escape("[...]"), "(.|\n)*").replace("…", ".*")
    return not command.output or re.fullmatch(wanted, normal(output)) is not None


def follow(page: str, instead: dict[str, str] | None = None) -> None:
    """Runs the commands of a page. `instead` maps commands that would take too long to others with the same effect."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bulkhead-page-"))
    folder.chmod(0o755)  # workers of other users read their modules below this folder
    (folder / "bulkhead").symlink_to(ROOT)
    (folder / "empty").mkdir()
    done: list[Command] = []
    script = "trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT\n"
    for step in steps((DOCS / page).read_text()):
        if isinstance(step, File):
            script += f"mkdir -p $(dirname {step.name}) && cat > {step.name} << 'END OF FILE'\n{step.text}END OF FILE\n"
        else:
            script += f"{(instead or {}).get(step.text, step.text)}\nprintf '\\n%s {MARK}\\n' $?\n"
            done.append(step)
    programs = os.path.dirname(find_supervisor())
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "BULKHEAD_SOCKET")},
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), programs, os.environ["PATH"]]),
        "C_INCLUDE_PATH": str(ROOT / "worker" / "include"),
    }
    (folder / "script").write_text(script)
    try:
        ran = subprocess.run(
            ["bash", str(folder / "script")],
            cwd=folder / "empty",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        log = "".join(path.read_text() for path in folder.glob("empty/**/supervisor.log"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outputs = re.split(rf"\n(\d+) {MARK}\n", ran.stdout)
    assert len(outputs) == 2 * len(done) + 1, ran.stdout + log
    differ = [
        f"$ {step.text}\n{output}\nstatus {status}, but the page has:\n" + "\n".join(step.output)
        for step, output, status in zip(done, outputs[::2], outputs[1::2], strict=False)
        if status != "0" or not is_shown(step, output)
    ]
    assert not differ, "\n\n".join([*differ, log])


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"NOT RUN: {program} is not installed")


def rust_program(page: str, name: str) -> pathlib.Path:
    """Returns the example that is the Rust program of a page."""
    shown = [
        step.text for step in steps((DOCS / page).read_text()) if isinstance(step, File) and "main.rs" in step.name
    ]
    source = (ROOT / "examples" / "src" / "bin" / f"{name}.rs").read_text()
    assert source.split("\n\n", 1)[1] == shown[0], f"examples/src/bin/{name}.rs differs from docs/{page}"
    program = pathlib.Path(find_supervisor()).parent / name
    if not program.exists():
        pytest.skip(f"NOT RUN: {program} is not built")
    return program


def test_page_on_workers_in_c_works() -> None:
    needs("cc")
    follow("worker-c.md")


def test_page_on_workers_in_rust_works() -> None:
    program = rust_program("worker-rust.md", "words")
    build = f"mkdir -p target/release && cp --remove-destination {program} target/release/"
    follow("worker-rust.md", {"cargo new --quiet words": "mkdir words", "cargo build --quiet --release": build})


def test_page_on_workers_in_python_works() -> None:
    follow("worker-python.md", ENVIRONMENT)


def test_page_on_clients_works() -> None:
    needs("curl")
    program = rust_program("client.md", "words-client")
    create = "mkdir -p words-client/src"
    run = "cargo run --quiet --manifest-path words-client/Cargo.toml"
    follow("client.md", {"cargo new --quiet words-client": create, run: str(program), **ENVIRONMENT})


def test_check_of_pages_finds_differences() -> None:
    shown = Command("x", ["ran 1.2 ms", "[...]", "exit…"])
    assert is_shown(shown, "ran  30 ms\nmore\nlines\nexit code 3\n")
    assert not is_shown(shown, "ran 30 s\nmore\nexit code 3\n")
    assert not is_shown(shown, "ran 30 ms\nmore\n")
    page = "Write `a/b.c` so:\n\n```c\nint x;\n```\n\nText:\n\n```console\n$ one \\\n  two\nout\n$ three\n```\n"
    assert list(steps(page)) == [File("a/b.c", "int x;\n"), Command("one \\\n  two", ["out"]), Command("three")]
