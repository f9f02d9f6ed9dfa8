"""A Determined master over HTTP, as far as a report needs one: one experiment and its
trials.
"""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from determined.common.api import salt_and_hash

EXPERIMENT = {
    "id": 7,
    "archived": False,
    "jobId": "",
    "name": "small",
    "numTrials": 2,
    "originalConfig": "",
    "projectId": 1,
    "projectOwnerId": 1,
    "searcherType": "grid",
    "startTime": "",
    "state": "STATE_COMPLETED",
    "username": "someone",
}
TRIAL = {
    "experimentId": 7,
    "restarts": 0,
    "startTime": "",
    "state": "STATE_COMPLETED",
    "totalBatchesProcessed": 4,
}
PASSWORD = "Correct-horse-1"
USER = {"active": True, "admin": False, "username": "someone"}


def report(number, batches, group, metrics):
    """What trial `number` reported after that many batches."""
    key = "validation_metrics" if group == "validation" else "avg_metrics"
    return {
        "archived": False,
        "endTime": "2026-01-01T00:00:00Z",
        "id": 0,
        "group": group,
        "trialId": number,
        "trialRunId": 1,
        "totalBatches": batches,
        "metrics": {key: metrics},
    }


class Master:
    """Answers to the few requests that a report makes.

    Attributes:
        config: Of experiment 7.
        trials: Of experiment 7.
        reports: Of these trials, by group.
        checkpoints: Of experiment 7.
        metadata: What each trial noted on itself.
        password: The only right one.
    """

    def __init__(self, config, trials):
        self.config = config
        self.trials = list(trials)
        self.reports = {"validation": [], "training": []}
        self.checkpoints = []
        self.metadata = {}
        self.password = PASSWORD

    def answer(self, path, query):
        if path == "/api/v1/auth/login":
            return 200, json.dumps({"token": "a-token", "user": USER})
        if path == "/api/v1/master":
            return 200, json.dumps({"clusterId": "a-cluster"})
        if path.startswith("/api/v1/experiments/7"):
            rest = path.removeprefix("/api/v1/experiments/7").lstrip("/")
            return 200, json.dumps(self._experiment()[rest])
        if path == "/api/v1/trials/metrics/trial_metrics":
            wanted = parse_qs(query)
            (group,), (trial,) = wanted["group"], wanted["trialIds"]
            sent = [one for one in self.reports[group] if one["trialId"] == int(trial)]
            return 200, json.dumps({"result": {"metrics": sent}}) + "\n"
        if path.endswith("/metadata"):
            number = int(path.split("/")[-2])
            return 200, json.dumps({"metadata": {"amp": self.metadata.get(number, {})}})
        return 404, json.dumps({"message": "experiment not found"})

    def _experiment(self):
        trials, saved = self.trials, self.checkpoints
        return {
            "": {"experiment": {**EXPERIMENT, "config": self.config}},
            "trials": {"trials": trials, "pagination": _page_of(trials)},
            "checkpoints": {"checkpoints": saved, "pagination": _page_of(saved)},
        }


def _page_of(rows):
    count = len(rows)
    return {"offset": 0, "limit": 0, "startIndex": 0, "endIndex": count, "total": count}


@contextmanager
def answering(answer):
    """Answer HTTP requests meanwhile: (method, path and query, body) by (status, body).

    Yields:
        The address.
    """

    class Handler(BaseHTTPRequestHandler):
        def handle_request(self):
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = answer(self.command, self.path, sent)
            self.send_response(status)
            if status in (429, 503):
                self.send_header("Retry-After", "3600")  # as a proxy says
            self.end_headers()
            with suppress(ConnectionError):  # nobody waits for it any more
                self.wfile.write(body.encode())

        do_GET = do_POST = do_PUT = do_PATCH = handle_request  # noqa: N815 - http.server's names

        def log_message(self, format, *args):
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


@contextmanager
def serving(master, monkeypatch, folder):
    """Answer meanwhile, as the master of DET_MASTER.

    Args:
        master: Its answers.
        monkeypatch: Sets the variables of the environment.
        folder: For what the SDK wants to keep.
    """

    def answer(method, url, sent):
        if sent and salt_and_hash(master.password).encode() not in sent:
            return 403, json.dumps({"message": "user not found"})
        path, _, query = url.partition("?")
        return master.answer(path, query)

    with answering(answer) as address:
        monkeypatch.setenv("DET_MASTER", address)
        monkeypatch.setenv("DET_DEBUG_CONFIG_PATH", str(folder))
        monkeypatch.setenv("DET_USER", "someone")
        monkeypatch.setenv("DET_PASS", PASSWORD)
        yield master
