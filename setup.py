"""Packaging of megatron_pp. Tool settings (ruff, mypy, pytest) are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """The version is written once, in megatron_pp/__init__.py, and read without importing the package."""
    text = (HERE / "megatron_pp" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"', text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError("megatron_pp/__init__.py does not define __version__")
    return match.group(1)


def read_long_description() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


EXTRAS = {
    # The training program, examples/gpt: command line, TOML files before Python 3.11, loss plot, TensorBoard's files.
    "train": ["numpy", "tyro>=1.0", "tomli; python_version < '3.11'", "matplotlib", "tensorboard"],
    # The command line's tables and drawings.
    "viz": ["rich", "matplotlib"],
    # The plug-in for Megatron-core, and the tests that run inside it.
    "megatron": ["megatron-core>=0.16", "tqdm"],
    # Weight gradients of Transformer Engine's layers as a step of their own. Needs CUDA and a compiler.
    "te": ["transformer-engine[pytorch]"],
    "test": [
        *("pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "numpy", "ruff", "mypy", "import-linter"),
        # What the Python of Transformer Engine imports, which scripts/setup_env.sh gets for the tests.
        *("einops", "onnxscript", "pydantic>=2"),
        "selenium>=4.10",  # HTML drawings in a headless browser
    ],
}
# apex (its fused weight gradient kernel) is deliberately no extra: the package called `apex` on PyPI is something
# else. Build it from https://github.com/NVIDIA/apex with its CUDA extensions; megatron_pp looks for it at run time.
EXTRAS["all"] = sorted({package for name, packages in EXTRAS.items() if name != "te" for package in packages})

setup(
    name="megatron-pp",
    version=read_version(),
    description="Pipeline-parallel schedules for Megatron-style training: overlapped, verified, given back in time",
    long_description=read_long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_pp", "megatron_pp.*"]),
    package_data={"megatron_pp": ["py.typed", "draw/page/*"]},
    python_requires=">=3.10",
    # An open range: clusters bring their own torch. The scripts pin one in scripts/constraints.txt.
    install_requires=["torch>=2.6"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-pp = megatron_pp.cli.command_line:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Operating System :: POSIX",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
