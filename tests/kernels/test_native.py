"""The C library is found where it was built, refused where it is not right, and shares torch's threads."""

import ctypes
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from batchrun_kernels import native

SOURCES = Path(native.__file__).parent / "c"


@pytest.mark.skipif(native.find() is None, reason="needs the C kernels: a C compiler at installation")
def test_only_one_openmp_library_is_loaded_and_torch_sets_its_number_of_threads() -> None:
    """Two would mean two pools of threads that fight for the same cores."""
    code = (
        "from batchrun_kernels import native; import torch; torch.set_num_threads(3);"
        "print(native.needed().batchrun_threads());"
        "maps = open('/proc/self/maps').read().splitlines();"
        "print(len({line.split()[-1] for line in maps if 'gomp' in line or 'libomp' in line or 'iomp' in line}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["3", "1"]


def test_worse_instructions_can_be_chosen(library: ctypes.CDLL) -> None:
    assert native.limit(library, "portable") == "portable"


def test_without_a_library_the_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(native.NativeUnavailableError, match="were not built"):
        native.load(tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(b"nothing")
    with pytest.raises(native.NativeUnavailableError, match="cannot be loaded"):
        native.load(tmp_path)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    """A stale one would be called with arguments that it takes for others."""
    (tmp_path / "old.c").write_text("int batchrun_version(void) { return 0; }")
    built = tmp_path / f"_native{EXTENSION_SUFFIXES[0]}"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(built), str(tmp_path / "old.c")], check=True)
    with pytest.raises(native.NativeUnavailableError, match="is of version 0"):
        native.load(tmp_path)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    flags = ["-O1", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    subprocess.run(["gcc", *flags, "-o", str(tmp_path / "out.so"), str(SOURCES / "native.c")], check=True)
