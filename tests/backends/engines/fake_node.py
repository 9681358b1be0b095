"""Stands in for a part of a multi-node SGLang server: `fake_node.py -m sglang.launch_server …`.

Meets the others at --dist-init-addr, is healthy once all are there, and ends when one is gone, as
NCCL would. Answers `/model_info` on node 0 with what it was launched with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

parser = argparse.ArgumentParser()
for name in ("--model-path", "--weight-version", "--dist-init-addr", "--host"):
    parser.add_argument(name)
for name in ("--port", "--nccl-port", "--nnodes", "--node-rank"):
    parser.add_argument(name, type=int)
args, _ = parser.parse_known_args()

meeting = (args.dist_init_addr.rpartition(":")[0], int(args.dist_init_addr.rpartition(":")[2]))
nccl = socket.create_server(("0.0.0.0", args.nccl_port))  # fails if somebody has it
peers: list[socket.socket] = []
if args.node_rank == 0:
    server = socket.create_server(meeting)
    peers += [server.accept()[0] for _ in range(args.nnodes - 1)]
else:
    while not peers:
        try:
            peers.append(socket.create_connection(meeting, timeout=60))
        except ConnectionRefusedError:
            threading.Event().wait(0.05)
    peers[0].settimeout(None)


def watch(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.recv(1)
    os._exit(1)


for peer in peers:
    threading.Thread(target=watch, args=(peer,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/health" or (self.path == "/model_info" and args.node_rank == 0)
        body = json.dumps({"model_path": args.model_path, "weight_version": args.weight_version})
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        self.send_response(200 if args.node_rank == 0 else 404)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        return


ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
