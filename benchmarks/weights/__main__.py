"""`python -m benchmarks.weights` is `miles-mooncake bench weights`."""

import sys

from miles_plugin.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "weights"]
    sys.exit(main())
