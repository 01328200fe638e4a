"""Tests that the package's modules have no circular imports."""

from __future__ import annotations

import ast
import graphlib
import pathlib

import bulkhead

PACKAGE = pathlib.Path(bulkhead.__file__).parent


def imports(module: pathlib.Path) -> set[str]:
    """Returns the package modules that a module imports anywhere, including in functions and for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("bulkhead"):
            found.add(node.module.partition(".")[2])
    return found - {"", "__version__"}


def test_modules_have_no_circular_imports() -> None:
    # The package itself imports its modules on first use.
    modules = [module for module in PACKAGE.glob("*.py") if module.stem != "__init__"]
    graph = {module.stem: imports(module) for module in modules}
    assert "_serve" in graph["_start"]
    assert set().union(*graph.values()) <= set(graph)
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(graph)
