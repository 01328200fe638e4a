"""Runs the examples unchanged. test_packaging.py runs example.py."""

from __future__ import annotations

import importlib.util
import io
import os
import pathlib
import random
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from pools import LONG
from running import SOURCE, Supervisor, running

from bulkhead import AsyncClient, Client, Crashed, DeadlineExceeded, Failed

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"

tomllib: Any = pytest.importorskip("tomllib")  # since 3.11
Image: Any = pytest.importorskip("PIL.Image")


def keys_of_the_example(**changes: Any) -> dict[str, Any]:
    """Returns the example's configuration keys, with this interpreter and its module paths."""
    keys: dict[str, Any] = tomllib.loads((EXAMPLES / "thumbnails" / "workers.toml").read_text())["bulkhead"][
        "thumbnail"
    ]
    keys["command"][0] = os.path.abspath(sys.executable)
    keys["cwd"] = str(EXAMPLES / "thumbnails")
    keys["env"] = {"PYTHONPATH": SOURCE}
    keys["sandbox"]["read"] = sorted({keys["cwd"], SOURCE, sys.prefix, sys.base_prefix})
    keys["restart"] = {"backoff": "10ms", "max": 1000, "within": "1s"}
    keys["deadline"] = f"{LONG:.0f}s"
    return {**keys, **changes}


def picture(size: tuple[int, int] = (640, 480), how: str = "PNG") -> bytes:
    made = io.BytesIO()
    Image.radial_gradient("L").resize(size).save(made, how)
    return made.getvalue()


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    with running(thumbnail=keys_of_the_example()) as one:
        yield one


def test_thumbnail_worker_survives_hostile_pictures(supervisor: Supervisor) -> None:
    with Client(supervisor.socket) as client:
        for how in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"):
            result = client.call("thumbnail", picture(how=how)).payload
            assert Image.open(io.BytesIO(result)).size == (128, 96)
        # A decompression bomb: few bytes, but a huge number of pixels.
        with pytest.raises(Failed) as failed:
            client.call("thumbnail", picture((20_000, 20_000)))
        assert failed.value.outcome.fault == "caller"
        chance = random.Random(1)
        good = [picture((200, 200), how) for how in ("PNG", "JPEG", "GIF", "TIFF")]
        jobs = []
        for number in range(200):
            content = bytearray(good[number % 4])
            for _ in range(chance.randrange(1, 30)):
                content[chance.randrange(len(content))] = chance.randrange(256)
            jobs.append(client.submit("thumbnail", content[: chance.randrange(len(content))], deadline=2))
            if len(jobs) % 15 == 0:
                jobs[-1].exception(LONG)
        for job in jobs:
            error = job.exception(LONG)
            assert error is None or isinstance(error, (Failed, Crashed, DeadlineExceeded)), error
        assert client.call("thumbnail", picture()).payload
        confinement = str(supervisor.snapshot("thumbnail")["workers"][0]["confinement"])
        assert "seccomp" in confinement


def test_web_service_responds_with_the_outcome(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    testclient = pytest.importorskip("fastapi.testclient")
    pytest.importorskip("httpx")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("BULKHEAD_SOCKET", supervisor.socket)
    module = importlib.import_module("fastapi_app")
    call = AsyncClient.call
    # The example's deadline is too short for a busy machine.
    monkeypatch.setattr(AsyncClient, "call", lambda *job, **options: call(*job, **{**options, "deadline": LONG}))
    with testclient.TestClient(module.app) as web:
        answer = web.post("/thumbnail?tenant=acme", content=picture())
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
        answer = web.post("/thumbnail", content=b"no picture")
        assert (answer.status_code, answer.json()["reason"]) == (422, "no_picture")
        answer = web.post("/thumbnail", content=bytes(21 << 20))
        assert answer.status_code == 413
        supervisor.request("POST", "/v1/bulkheads/thumbnail/drain")
        answer = web.post("/thumbnail", content=picture())
        assert (answer.status_code, answer.json()["reason"]) == (503, "draining")
        assert int(answer.headers["retry-after"]) >= 1
        supervisor.request("POST", "/v1/bulkheads/thumbnail/resume")
    with running(thumbnail=keys_of_the_example(rate_limit={"per_second": 0.01, "burst": 1}, run_limit="1ms")) as own:
        monkeypatch.setenv("BULKHEAD_SOCKET", own.socket)
        with testclient.TestClient(module.app) as web:
            assert web.post("/thumbnail", content=picture((3000, 3000))).status_code == 504
            answer = web.post("/thumbnail", content=picture())
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1


def test_celery_tasks_share_a_client(supervisor: Supervisor, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("celery")
    for name in ("broker", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "good").write_bytes(picture())
    (tmp_path / "bad").write_bytes(b"no picture")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{SOURCE}:{EXAMPLES}",
        "BULKHEAD_SOCKET": supervisor.socket,
        "CELERY_BROKER": "filesystem://",
        "CELERY_BACKEND": f"file://{tmp_path}/results",
        "CELERY_FOLDER": str(tmp_path / "broker"),
    }
    asking = f"""
import celery_tasks, bulkhead
assert celery_tasks.client.call("thumbnail", open({str(tmp_path / "good")!r}, "rb").read()).payload
tasks = [celery_tasks.thumbnail.delay({str(tmp_path / "good")!r}) for _ in range(12)]
bad = celery_tasks.thumbnail.delay({str(tmp_path / "bad")!r})
sizes = {{task.get(timeout={4 * LONG}) for task in tasks}}
assert len(sizes) == 1 and sizes.pop() > 300
print(bad.get(timeout={4 * LONG}, propagate=False))
"""
    command = [sys.executable, "-m", "celery", "-A", "celery_tasks", "worker", "--concurrency", "2", "-l", "warning"]
    with open(tmp_path / "log", "wb") as log:
        worker = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
        try:
            run = subprocess.run(
                [sys.executable, "-c", asking],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                timeout=5 * LONG,
                check=False,
            )
            assert b"no_picture" in run.stdout, run.stderr.decode() + (tmp_path / "log").read_text()
        finally:
            worker.terminate()
            try:
                worker.wait(LONG)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def test_every_example_is_tested() -> None:
    tested = {"example.py", "fastapi_app.py", "celery_tasks.py", "thumbnails"}
    assert {path.name for path in EXAMPLES.iterdir()} - {"__pycache__"} == tested
    page = (EXAMPLES.parents[1] / "docs" / "python.md").read_text()
    assert all(name in page for name in tested)


def block(beginning: str) -> str:
    """Returns the example in docs/python.md that begins with the given text."""
    page = (EXAMPLES.parents[1] / "docs" / "python.md").read_text()
    found = re.search(rf"^( *)```python\n\1{re.escape(beginning)}.*?^\1```$", page, re.DOTALL | re.MULTILINE)
    assert found is not None, beginning
    return textwrap.dedent("\n".join(found[0].splitlines()[1:-1]))


@pytest.mark.parametrize("n_jobs", [4, -1])
def test_documented_joblib_backend_works(n_jobs: int, tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec("joblib") is None:
        pytest.skip("NOT RUN: joblib is not installed")
    code = block("from joblib import").replace("    Parallel()(", "    print(*Parallel()(") + ")"
    code = code.replace("n_jobs=4", f"n_jobs={n_jobs}")
    body = "import os\nfrom bulkhead import BulkheadExecutor\nif __name__ == '__main__':\n" + textwrap.indent(
        code, "    "
    )
    (tmp_path / "program.py").write_text(body)
    ended = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=2 * LONG, check=False
    )
    assert ended.stdout.split() == [str(abs(number)) for number in range(-9, 9)], ended.stderr
