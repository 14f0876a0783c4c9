"""What pyproject.toml cannot say: one file that lies beside the packages and not in one.

Python reads a `.pth` file when it starts. This one looks at one variable, which Ray gives the driver of a submitted
job, and installs the backend there if the job's setup hook asks for it: Ray itself runs that hook in workers only.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HOOK = "miles_mooncake.pth"


class BuildWithHook(build_py):
    """Packages, and the hook. An editable install has no place for it; there the runner installs the backend."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file(HOOK, str(Path(self.build_lib) / HOOK))


setup(cmdclass={"build_py": BuildWithHook})
