"""Makes thumbnails in a web service. The response reports the job's outcome.

bulkhead-supervisor --config thumbnails/workers.toml &
BULKHEAD_SOCKET=... uvicorn fastapi_app:app
"""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

import bulkhead


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with bulkhead.AsyncClient() as app.state.bulkhead:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/thumbnail")
async def thumbnail(request: Request, tenant: str = "") -> Response:
    picture = await request.body()
    # If the client disconnects, the request continues until the job has an outcome, at most until its deadline.
    reply = await request.app.state.bulkhead.call("thumbnail", picture, tenant=tenant, deadline=2.0)
    return Response(bytes(reply.payload), media_type="image/jpeg")


@app.exception_handler(bulkhead.JobError)
async def tell(request: Request, error: bulkhead.JobError) -> Response:
    """Responds with 429 or 503 and Retry-After, 504 for a timeout, 422 for an invalid picture, or 502 for a crash."""
    headers = {} if error.retry_after is None else {"Retry-After": str(math.ceil(error.retry_after))}
    said = {"outcome": error.outcome.outcome, "reason": error.outcome.reason, "detail": str(error)}
    return JSONResponse(said, error.http_status, headers)
