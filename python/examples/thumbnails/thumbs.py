"""Makes thumbnails of untrusted pictures."""

import io

from PIL import Image

import bulkhead

#: Maximum number of pixels. Larger pictures are rejected before decoding.
PIXELS_MAX = 50_000_000


@bulkhead.initializer
def load() -> None:
    # Loads the decoders now, because Pillow would load them on first use, when the sandbox is already in force.
    Image.init()


@bulkhead.handler
def thumbnail(payload: bytes, ctx: bulkhead.Context) -> bytes:
    try:
        with Image.open(io.BytesIO(payload)) as picture:
            if picture.width * picture.height > PIXELS_MAX:
                raise bulkhead.HandlerError("too_many_pixels", f"{picture.size} pixels", fault="caller")
            picture.thumbnail((128, 128))
            result = io.BytesIO()
            picture.convert("RGB").save(result, "JPEG")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise bulkhead.HandlerError("no_picture", str(error), fault="caller") from error
    return result.getvalue()
