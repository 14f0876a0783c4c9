"""`python -m benchmarks.fully_async` is `miles-mooncake bench async`."""

import sys

from miles_plugin.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "async"]
    sys.exit(main())
