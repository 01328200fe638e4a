"""Encodes arrays, images and frames as plain fields, so that results from compromised workers can be read safely.

In the worker, ``_pool_worker`` calls ``dumps``, which converts a value to fields. In the caller, ``_data`` reads the
pickle and calls the functions in ``MAKERS``, which check the fields and build the value with public constructors of the
library. Its function ``allocate`` limits the total memory, because a pickle can use the same fields many times. The
caller never imports a library for this purpose, so a value from a library that is not imported yet is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

#: Modules whose exceptions are accepted, because their constructors only store the arguments.
ERROR_MODULES = frozenset(
    (
        *("_csv", "_lzma", "_pickle", "binascii", "decimal", "gzip", "json.decoder", "re", "re._constants", "sqlite3"),
        *("struct", "subprocess", "tarfile", "tomllib", "xml.etree.ElementTree", "zipfile", "zlib"),
        *("PIL", "PIL.Image", "numpy.exceptions", "numpy.linalg", "pandas.errors"),
    )
)
#: Data types of arrays of numbers, strings and times. Object arrays are not accepted.
_DTYPE = re.compile(r"[<>|][biufcSUmM]\d{1,9}(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_DIMENSIONS_MAX, _DIMENSION_MAX = 32, 1 << 48
#: Maximum dimension of an array without values and of a frame without columns, and maximum side length of an image.
_EMPTY_MAX, _SIDE_MAX = 1 << 20, 1 << 24
#: Image modes by the number of bits per pixel. Rows are padded to whole bytes.
_MODES = {
    1: "1",
    8: "L P",
    16: "LA PA La I;16 I;16L I;16B I;16N",
    24: "RGB YCbCr LAB HSV",
    32: "RGBA RGBa RGBX CMYK I F",
}
_PIXEL_BITS = {mode: bits for bits, modes in _MODES.items() for mode in modes.split()}
_PANDAS_DTYPE = re.compile(r"object|str|string|boolean|U?Int(8|16|32|64)|Float(32|64)")
_ZONE = re.compile(r"(?!dateutil)[A-Za-z0-9_+:-]{1,64}(/[A-Za-z0-9_+-]{1,64}){0,2}")
#: Maximum number of hashed values, unless all are strings. Otherwise, a worker could send many numbers with equal
#: hashes.
_HASHED_MAX = 4096
#: Assumed size in bytes of a column without its values, and of a value without its text.
_COLUMN_BYTES, _CELL_BYTES = 2048, 16
#: Number of values of a category column whose text is measured at a time.
_MEASURED = 1 << 20
_CELLS = frozenset({str, bytes, int, float, bool, type(None), date, datetime, time, timedelta, Decimal})


#: Accounts for a number of bytes before they are allocated. Raises ``Refused`` if there are too many.
Allocate = Callable[[int], object]


class Refused(pickle.UnpicklingError):
    """A value of an unsupported kind. The text names the value."""


def _library(name: str) -> Any:
    if name not in sys.modules:
        raise Refused(f"a value of {name}; this program must import {name} before the call")
    return sys.modules[name]


def _refuse(name: Any) -> Any:
    raise Refused(name[:200] if type(name) is str else "a value without a name")


# Encoding in the worker.


def _array_fields(array: Any, is_scalar: bool = False) -> tuple[Any, ...]:
    numpy = sys.modules["numpy"]
    descr = array.dtype.str if array.dtype.names is None else array.dtype.descr
    if array.dtype.hasobject or not array.dtype.itemsize or numpy.dtype(descr) != array.dtype:
        return refuse, (f"an array of {array.dtype}",)
    is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    flat = (array.T if is_fortran else numpy.ascontiguousarray(array)).reshape(-1).view("u1")
    return make_array, (descr, None if is_scalar else array.shape, is_fortran, pickle.PickleBuffer(flat))


def _image_fields(image: Any) -> tuple[Any, ...]:
    data, palette = image.tobytes(), None
    if image.palette is not None and image.mode in ("P", "PA"):
        palette = image.palette.mode, bytes(image.getpalette(image.palette.mode))
    info = {name: value for name, value in image.info.items() if type(name) is str and type(value) in _CELLS}
    return make_image, (image.mode, image.size, pickle.PickleBuffer(data), palette, info)


def _column(values: Any) -> tuple[Any, ...]:
    """Returns the fields of a column: its kind, its values, and further details."""
    dtype = values.dtype
    if hasattr(values, "cat"):
        return "category", values.cat.codes.to_numpy(), _column(dtype.categories.to_series()), dtype.ordered
    if getattr(dtype, "tz", None) is not None:
        return str(dtype.tz), values.dt.tz_convert(None).to_numpy()
    if dtype.kind != "O" and type(dtype).__module__.startswith("numpy"):
        return "array", values.to_numpy()
    return str(dtype).partition("[")[0], list(values.astype(object).where(values.notna(), None))


def _frame_fields(frame: Any, is_series: bool = False, labels: Sequence[Any] = ()) -> tuple[Any, ...]:
    index, labels = frame.index, list(labels or frame.columns)
    counted = sys.modules["pandas"].RangeIndex(len(index))
    # `equals` does not compare types: [False, True] and [0.0, 1.0] equal [0, 1].
    is_counted = isinstance(index, type(counted)) and index.equals(counted)
    levels = [] if is_counted else [index.get_level_values(at).to_series() for at in range(index.nlevels)]
    columns = [_column(values) for values in (*levels, *(frame.iloc[:, at] for at in range(len(labels))))]
    names = list(index.names), labels, list(frame.columns.names)
    return make_frame, (columns, len(levels), len(index), *names, is_series)


_FIELDS: dict[tuple[str, str], Callable[[Any], tuple[Any, ...]]] = {
    ("numpy", "ndarray"): _array_fields,
    ("numpy", "generic"): lambda scalar: _array_fields(sys.modules["numpy"].asarray(scalar), True),
    ("PIL.Image", "Image"): _image_fields,
    ("pandas", "DataFrame"): _frame_fields,
    # The frame's label is 0 if the series has no name.
    ("pandas", "Series"): lambda series: _frame_fields(series.to_frame(), True, [series.name]),
}


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind.__module__.startswith(("numpy", "PIL.", "pandas")) and not isinstance(value, (type, BaseException)):
            for (module, name), fields in _FIELDS.items():
                known = getattr(sys.modules.get(module), name, ())
                # Other subclasses are refused, because the fields would lose their additional data.
                if kind is known or (name in ("generic", "Image") and isinstance(value, known)):
                    return fields(value)
            return refuse, (f"{kind.__module__}.{kind.__qualname__}",)
        return NotImplemented


def dumps(value: Any, protocol: int = 5, buffer_callback: Any = None) -> bytes:
    """Pickles a value like ``pickle.dumps``, but with arrays, images and frames as plain fields."""
    file = io.BytesIO()
    _Pickler(file, protocol, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()


# Decoding in the caller. Any other exception caused by invalid fields also leads to a refusal.


def _dtype(descr: Any) -> Any:
    numpy = _library("numpy")
    if type(descr) is str:
        return numpy.dtype(descr) if _DTYPE.fullmatch(descr) else _refuse(f"an array of {descr}")
    # Each field has a name, a type, and optionally a shape.
    return numpy.dtype([(str(field[0]), _dtype(field[1]), *map(_shape, field[2:])) for field in descr])


def _shape(shape: Any) -> tuple[int, ...]:
    if len(shape) > _DIMENSIONS_MAX or any(type(n) is not int or not 0 <= n < _DIMENSION_MAX for n in shape):
        _refuse("an array with an invalid shape")
    return tuple(shape)


def _check_bools(array: Any) -> None:
    """Refuses bytes other than 0 and 1 in boolean arrays, because numpy counts larger bytes more than once."""
    for name in array.dtype.names or ():
        _check_bools(array[name])
    if array.dtype.kind == "b" and array.size and array.view("u1").max() > 1:
        _refuse("a boolean array with values other than true and false")


def refuse(_allocate: Allocate, name: Any) -> Any:
    """Refuses a value that the worker could not convert to fields."""
    _refuse(name)


def make_array(allocate: Allocate, descr: Any, shape: Any, is_fortran: Any, data: Any) -> Any:
    """Returns an array, or a scalar if ``shape`` is None."""
    dtype, sizes = _dtype(descr), _shape(shape or ())
    size = len(_bytes(data))
    if not dtype.itemsize or math.prod(sizes) * dtype.itemsize != size or (not size and max(sizes) > _EMPTY_MAX):
        _refuse(f"an array of shape {sizes} with {size} bytes")
    allocate(size)
    array = _library("numpy").ndarray(sizes, dtype, data, order="F" if is_fortran else "C")
    _check_bools(array)
    return array[()] if shape is None else array


def make_image(allocate: Allocate, mode: Any, size: Any, data: Any, palette: Any, info: Any) -> Any:
    """Returns an instance of ``PIL.Image.Image``, whatever file format the image was read from."""
    library, (width, height) = _library("PIL.Image"), _shape(size)
    bytes_of_row = (width * _PIXEL_BITS[mode] + 7) // 8
    if bytes_of_row * height != len(_bytes(data)) or max(width, height) > _SIDE_MAX:
        _refuse(f"an image of {width} by {height} with {len(data)} bytes")
    # The library uses up to 4 bytes for a pixel, and a pointer for a row.
    allocate(height * (4 * width + 8))
    image = library.frombytes(mode, (width, height), data)
    if palette is not None:
        image.putpalette(_bytes(palette[1]), palette[0] if palette[0] in ("RGB", "RGBA") else _refuse("a palette"))
    _cells(allocate, list(info.values()))
    image.info = info if {str}.issuperset(map(type, info)) else _refuse("an image with names that are not strings")
    return image


def _bytes(data: Any) -> Any:
    return data if type(data) in (bytes, bytearray, memoryview) else _refuse("an object without bytes")


def _cells(allocate: Allocate, cells: Any) -> Any:
    if type(cells) is not list or not _CELLS.issuperset(map(type, cells)):
        _refuse("a frame with values other than numbers, strings and dates")
    # A list can contain the same string many times.
    allocate(_CELL_BYTES * len(cells) + sum(map(_text_bytes, cells)))
    return cells


def _text_bytes(cell: Any) -> int:
    return len(cell) if type(cell) in (str, bytes) else 0


def _column_values(allocate: Allocate, column: Any) -> Any:
    values = _made(allocate, *column)
    allocate(_COLUMN_BYTES + values.nbytes)
    return values


def _made(allocate: Allocate, kind: Any, values: Any, *fields: Any) -> Any:
    """Returns an array with the values of a column."""
    pandas = _library("pandas")
    if type(values) is list:
        cells = _cells(allocate, values)
        return pandas.array(cells, dtype=kind if _PANDAS_DTYPE.fullmatch(kind) else _refuse(kind))
    if type(values) is not sys.modules["numpy"].ndarray:
        _refuse("a column without values")
    if kind == "category":
        names, is_ordered = fields
        categories = _hashable(_made(allocate, *names))
        column = pandas.Categorical.from_codes(values, categories, ordered=is_ordered is True)
        # The last size is for the code -1, a missing value.
        sizes = sys.modules["numpy"].array([*map(_text_bytes, column.categories), 0])
        for at in range(0, len(column), _MEASURED):
            allocate(int(sizes[column.codes[at : at + _MEASURED]].sum()))
        return column
    if kind != "array":
        zone = kind if _ZONE.fullmatch(kind) else _refuse(f"the time zone {kind}")
        return pandas.DatetimeIndex(values).tz_localize("UTC").tz_convert(zone)
    return values


def _hashable(values: Any) -> Any:
    if len(values) > _HASHED_MAX and sys.modules["pandas"].api.types.infer_dtype(values) != "string":
        _refuse(f"more than {_HASHED_MAX} categories or multi-level labels that are not strings")
    return values


def make_frame(
    allocate: Allocate,
    columns: Any,
    levels: Any,
    rows: Any,
    names: Any,
    labels: Any,
    label_names: Any,
    is_series: Any,
) -> Any:
    """Returns a frame, or a series. The first ``levels`` columns are the index; without them, rows are numbered."""
    pandas = _library("pandas")
    if type(rows) is not int or not 0 <= rows <= (_DIMENSION_MAX if columns else _EMPTY_MAX):
        _refuse("a frame with an invalid number of rows")
    made = [_column_values(allocate, column) for column in columns]
    index = pandas.RangeIndex(rows) if not levels else pandas.Index(made[0])
    if levels > 1:
        index = pandas.MultiIndex.from_arrays([*map(_hashable, made[:levels])])
    if type(labels) is list and {tuple} == set(map(type, labels)):
        header = pandas.MultiIndex.from_tuples([(*_cells(allocate, [*label]),) for label in labels])
    else:
        header = pandas.Index(_cells(allocate, labels)) if labels else pandas.RangeIndex(0)
    frame = pandas.DataFrame(dict(enumerate(map(pandas.Series, made[levels:]))), index=None if made[levels:] else index)
    frame.index = index.set_names(_cells(allocate, names))
    frame.columns = header.set_names(_cells(allocate, label_names))
    return frame.iloc[:, 0] if is_series is True else frame


MAKERS = {function.__name__: function for function in (refuse, make_array, make_image, make_frame)}
