"""Follows task-oriented pages: writes the files that a page shows, runs its commands, and compares the output."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from pools import LONG, wait_for
from running import SOURCE

from bulkhead._private import find_supervisor, to_toml

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: Time limit in seconds for all commands on a page.
LIMIT = 600

#: Replacements for commands. They install the package without pip and without network access.
ENVIRONMENT = {
    "python3 -m venv venv": f"{sys.executable} -m venv --without-pip venv",
    "venv/bin/pip install --quiet ../bulkhead/python": f"cp -r {SOURCE}/bulkhead venv/lib/python*/site-packages/",
}

#: Line between the outputs of two commands.
MARK = "-- end of a command --"


@dataclass
class Command:
    """A command on a page, and the output that the page shows."""

    text: str
    output: list[str] = field(default_factory=list)


@dataclass
class File:
    """A file that a page tells the reader to write."""

    name: str
    text: str


def steps(page: str) -> Iterator[Command | File]:
    """Yields a page's files and commands in order. A file is a block after a line that ends with the file's name."""
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
        elif not found:
            continue  # a block of root's commands, which are not followed
        elif found[-1].text.endswith("\\"):
            found[-1].text += "\n" + line
        else:
            found[-1].output.append(line)
    return found


def normal(text: str) -> str:
    """Replaces numbers, durations and column widths, because these differ from run to run."""
    # A bulkhead produces at most one report on a late job per second.
    text = re.sub(r"(fewer jobs concurrently|less work); see `bulkhead crashes [^`]*`", r"\1", text)
    numbers = re.compile(r"\d+(\.\d+)?( ?(µs|ms|s|m)\b)?")
    lines = (re.sub(r"\s+", " ", numbers.sub("N", line)).strip() for line in text.splitlines())
    return "\n".join(lines).strip()


def is_shown(command: Command, output: str) -> bool:
    """Returns true if the page shows this output. `[...]` stands for any lines, `…` for the rest of a line."""
    wanted = re.escape(normal("\n".join(command.output)))
    wanted = wanted.replace(re.escape("[...]"), "(.|\n)*").replace("…", ".*")
    return not command.output or re.fullmatch(wanted, normal(output)) is not None


def follow(page: str, instead: dict[str, str] | None = None) -> None:
    """Runs a page's commands. `instead` maps commands that would take too long to equivalent, faster commands."""
    programs = os.path.dirname(find_supervisor())
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bulkhead-page-"))
    folder.chmod(0o755)  # workers that run as other users read their modules below this folder
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
    # `is-ready` names bulkheads whose workers have not reported yet, although the supervisor is ready.
    stdout = re.sub(r"(?m)^[\w-]+: starting\n", "", ran.stdout)
    outputs = re.split(rf"\n(\d+) {MARK}\n", stdout)
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
    """Returns the path of the example program that a page shows."""
    shown = [
        step.text for step in steps((DOCS / page).read_text()) if isinstance(step, File) and "main.rs" in step.name
    ]
    source = (ROOT / "examples" / "src" / "bin" / f"{name}.rs").read_text()
    assert source.split("\n\n", 1)[1] == shown[0], f"examples/src/bin/{name}.rs differs from docs/{page}"
    program = pathlib.Path(find_supervisor()).parent / name
    if not program.exists():
        pytest.skip(f"NOT RUN: {program} is not built")
    return program


def test_quick_start_works() -> None:
    follow("../README.md")


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


