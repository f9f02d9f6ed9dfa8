"""As much of a Determined master, over HTTP, as a detached run talks to.

What it keeps, and what it makes of a new run of a trial, is what the real one does:
`tests/test_cluster.py` holds a real one against the same run.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

PASSWORD = "Correct-horse-1"
TOKEN = "a-token-that-no-file-of-a-run-may-hold"
EXPERIMENT = {
    "id": 7,
    "archived": False,
    "config": {},
    "jobId": "",
    "name": "",
    "numTrials": 1,
    "originalConfig": "",
    "projectId": 1,
    "projectOwnerId": 1,
    "searcherType": "single",
    "startTime": "",
    "state": "STATE_RUNNING",
    "username": "",
}
TRIAL = {
    "id": 8,
    "experimentId": 7,
    "hparams": {},
    "restarts": 0,
    "startTime": "",
    "state": "STATE_RUNNING",
    "taskId": "a-task",
    "totalBatchesProcessed": 0,
}


@contextmanager
def answering(answer: Callable[[str, str, bytes], tuple[int, str]]) -> Iterator[str]:
    """Answer HTTP requests meanwhile: (method, path and query, body) by (status, body).

    Yields:
        The address.
    """

    class Handler(BaseHTTPRequestHandler):
        def handle_request(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, said = answer(self.command, self.path, sent)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said.encode())

        do_GET = do_POST = do_PUT = do_PATCH = handle_request  # noqa: N815 - http.server's names

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # It looks that often whether it is to end; by default twice a second.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class FakeMaster:
    """One master with room for one experiment.

    Attributes:
        external_ids: Of the experiment and the trial, as often as they were asked for.
        config: The experiment configuration, as text.
        reports: (run, group, batches, metrics) of every report that was taken, in order.
        checkpoints: Metadata and files by storage id; a deleted one has no files.
        states: What the trial was said to be.
        log: What the trial logged.
        asked: The path of every request, in order.
        away: Answer as a proxy does whose master is away.
        silent: Paths that are never answered.
        failing: By path, how often it is still answered with 500.
        nonsense: Paths that are answered with null.
        refused: Paths that are answered with 400.
        forbidden: Paths that are answered with 403.
    """

    def __init__(self) -> None:
        self.external_ids: list[str] = []
        self.config = ""
        self.run = 0
        self.reports: list[tuple[int, str, int, dict[str, Any]]] = []
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.states: list[str] = []
        self.log = ""
        self.asked: list[str] = []
        self.away = False
        self.silent: set[str] = set()
        self.failing: dict[str, float] = {}
        self.nonsense: set[str] = set()
        self._ended = threading.Event()
        self.refused: set[str] = set()
        self.forbidden: set[str] = set()
        self.address = ""

    def listed(self) -> list[tuple[int, str, int, dict[str, Any]]]:
        """The reports that hold: each run replaced those of earlier ones from its first on."""
        kept: list[tuple[int, str, int, dict[str, Any]]] = []
        for report in self.reports:
            run, group, batches, _ = report
            kept = [
                r
                for r in kept
                if r[0] == run or r[2] < batches or (r[2] == batches and r[1] != group)
            ]
            kept.append(report)
        return kept

    @contextmanager
    def serving(self) -> Iterator[FakeMaster]:
        """Answer meanwhile, at `address`."""

        def answer(method: str, url: str, sent: bytes) -> tuple[int, str]:
            path = url.partition("?")[0].removeprefix("/api/v1")
            status, said = self.answer(method, path, url, json.loads(sent or b"{}"))
            return status, json.dumps(said)

        with answering(answer) as self.address:
            try:
                yield self
            finally:
                self._ended.set()  # a silent answer would keep the server from its end

    def answer(self, method: str, path: str, url: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(path)
        if path in self.silent:
            self._ended.wait()
        faulty = self._faulty_answer(path)
        if faulty is not None:
            return faulty
        if path.startswith("/experiments/by-external-id/"):
            self.external_ids.append(path.rsplit("/", 1)[1])
            self.config = body["config"]
            return 200, {"config": {}, "experiment": EXPERIMENT}
        route = self.routes.get((method, path))
        if route is None:
            return 404, {}
        return 200, route(self, url, body) or {}

    def _faulty_answer(self, path: str) -> tuple[int, Any] | None:
        left = self.failing.get(path, 0)
        self.failing[path] = left - 1
        faults = [
            (self.away, 503, {}),
            (left > 0, 500, {}),
            (path in self.nonsense, 200, None),
            (path in self.refused, 400, {"error": {"error": "refused for a test"}}),
            (path in self.forbidden, 403, {}),
        ]
        return next(((status, said) for is_so, status, said in faults if is_so), None)

    def log_in(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        user = {"active": True, "admin": False, "username": body["username"]}
        return {"token": TOKEN, "user": user}

    def put_trial(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        self.external_ids.append(body["externalTrialId"])
        return {"trial": TRIAL}

    def start_trial(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        self.run += 1
        return {"stepsCompleted": 0, "trialRunId": self.run}

    def patch_trial(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        self.states += [body["state"]] if body.get("state") else []
        return {"trial": TRIAL}

    def take_report(self, url: str, body: dict[str, Any]) -> None:
        sent = body["metrics"]
        numbers = sent["metrics"]["avgMetrics"]
        self.reports.append((sent["trialRunId"], body["group"], sent["stepsCompleted"], numbers))

    def give_reports(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        (wanted,) = re.findall(r"group=(\w+)", url)
        common = {"archived": False, "endTime": "", "id": 1, "trialId": 8}
        reports = [
            {**common, "group": group, "metrics": m, "totalBatches": batches, "trialRunId": run}
            for run, group, batches, m in self.listed()
            if group == wanted
        ]
        return {"result": {"metrics": reports}}

    def give_checkpoints(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        count = len(self.checkpoints)
        page = {"startIndex": 0, "endIndex": count, "total": count}
        return {"checkpoints": list(self.checkpoints.values()), "pagination": page}

    def take_checkpoint(self, url: str, body: dict[str, Any]) -> None:
        self.checkpoints[body["uuid"]] = body

    def patch_checkpoints(self, url: str, body: dict[str, Any]) -> None:
        for gone in body["checkpoints"]:
            self.checkpoints[gone["uuid"]] |= {"resources": {}, "state": "STATE_DELETED"}

    def take_log(self, url: str, body: dict[str, Any]) -> None:
        self.log += "".join(line["log"] for line in body["logs"])

    routes: ClassVar[dict[tuple[str, str], Callable[..., dict[str, Any] | None]]] = {
        ("GET", "/master"): lambda self, url, body: {"clusterId": "fake"},
        ("POST", "/auth/login"): log_in,
        ("PUT", "/trials"): put_trial,
        ("POST", "/trials/8/start"): start_trial,
        ("PATCH", "/trials/8"): patch_trial,
        ("POST", "/runs/start"): lambda self, url, body: {"storageId": 1},
        ("POST", "/trials/8/progress"): lambda self, url, body: None,
        ("POST", "/trials/8/metrics"): take_report,
        ("GET", "/trials/metrics/trial_metrics"): give_reports,
        ("GET", "/trials/8/checkpoints"): give_checkpoints,
        ("POST", "/checkpoints"): take_checkpoint,
        ("PATCH", "/checkpoints"): patch_checkpoints,
        ("POST", "/task/logs"): take_log,
    }
