"""The engine inside a FastAPI application: pip install fastapi uvicorn; python examples/fastapi_app.py

    curl -s --data-binary @hydra_engine/demo/pictures/stars.png 'http://127.0.0.1:8001/ask?question=Describe+the+picture.'

`hydra-engine serve` is an OpenAI-compatible server already; this is for routes of one's own.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from hydra_engine import Engine, HydraError

MODEL = "demo"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Engine(MODEL) as engine:  # loaded before the first request, closed behind the last one
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(HydraError)
async def refused(request: Request, error: HydraError) -> JSONResponse:
    """Errors of the engine know their HTTP status and say what to change."""
    return JSONResponse({"error": error.message, "param": error.param}, error.status)


@app.post("/ask")
async def ask(request: Request, question: str) -> dict[str, object]:
    picture = await request.body() or None
    result = await request.app.state.engine.agenerate(question, picture, temperature=0, max_tokens=64)
    return {"answer": result.text, "seconds": result.metrics.e2e_s}


@app.post("/stream")
async def stream(request: Request, question: str) -> StreamingResponse:
    picture = await request.body() or None
    # Refused here, while an error can still become a status; a client that leaves ends the request.
    handle = await request.app.state.engine.asubmit(question, images=picture, temperature=0, max_tokens=64)

    async def pieces() -> AsyncIterator[str]:
        try:
            async for piece in handle:
                yield piece.text
        finally:
            handle.cancel()

    return StreamingResponse(pieces(), media_type="text/plain")


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, port=8001)