def test_configuration_on_production_page_is_valid(tmp_path: pathlib.Path) -> None:
    page = (DOCS / "operations/production.md").read_text()
    found = {step.name: step.text for step in steps(page) if isinstance(step, File)}
    blocks = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    added = next(block for block in blocks if "http " in block)
    main = (ROOT / "deploy/debian/workers.toml").read_text().replace("[supervisor]\n", added)
    (tmp_path / "conf.d").mkdir(mode=0o755)
    files = {"workers.toml": main, "conf.d/compress.toml": found["/etc/bulkhead/conf.d/compress.toml"]}
    for name, text in files.items():
        text = text.replace("/etc/bulkhead/", f"{tmp_path}/").replace("/var/lib/bulkhead/", f"{tmp_path}/")
        (tmp_path / name).write_text(text)
    (tmp_path / "token").write_text("0123456789abcdef\n")
    (tmp_path / "token").chmod(0o600)
    command = [find_supervisor(), "--config", str(tmp_path / "workers.toml"), "--check"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "[bulkhead.compress]" in ran.stdout


#: Bulkheads whose jobs end in every way that docs/operations/incidents.md describes.
SYMPTOMS = """
[supervisor]
socket = "jobs.sock"

[bulkhead.busy]
exec      = ["sleep", "0.3"]
max_queue = 2

[bulkhead.slow]
exec          = ["sleep", "600"]
max_in_flight = 10
max_queue     = 10
deadline_max  = "10m"

[bulkhead.breaker]
exec    = ["false"]
breaker = { window = "60s", failure_rate = 0.5 }

[bulkhead.broken]
command = ["/bin/true"]
restart = { max = 2, within = "10m", backoff = "10ms" }

[bulkhead.shared]
exec      = ["sleep", "0.3"]
max_queue = 20
tenants   = { max_in_flight = 1, max_queue = 1 }

[bulkhead.crash]
exec   = ["sh", "-c", "kill -SEGV $$"]
poison = { crashes = 2 }

[bulkhead.call]
exec    = {call}
sandbox = { profile = "strict", read = {read} }

[bulkhead.files]
exec     = ["sh", "-c", "head -c 99999999 /dev/zero > $TMPDIR/x; sleep 600"]
sandbox  = { tmp = "1MiB" }
deadline = "1m"

[bulkhead.memory]
exec    = {memory}
sandbox = { read = {read} }
rlimits = { data = "256MiB" }
"""

#: System call numbers of bpf(2).
BPF = {"x86_64": 321, "aarch64": 280}


@contextmanager
def supervisor_with_symptoms(folder: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    call = [sys.executable, "-c", f"import ctypes; ctypes.CDLL(None).syscall({BPF[os.uname().machine]}, 0, 0, 0)"]
    memory = [sys.executable, "-c", "bytes(600 << 20)"]
    keys = {"call": call, "memory": memory, "read": sorted({sys.prefix, sys.base_prefix})}
    config = SYMPTOMS
    for name, value in keys.items():
        config = config.replace(f"{{{name}}}", to_toml(value))
    (folder / "workers.toml").write_text(config)
    with open(folder / "log", "wb") as log:
        command = [find_supervisor(), "--config", str(folder / "workers.toml")]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def symptoms() -> list[str]:
    """Returns the strings in the first column of the symptom tables, without commands."""
    page = (DOCS / "operations/incidents.md").read_text()
    section = page.split("\n## Symptoms\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    texts = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    return [text for text in texts if not text.startswith("bulkhead ")]


def test_every_documented_symptom_can_be_reproduced(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o755)
    config, seen = tmp_path / "workers.toml", ""

    def run(*arguments: str, code: int | None = None, before: tuple[str, ...] = ()) -> str:
        nonlocal seen
        command = [*before, os.path.join(os.path.dirname(find_supervisor()), "bulkhead"), *arguments]
        environment = {**os.environ, "BULKHEAD_SOCKET": str(tmp_path / "jobs.sock")}
        ran = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=4 * LONG,
            check=False,
        )
        assert code is None or ran.returncode == code, f"{command}: {ran.returncode}: {ran.stdout}"
        seen += ran.stdout
        return ran.stdout

    def submit(name: str, *arguments: str, code: int | None = None) -> str:
        return run("submit", name, "-n", *arguments, code=code)

    def wait_for_event(kind: str) -> None:
        wait_for(kind, lambda: kind in run("events", "--kind", kind))

    expected = symptoms()
    assert len(expected) >= 18, expected
    run("submit", "busy", "-n", code=69)
    with supervisor_with_symptoms(tmp_path) as process:
        run("is-ready", "--wait", "60s")
        submit("busy", "--repeat", "30", "--concurrency", "15", code=75)
        run("status", "busy")
        submit("slow", "--deadline", "1s", "--repeat", "10", "--concurrency", "10", code=124)
        run("status", "slow")
        submit("breaker", "--repeat", "60", code=1)
        run("status", "breaker")
        wait_for("the bulkhead has failed", lambda: "state failed" in run("status", "broken"))
        submit("shared", "--tenant", "acme", "--repeat", "6", "--concurrency", "6", "--json", code=75)
        for code in (70, 70, 65):
            submit("crash", code=code)
        submit("call", code=70)
        submit("files", code=70)
        submit("memory", code=1)
        run("drain", "breaker", code=0)
        submit("breaker", code=75)
        run("resume", "breaker", code=0)

        # A job waits until its deadline behind a hanging job, which is then cancelled.
        run("resize", "slow", "--max-in-flight", "1", code=0)
        with ThreadPoolExecutor() as threads:
            hanging = threads.submit(submit, "slow", "--deadline", "10m", code=130)
            wait_for("the job is running", lambda: "running" in run("jobs", "slow"))
            submit("slow", "--deadline", "1s", code=124)
            listed = json.loads(run("jobs", "slow", "--json"))["jobs"]
            run("cancel", "slow", listed[0]["job"], code=0)
            hanging.result(LONG)

        if os.getuid() == 0 and shutil.which("setpriv"):
            other = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
            run("submit", "busy", "-n", before=other, code=77)
        else:
            expected.remove("this user has no access to the socket")  # only root can become another user

        good = config.read_text()
        config.write_text(good + "[[access]]\nuid = 65533\n")
        run("reload", code=0)
        submit("busy", code=77)
        config.write_text(good + "max_qeue = 1\n")
        run("reload", code=2)
        wait_for_event("config_rejected")
        check = [find_supervisor(), "--config", str(config), "--check"]
        assert subprocess.run(check, capture_output=True, check=False).returncode == 2
        config.write_text(good.replace('exec      = ["sleep", "0.3"]\nmax_queue = 2\n', 'command = ["/bin/true"]\n'))
        run("reload", code=0)
        wait_for_event("replacement_failed")
        submit("busy", code=0)
        config.write_text(good)
        run("reload", code=0)
        run("upgrade", "--unmanaged", "--program", "/bin/true", code=1)

        (tmp_path / "jobs.sock").unlink()
        wait_for_event("socket_removed")
        process.send_signal(signal.SIGHUP)
        wait_for("the socket exists again", (tmp_path / "jobs.sock").exists)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # the pause itself
        process.send_signal(signal.SIGCONT)
        wait_for_event("held_up")
    missing = [text for text in expected if text not in seen]
    assert not missing, f"{missing}\n{seen}\n{(tmp_path / 'log').read_text()}"


def test_page_check_finds_differences() -> None:
    shown = Command("x", ["ran 1.2 ms", "[...]", "exit…"])
    assert is_shown(shown, "ran  30 ms\nmore\nlines\nexit code 3\n")
    assert not is_shown(shown, "ran 30 bytes\nmore\nexit code 3\n")
    assert not is_shown(shown, "ran 30 ms\nmore\n")
    page = "Write `a/b.c` so:\n\n```c\nint x;\n```\n\nText:\n\n```console\n$ one \\\n  two\nout\n$ three\n```\n"
    assert list(steps(page)) == [File("a/b.c", "int x;\n"), Command("one \\\n  two", ["out"]), Command("three")]
