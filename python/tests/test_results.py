"""Tests of results from confined workers: accepted values, refused values, and malicious fields."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from fractions import Fraction
from typing import Any

import pytest
import results
from pools import LONG

from bulkhead import BulkheadExecutor, ResultRefused, _data, _libraries
from bulkhead._data import DataOnly, allow, loads

try:
    import numpy
except ImportError:
    numpy = None
try:
    import PIL.Image as images
except ImportError:
    images = None
try:
    import pandas
except ImportError:
    pandas = None
LIBRARIES = {"numpy": numpy, "PIL": images, "pandas": pandas}


def need(code: str) -> None:
    for name, module in LIBRARIES.items():
        if name in code and module is None:
            pytest.skip(f"NOT RUN: {name} is not installed")


@pytest.fixture(scope="module")
def pool() -> Iterator[BulkheadExecutor]:
    classes = [results.Point, results.Pair, results.Colour, results.Slotted, results.OwnError, Fraction]
    with BulkheadExecutor(1, sandbox="default", results=["data", *classes]) as executor:
        yield executor


@pytest.mark.parametrize(
    "code",
    [
        "numpy.arange(10)[::3]",
        "numpy.asfortranarray(numpy.arange(12).reshape(3, 4))",
        "numpy.zeros((0, 3), 'f4')",
        "numpy.array(3.5)",
        "numpy.array(['a', 'bcd'])",
        "numpy.array([1, 2], 'M8[s]')",
        "numpy.array([(1, [2, 3], True)], [('a', 'i4'), ('b', 'f8', (2,)), ('c', '?')])",
        "numpy.arange(200_000)",
        "numpy.arange(2_000_000).reshape(1000, 2000)",
        "numpy.float64(2.5)",
        "numpy.datetime64('2020-01-02')",
    ],
)
def test_accepts_arrays_and_scalars(pool: BulkheadExecutor, code: str) -> None:
    need(code)
    expected, found = results.evaluate(code), pool.submit(results.evaluate, code).result(LONG)
    assert type(found) is type(expected)
    assert (found.dtype, found.shape, found.flags.f_contiguous) == (
        expected.dtype,
        expected.shape,
        expected.flags.f_contiguous or code.startswith("numpy.arange(10)"),
    )
    assert (found == expected).all()
    assert found.ndim == 0 or found.flags.writeable


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "I", "F", "I;16"])
def test_accepts_images(pool: BulkheadExecutor, mode: str) -> None:
    code = f"PIL.Image.linear_gradient('L').resize((301, 99)).convert({mode!r})"
    need(code)
    expected, found = results.evaluate(code), pool.submit(results.evaluate, code).result(LONG)
    assert (found.mode, found.size, found.tobytes(), found.getpalette(), found.info) == (
        expected.mode,
        expected.size,
        expected.tobytes(),
        expected.getpalette(),
        expected.info,
    )


FRAMES = [
    "pandas.DataFrame({'a': [1, 2], 'b': ['x', None], 'c': [True, False], 'd': [1.5, None]})",
    "pandas.DataFrame({'a': pandas.to_datetime(['2020-01-01', None]), 'b': pandas.Categorical(['u', 'v'])})",
    "pandas.DataFrame({'a': pandas.array([1, None], 'Int64'), 'b': pandas.array([True, None], 'boolean')})",
    "pandas.DataFrame({'a': pandas.to_datetime(['2020-01-01', '2020-07-01']).tz_localize('Europe/Rome')})",
    "pandas.DataFrame({'k': [1, 1], 'l': ['a', 'b'], 'v': [1.0, 2.0]}).groupby(['k', 'l']).sum()",
    "pandas.DataFrame({('a', 'x'): [1], ('a', 'y'): [2]}, index=['row'])",
    "pandas.DataFrame(index=range(5))",
    "pandas.DataFrame({'a': [1, 2]}, index=[False, True])",
    "pandas.DataFrame({'a': [1, 2]}, index=[0.0, 1.0])",
    "pandas.DataFrame({'a': [1]}, index=['row'])[:0]",
    "pandas.Series([1, 2], name='s', index=['a', 'b'])",
    "pandas.Series([1, 2], name=('s', 't'))",
    "pandas.Series([1, 2])",
]


@pytest.mark.parametrize("code", FRAMES)
def test_accepts_frames(pool: BulkheadExecutor, code: str) -> None:
    need(code)
    expected, found = results.evaluate(code), pool.submit(results.evaluate, code).result(LONG)
    assert type(found) is type(expected)
    getattr(pandas.testing, "assert_series_equal" if "Series" in code else "assert_frame_equal")(found, expected)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("json.loads('{')", json.JSONDecodeError),
        ("zlib.decompress(b'x')", zlib.error),
        ("subprocess.CalledProcessError(3, ['x'], b'out')", subprocess.CalledProcessError),
        ("numpy.linalg.inv(numpy.zeros((2, 2)))", "numpy.linalg.LinAlgError"),
        ("PIL.Image.open('/dev/null')", "PIL.UnidentifiedImageError"),
        ("pandas.errors.EmptyDataError('none')", "pandas.errors.EmptyDataError"),
    ],
)
def test_accepts_library_exceptions(pool: BulkheadExecutor, code: str, kind: Any) -> None:
    need(code)
    error = pool.submit(results.evaluate, code).exception(LONG)
    assert type(error) is kind or f"{type(error).__module__}.{type(error).__qualname__}" == kind
    assert "Traceback" in str(error.__cause__)


def test_accepts_instances_of_named_classes(pool: BulkheadExecutor) -> None:
    for name in ("Point", "Pair", "Colour", "Fraction"):
        assert pool.submit(results.own, name).result(LONG) == results.own(name)
    assert pool.submit(results.own, "Slotted").result(LONG).value == 5
    error = pool.submit(results.fail, results.OwnError(7, "seven")).exception(LONG)
    assert isinstance(error, results.OwnError)
    assert (error.args, error.code) == ((7, "seven"), 7)


@pytest.mark.parametrize(
    ("call", "argument", "name"),
    [
        (results.own, "OtherError", "results.OtherError"),
        (results.fail, results.OtherError("x"), "results.OtherError"),
        (results.evaluate, "numpy.array([object()])", "an array of object"),
        (results.evaluate, "numpy.ma.zeros(3)", "MaskedArray"),
        (results.evaluate, "pandas.DataFrame({'a': [[1]]})", "a frame"),
    ],
)
def test_refusal_names_class_and_remedy(pool: BulkheadExecutor, call: Any, argument: Any, name: str) -> None:
    need(str(argument))
    error = pool.submit(call, argument).exception(LONG)
    assert isinstance(error, ResultRefused)
    assert not isinstance(error, BrokenProcessPool)
    assert name in str(error)
    assert "results=" in str(error)
    assert pool.submit(int, "3").result(LONG) == 3


@pytest.mark.parametrize("given", [["any"], [results.OwnError], "some", []])
def test_invalid_results_options_are_rejected(given: Any) -> None:
    with pytest.raises(ValueError, match="results must be"):
        BulkheadExecutor(1, results=given)


@pytest.mark.parametrize("kind", [SystemExit, StopIteration, 3, "own"])
def test_rejects_invalid_result_classes(kind: Any) -> None:
    with pytest.raises(TypeError, match="results"):
        BulkheadExecutor(1, results=["data", kind])


# Malicious fields.


class _Made:
    """Pickles itself as a call of a function."""

    def __init__(self, function: Callable[..., Any], *fields: Any) -> None:
        self.fields = function, fields

    def __reduce__(self) -> tuple[Any, ...]:
        return self.fields


ARRAYS: list[tuple[Any, ...]] = [
    ("|O", (1,), False, bytes(8)),
    ([("a", "|O")], (1,), False, bytes(8)),
    ([("a", [("b", "|O")])], (1,), False, bytes(8)),
    ({"names": ["a"], "formats": ["|O"]}, (1,), False, bytes(8)),
    ("O,O", (1,), False, bytes(16)),
    ("<f8", (-1,), False, b""),
    ("<f8", (-1, -1), False, bytes(8)),
    ("<f8", (2,), False, bytes(8)),
    ("<f8", (1,), False, bytes(16)),
    ("<f8", (1 << 62, 4), False, b""),
    ("<f8", (0, 1 << 40), False, b""),
    ("<f8", (1.0,), False, bytes(8)),
    ("<f8", (True,), False, bytes(8)),
    ("<f8", 3, False, bytes(24)),
    ("<f8", (1,) * 40, False, bytes(8)),
    ("<U0", (1 << 40,), False, b""),
    ("|b1", (2,), False, b"\1\2"),
    ([("a", "|b1"), ("b", "|u1")], (1,), False, b"\2\2"),
    ("<f8", (1,), False, "12345678"),
    ("<f8", (1,), False, [0] * 8),
    ("<f8", None, False, bytes(16)),
    ("|V8", (1,), False, bytes(8)),
    (None, (1,), False, bytes(8)),
]


@pytest.mark.parametrize("fields", ARRAYS)
def test_rejects_forged_arrays(fields: tuple[Any, ...]) -> None:
    need("numpy")
    with pytest.raises(DataOnly):
        loads(pickle.dumps(_Made(_libraries.make_array, *fields), 5))


@pytest.mark.parametrize(
    "fields",
    [
        ("RGB", (1 << 20, 1 << 20), b"", None, {}),
        ("RGB", (2, 2), bytes(11), None, {}),
        ("RGB", (-2, -2), bytes(12), None, {}),
        ("RGB", (0, 1 << 40), b"", None, {}),
        ("XYZ", (2, 2), bytes(12), None, {}),
        ("L", (2, 2, 2), bytes(8), None, {}),
        ("L", (2, 2), bytes(4), None, {"a": [1]}),
        ("L", (2, 2), bytes(4), None, {1: 2}),
        ("P", (2, 2), bytes(4), ("RGB", [0] * 3), {}),
        ("P", (2, 2), bytes(4), ("x", bytes(1000)), {}),
    ],
)
def test_rejects_forged_images(fields: tuple[Any, ...]) -> None:
    need("PIL")
    with pytest.raises(DataOnly):
        loads(pickle.dumps(_Made(_libraries.make_image, *fields), 5))


@pytest.mark.parametrize(
    "columns",
    [
        [("object", [[1]])],
        [("object", [print])],
        [("dateutil//etc/passwd", _Made(_libraries.make_array, "<M8[ns]", (1,), False, bytes(8)))],
        [("../../etc/passwd", _Made(_libraries.make_array, "<M8[ns]", (1,), False, bytes(8)))],
        [("category", _Made(_libraries.make_array, "|i1", (1,), False, b"\5"), ("str", ["a"]), False)],
        [("category", _Made(_libraries.make_array, "|i1", (1,), False, b"\0"), ("object", [*range(9999)]), False)],
        [("interval", [1])],
        [("array", 3)],
        [("str", ["x" * 100_000] * 100_000)],
        [("str", ["a"]), ("str", ["a", "b"])],
    ],
)
def test_rejects_forged_frames(columns: Any) -> None:
    need("pandas")
    labels = [*range(len(columns))]
    with pytest.raises(DataOnly):
        loads(pickle.dumps(_Made(_libraries.make_frame, columns, 0, 1, [None], labels, [None], False), 5))


@pytest.mark.parametrize("rows", [10**9, 1 << 70, -1, 1.0, True, range(3), None])
def test_rejects_frames_with_forged_numbers_of_rows(rows: Any) -> None:
    need("pandas")
    with pytest.raises(DataOnly):
        loads(pickle.dumps(_Made(_libraries.make_frame, [], 0, rows, [None], [], [None], False), 5))


def repeated(what: str) -> Any:
    """Returns an object that is over a hundred times larger than its pickle."""
    size, data, info = 1 << 16, bytes(1 << 16), {}
    if what == "images":
        return [_Made(_libraries.make_image, "L", (256, 256), data, None, info) for _ in range(1000)]
    if what == "empty images":
        return [_Made(_libraries.make_image, "L", (0, 1 << 24), b"", None, info) for _ in range(100)]
    if what == "arrays":
        return [_Made(_libraries.make_array, "|b1", (size,), False, data) for _ in range(1000)]
    codes = _Made(_libraries.make_array, "|i1", (size,), False, data)
    column: tuple[Any, ...] = ("array", codes)
    if what == "category":
        column = ("category", codes, ("str", ["x" * 1000]), False)
    if what == "values":
        column = ("str", [None] * size)
    columns = [column] * (1 if what in ("category", "frames") else 1000)
    labels = [*range(len(columns))]
    return [
        _Made(_libraries.make_frame, columns, 0, size, [None], labels, [None], False)
        for _ in range(1000 if what == "frames" else 1)
    ]


@pytest.mark.parametrize("what", ["images", "empty images", "arrays", "columns", "frames", "category", "values"])
def test_repeated_fields_cannot_exhaust_memory(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need("PIL" if "images" in what else "numpy pandas")
    monkeypatch.setattr(_data, "WEIGHT_MAX", 1 << 20)
    pickled = pickle.dumps(repeated(what), 5)
    assert len(pickled) < 1 << 19
    with pytest.raises(DataOnly, match="far more memory"):
        loads(pickled)


def test_accepts_columns_that_repeat_text(monkeypatch: pytest.MonkeyPatch) -> None:
    need("numpy pandas")
    monkeypatch.setattr(_data, "WEIGHT_MAX", 1 << 20)
    rows = 1 << 16
    for frame in (
        pandas.DataFrame({"a": pandas.Categorical.from_codes(numpy.zeros(rows, "i1"), ["x" * 50])}),
        pandas.DataFrame({"a": ["x" * 50] * rows}),
    ):
        for is_apart in (False, True):
            buffers: list[Any] = []
            pickled = _libraries.dumps(frame, buffer_callback=buffers.append if is_apart else None)
            found = loads(pickled, buffers)
            assert bool(buffers) == (is_apart and hasattr(frame["a"], "cat"))
            pandas.testing.assert_frame_equal(found, frame)


def test_rejects_functions_and_buffers_as_values() -> None:
    for pickled in (
        pickle.dumps(_libraries.make_array),
        pickle.dumps([_libraries.make_image]),
        b"\x80\x05\x97.",
        b"\x80\x05]\x97a.",
        b"\x80\x05\x97\x98.",
        b"\x80\x05N\x98.",
        b"\x80\x05\x97)R.",
    ):
        for buffers in ((), (bytearray(9),)):
            with pytest.raises(DataOnly):
                loads(pickled, buffers)


def test_reading_a_result_does_not_import_modules() -> None:
    need("numpy PIL")
    pickled = [
        pickle.dumps(_Made(_libraries.make_array, "<f8", (1,), False, bytes(8))),
        pickle.dumps(_Made(_libraries.make_image, "L", (2, 2), bytes(4), None, {})),
        pickle.dumps(zlib.error("x")),
        b"\x80\x04\x8c\x06pandas\x8c\x09DataFrame\x93)R.",
        # These modules import any requested name.
        b"\x80\x04\x8c\x08bulkhead\x8c\x06Client\x93)R.",
        b"\x80\x04\x8c\x12concurrent.futures\x8c\x13ProcessPoolExecutor\x93)R.",
    ]
    code = f"""
import concurrent.futures, sys
from bulkhead._data import DataOnly, loads
before = set(sys.modules)
for pickled in {pickled!r}:
    try:
        loads(pickled)
    except DataOnly as error:
        print(error)
print(set(sys.modules) - before, "numpy" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LONG)
    assert ran.stdout.count("import") == 2
    assert ran.stdout.endswith("set() False\n")


def test_nested_instances_count_towards_the_limits() -> None:
    allowed = allow([results.Pair, results.Point])
    value: Any = 1
    for _ in range(300):
        value = results.Pair(value, value)
    for deep in (value, results.Point(value, 2)):
        with pytest.raises(DataOnly, match="often"):
            loads(pickle.dumps(deep, 5), (), allowed)
    with pytest.raises(DataOnly, match="results.Point"):
        loads(pickle.dumps(results.Point(1, 2)))


def test_nested_pool_accepts_classes_of_the_main_module() -> None:
    kind = type("Kind", (), {"__module__": "__mp_main__"})
    found = allow([kind])
    for module in (b"__main__", b"__mp_main__"):
        pickled = b"\x80\x04\x8c" + bytes((len(module),)) + module + b"\x8c\x04Kind\x93)\x81."
        assert type(loads(pickled, (), found)) is kind
