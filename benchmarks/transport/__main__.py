"""`python -m benchmarks.transport`: the same as `miles-mooncake bench transport`."""

import sys

from miles_plugin.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "transport"]
    sys.exit(main())
