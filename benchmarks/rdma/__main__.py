"""`python -m benchmarks.rdma` is `miles-mooncake bench rdma`."""

import sys

from miles_plugin.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "rdma"]
    sys.exit(main())
