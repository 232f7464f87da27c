"""A stand-in for a wandb server: it answers the GraphQL queries with which wandb's public API reads one run."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def wandb_server(path: str, config: dict, rows: list[dict]):
    """The address of a server that holds one run. path: entity/project/run. rows: of its history, with `_step`."""
    entity, _, name = path.split("/")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

        def do_POST(self) -> None:
            if self.path != "/graphql":  # telemetry
                self.send_error(404)
                return
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps({"data": answer(asked["query"], asked.get("variables") or {})}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def answer(query: str, variables: dict) -> dict:
        if "viewer" in query:
            return {"viewer": {"id": "1", "entity": entity, "username": entity, "email": "", "flags": "{}"}}
        if {variables.get("name"), variables.get("run"), variables.get("runName")} & {name} == set():
            return {"project": {"run": None}}
        if "parquetHistory" in query:
            run = {"parquetHistory": {"parquetUrls": [], "liveData": []}}
        elif "history(" in query:
            low, high = int(variables["minStep"]), int(variables["maxStep"])
            run = {"history": [json.dumps(row) for row in rows if low <= row["_step"] < high]}
        else:
            run = {
                "id": "1",
                "projectId": "1",
                "name": name,
                "displayName": name,
                "state": "finished",
                "tags": [],
                "user": {"name": entity, "username": entity},
                "config": json.dumps({key: {"value": value} for key, value in config.items()}),
                "summaryMetrics": "{}",
                "systemMetrics": "{}",
                "historyLineCount": len(rows),
                "historyKeys": {"lastStep": max(row["_step"] for row in rows)},
            }
        return {"project": {"run": run}}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
