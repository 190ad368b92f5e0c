"""Packaging of megatron_pp. Tool settings (ruff, mypy, pytest) are in pyproject.toml."""

import os
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


def project_urls() -> dict[str, str]:
    """Links for the package index. MEGATRON_PP_URL, the repository's address, is set by whoever publishes a release."""
    repository = os.environ.get("MEGATRON_PP_URL", "").rstrip("/")
    pages = {
        "Repository": "",
        "Documentation": "/blob/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: repository + page for name, page in pages.items()} if repository else {}


def read_readme() -> str:
    """The README. Its links lead to the repository, if its address is known: the package index has only this file."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    repository = os.environ.get("MEGATRON_PP_URL", "").rstrip("/")
    if not repository:
        return text
    text = re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{repository}/raw/v{read_version()}/', text)
    return re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/v{read_version()}/", text)


EXTRAS = {
    # The training program, examples/gpt: command line, progress, loss plot, TensorBoard's files.
    "train": ["numpy", "tyro>=1.0", "tqdm", "matplotlib", "tensorboard"],
    # Drawings as SVG and PNG files.
    "viz": ["matplotlib"],
    # The plug-in for Megatron-core, and the tests that run inside it.
    "megatron": ["megatron-core>=0.16", "pyyaml", "tqdm"],
    # Transformer Engine, whose layers can delay their weight gradients. Needs CUDA and a compiler.
    "te": ["transformer-engine[pytorch]"],
    # The documentation site; scripts/docs.sh builds it.
    "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.27"],
    # Packages that build and check a release; scripts/check_wheel.sh uses them.
    "release": ["build>=1.2", "setuptools>=77", "wheel", "twine>=6"],
    "test": [
        *("pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "numpy", "ruff", "mypy", "import-linter"),
        # A test builds the source distribution and the wheel.
        *("build>=1.2", "setuptools>=77", "wheel"),
        # Packages that Transformer Engine's Python imports; scripts/setup_env.sh installs that Python for the tests.
        *("einops", "onnxscript", "pydantic>=2"),
        "pytest-mock>=3.10",  # for Megatron-LM's own tests, if a checkout is given
        "selenium>=4.10",  # opens HTML drawings in a headless browser
    ],
}
# apex, for its fused weight gradient kernel, is deliberately not an extra: `apex` on PyPI is a different project.
# Build it from https://github.com/NVIDIA/apex with its CUDA extensions; megatron_pp uses it if it is installed.
EXTRAS["all"] = sorted({package for name, packages in EXTRAS.items() if name != "te" for package in packages})

setup(
    name="megatron-pp",
    version=read_version(),
    description="Pipeline-parallel schedules for Megatron-style training, overlapped and verified",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    author="The megatron_pp authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["pipeline parallelism", "distributed training", "PyTorch", "Megatron", "zero bubble"],
    project_urls=project_urls(),
    packages=find_packages(include=["megatron_pp", "megatron_pp.*"]),
    package_data={"megatron_pp": ["py.typed", "tools/check/*.toml", "tools/draw/page/*", "tools/flags/*.csv"]},
    python_requires=">=3.10",
    install_requires=[
        # An open range: clusters bring their own torch. The scripts pin one in scripts/constraints.txt.
        "torch>=2.6",
        # Tables and drawings of the command line.
        "rich>=13",
        # Types of keyword arguments, which ``typing`` has only from Python 3.11 on; torch needs this package too.
        "typing_extensions>=4.10",
        # TOML files: settings of the plug-in, and of the training program.
        "tomli; python_version < '3.11'",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-pp = megatron_pp.tools.cli.command_line:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
