"""An engine's HTTP server that computes nothing: `python -m shoal.cluster.bench.http_dummy PORT MODEL`.

What a router in front of it takes is then the router's own time. It answers at once, whatever it is asked.
"""

import json
import sys

from aiohttp import web

MAX_BODY_BYTES = 32 * 2**20


def answer(model: str) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}
    whole = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": model}
    return json.dumps({**whole, "choices": [choice], "usage": usage}).encode()


def dummy(model: str) -> web.Application:
    said, models = answer(model), {"object": "list", "data": [{"id": model, "object": "model"}]}

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=said, content_type="application/json")

    async def about(request: web.Request) -> web.Response:
        """Routers look at health, models and what else their own kind of engine tells of itself."""
        if request.path == "/v1/models":
            return web.json_response(models)
        return web.json_response({"model_path": model, "served_model_name": model, "status": "ok"})

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/{path:.*}", about)
    return app


def main() -> None:
    port, model = sys.argv[1:]
    web.run_app(dummy(model), host="127.0.0.1", port=int(port), print=None, access_log=None)


if __name__ == "__main__":
    main()
