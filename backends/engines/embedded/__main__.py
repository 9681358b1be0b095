"""`python -m stepwell.backends.engines.embedded --model-path DIR --port N` runs the engine.

Flag names are SGLang's where SGLang has them. Exit code 2: the configuration cannot work (one line
says why); 1: the generation loop failed; 0: stopped by SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from stepwell.datapool.heap import settle_heap

DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
GIL_SWITCH_S = 0.0005
"""A torch op gives up the GIL and wants it back some microseconds later; with Python's default
of 5 ms a busy event loop would stall the generation thread that long after every op."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stepwell.backends.engines.embedded")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tokenizer-path", help="default: the model path")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto", choices=DTYPE_NAMES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lora-paths", metavar="NAME=PATH", help="an adapter to start with")
    parser.add_argument(
        "--start-paused", action="store_true", help="generate only after /continue_generation"
    )
    parser.add_argument("--log-level", default="warning")
    args = parser.parse_args(argv)
    for name in ("max_running_requests", "threads", "stream_interval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be >= 1")
    if not (Path(args.model_path) / "config.json").is_file():
        parser.error(
            f"--model-path is {args.model_path!r}, which has no config.json; "
            "point it at a Hugging Face model directory"
        )
    return args


def _listen(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen(2048)
    return sock


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(name)s: %(message)s")
    # Read when torch starts its thread pools, so set before torch is imported.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(args.threads)
    try:
        sock = _listen(args.host, args.port)
    except OSError as e:
        print(f"--port is {args.port}: {e.strerror} on {args.host}", file=sys.stderr)
        return 2

    import torch
    import uvicorn
    from transformers import AutoTokenizer

    from stepwell.backends.engines.embedded.loop import GenerationLoop
    from stepwell.backends.engines.embedded.model import ModelRunner
    from stepwell.backends.engines.embedded.reply import StopStrings
    from stepwell.backends.engines.embedded.scheduler import Scheduler
    from stepwell.backends.engines.embedded.server import ServerInfo, create_app

    torch.set_num_threads(args.threads)
    tokenizer_path = args.tokenizer_path or args.model_path
    info = ServerInfo(args.model_path, tokenizer_path, args.stream_interval)

    def stop_serving() -> None:
        server.should_exit = True

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        runner = ModelRunner(
            args.model_path,
            dtype=args.dtype,
            device=args.device,
            context_length=args.context_length,
            max_running=args.max_running_requests,
            n_retained=args.max_running_requests,
        )
        if args.lora_paths is not None:
            name, _, path = args.lora_paths.rpartition("=")
            runner.adapters.load(name or path, path)
        eos = tokenizer.eos_token_id
        scheduler = Scheduler(
            runner,
            stop_strings=StopStrings(tokenizer),
            weight_version=args.weight_version,
            model_path=args.model_path,
            extra_eos_ids=() if eos is None else (eos,),
            seed=args.seed,
            paused=args.start_paused,
        )
        loop = GenerationLoop(scheduler, threads=args.threads)
        app = create_app(loop, tokenizer, info, on_failure=stop_serving)
    except (OSError, ValueError) as e:
        print(f"cannot load {args.model_path!r}: {e}", file=sys.stderr)
        return 2
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level=args.log_level,
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
        )
    )
    sys.setswitchinterval(GIL_SWITCH_S)
    settle_heap()
    host, port = sock.getsockname()[:2]
    print(f"embedded engine listens on http://{host}:{port}", flush=True)
    server.run(sockets=[sock])
    return 1 if loop.failure is not None else 0


if __name__ == "__main__":
    sys.exit(main())
