"""Builds the CPU kernel beside the package. Everything else about the package is in pyproject.toml.

The kernel is a plain shared library with a C interface (no Python or torch headers), so one build serves every version
of both. Where there is no C++ compiler the package installs without it and says so when it runs.
"""

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = "src/leantune/kernels/native"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"]


class BuildKernel(build_ext):
    """Compiles with OpenMP, without it where the compiler has none, and not at all where there is no compiler."""

    def build_extension(self, ext: Extension) -> None:
        plain = list(ext.extra_compile_args)
        try:
            ext.extra_compile_args, ext.extra_link_args = [*plain, "-fopenmp"], ["-fopenmp"]
            super().build_extension(ext)
        except Exception as error:
            print(
                f"leantune: the CPU kernel could not be built with OpenMP ({error}); trying one thread", file=sys.stderr
            )
            ext.extra_compile_args, ext.extra_link_args = plain, []
            super().build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


setup(
    ext_modules=[
        Extension(
            "leantune.kernels._native",
            [f"{SOURCES}/ternary.cpp"],
            depends=[f"{SOURCES}/{name}" for name in ("ternary.h", "simd.hpp", "ternary_rows.hpp")],
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel},
)
