"""The C kernels; what else the package is, pyproject.toml says."""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("kernels", "batchrun_kernels", "c")

setup(
    ext_modules=[
        Extension(
            "batchrun_kernels._native",
            sources=[str(SOURCES / "native.c")],
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            extra_compile_args=["-O3", "-g0", "-fopenmp", "-Wno-psabi"],
            extra_link_args=["-fopenmp"],
            # Without a C compiler the package installs all the same, and torch computes.
            optional=True,
        )
    ]
)
