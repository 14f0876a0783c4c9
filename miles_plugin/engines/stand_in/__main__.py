"""`python -m miles_plugin.engines.stand_in --model DIR`: serve until ended; its address is one line of JSON."""

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path

from miles_plugin.engines.stand_in.engine import Engine, Settings
from miles_plugin.engines.stand_in.scheduler import Latency
from miles_plugin.engines.stand_in.server import StandInServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m miles_plugin.engines.stand_in", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0: a free one (default)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default: %(default)s)")
    parser.add_argument(
        "--prefill-seconds", type=float, default=0.0, help="until a response's first token (default: 0)"
    )
    parser.add_argument("--token-seconds", type=float, default=0.0, help="between two tokens (default: 0)")
    parser.add_argument("--group-timeout", type=float, default=1800.0, help="seconds (default: %(default)s)")
    parser.add_argument(
        "--remote-instance-weight-loader-start-seed-via-transfer-engine",
        dest="transfer_engine",
        action="store_true",
        help="let others write into the weights with a Mooncake Transfer Engine",
    )
    given = parser.parse_args()
    settings = Settings(
        given.model,
        given.host,
        given.tp,
        Latency(given.prefill_seconds, given.token_seconds),
        given.transfer_engine,
        timedelta(seconds=given.group_timeout),
    )
    server = StandInServer(given.host, given.port, Engine(settings))
    print(json.dumps({"url": server.url, "pid": os.getpid()}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
