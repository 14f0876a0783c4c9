"""`python -m miles_plugin.engines.sglang_cpu.server <flags of sglang.launch_server>`.

The stand-ins are installed at import time, not under `__main__`: SGLang starts its scheduler and detokenizer with
the spawn method, which imports the parent's main module in each child before it unpickles the child's target, and
that is how the children get them too. (A package's `__main__.py` would be skipped there.)
"""

import os
import runpy

from miles_plugin.engines.sglang_cpu import stubs

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# What SGLang compiles under tensor parallelism takes a C++ compiler and, at the first request, half a minute.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
stubs.install()

from miles_plugin.engines.sglang_cpu import hooks  # noqa: E402  (sglang imports only once the stand-ins are there)

hooks.register()

# What SGLang needs to be told on a CPU; flags given later on the command line win.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--grammar-backend", "none"),
    # For the model and its cache, of the memory that is free before the model is loaded.
    *("--mem-fraction-static", "0.3", "--skip-server-warmup"),
    # An idle scheduler polls without pause otherwise, and takes a whole core from the trainers.
    "--sleep-on-idle",
)

if __name__ == "__main__":
    import sys

    sys.argv[1:1] = CPU_FLAGS
    runpy.run_module("sglang.launch_server", run_name="__main__")
